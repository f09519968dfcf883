"""Weights through a directory that trainer and servers share: any vLLM or embedded server on the same host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verifiers.train.weight_sync.files import VersionFiles
from verifiers.train.weight_sync.fleet import Fleet, Held
from verifiers.train.weight_sync.server import ServerControl

__all__ = ["DirectorySync"]


class DirectorySync:
    """Writes each version once and tells the servers to load it.

    The newest version is kept until the next one is loaded, so that a server that was started again gets it by
    HTTP alone; older ones are removed. So there must be room for two.

    Args:
        base_url: of the rollout server, or of several.
        directory: where versions are written; a new one under /dev/shm, or the temporary directory where there
            is no /dev/shm, when left out.
        timeout_s: deadline for one push, in seconds; a single server may start again within it.

    Attributes:
        fleet: the servers.
        sends_tied: tied weights are sent under each of their names, for servers that keep the old head otherwise.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        directory: str | None = None,
        timeout_s: float = 120.0,
        api_key: str = "EMPTY",
    ) -> None:
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        self.fleet = Fleet(urls, api_key, timeout_s)
        self.sends_tied = False
        self._files = VersionFiles(directory)

    @property
    def server(self) -> ServerControl:
        """One of the servers that are up."""
        return self.fleet.servers[0]

    def connect(self, deadline_s: float) -> None:
        self.fleet.connect(deadline_s)

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named_parameters}
        _give_own_memory(tensors)
        directory = self._files.write(tensors, version, name="model.safetensors")

        def load(server: ServerControl, timeout_s: float) -> None:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            server.request("POST", "/collective_rpc", body, timeout_s=timeout_s)

        push_files(self.fleet, Held(version, load), self._files, directory)

    def close(self) -> None:
        try:
            self.fleet.close()
        finally:
            self._files.close()


def push_files(fleet: Fleet, held: Held, files: VersionFiles, directory: Path) -> None:
    """Push what stands in `directory`, and then remove what came before it; or remove it where that fails."""
    try:
        fleet.push(held)
    except BaseException:
        files.remove(directory)
        raise
    files.keep_only(directory)


def _give_own_memory(tensors: dict[str, Any]) -> None:
    """Tied tensors share memory, which a file of tensors cannot say: each but the first becomes a copy."""
    seen = set()
    for name, tensor in tensors.items():
        place = tensor.data_ptr()
        if place in seen and tensor.numel():
            tensors[name] = tensor.clone()
        seen.add(place)
