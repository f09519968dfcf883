"""Weights through a directory that trainer and server share: any vLLM or embedded server on the same host."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verifiers.errors import WeightSyncError
from verifiers.train.weight_sync.server import ServerControl

__all__ = ["DirectorySync"]


class DirectorySync:
    """Writes each version once, tells the server to load it, and removes it when it is loaded.

    Args:
        base_url: of the rollout server.
        directory: where versions are written; a new one under /dev/shm, or the temporary directory where there
            is no /dev/shm, when left out.
        timeout_s: deadline for one push, in seconds.
    """

    def __init__(
        self, base_url: str, directory: str | None = None, timeout_s: float = 120.0, api_key: str = "EMPTY"
    ) -> None:
        self.server = ServerControl(base_url, api_key, timeout_s)
        self._parent = directory
        self._made: Path | None = None

    def connect(self, deadline_s: float) -> None:
        self.server.wait_until_healthy(deadline_s)
        try:
            self.server.request("GET", "/weight_info")
        except WeightSyncError as error:
            raise WeightSyncError(
                f"the server at {self.server.root} has no weight routes, so it cannot be trained against ({error}); "
                "use vf-serve, or vLLM with VLLM_SERVER_DEV_MODE=1."
            ) from error

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named_parameters}
        directory = self._write(tensors, version)
        server = self.server
        try:
            server.request("POST", "/pause?mode=keep", {})
            try:
                load = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
                server.request("POST", "/collective_rpc", load)
                server.request("POST", "/update_weight_version", {"new_version": str(version)})
            except WeightSyncError:
                # the first failure is the one to report
                with contextlib.suppress(WeightSyncError):
                    server.request("POST", "/resume", {}, timeout_s=5.0)
                raise
            server.request("POST", "/resume", {})
        except WeightSyncError as error:
            raise WeightSyncError(
                f"the weights of step {version} did not reach the rollout server: {error}"
            ) from error
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)

    def _write(self, tensors: dict[str, Any], version: int) -> Path:
        from safetensors.torch import save_file

        parent = self._directory()
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free = shutil.disk_usage(parent).free
        if needed > free:
            raise WeightSyncError(
                f"{parent} has {free / 1e6:,.0f} MB free, and a push needs {needed / 1e6:,.0f} MB; "
                "set weight_sync_dir to a place with more room."
            )
        directory = parent / f"version-{version}"
        partial = parent / f".version-{version}.partial"
        for old in (directory, partial):
            shutil.rmtree(old, ignore_errors=True)
        partial.mkdir()
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt", "version": str(version)})
        # the server must never see half a version
        return partial.rename(directory)

    def _directory(self) -> Path:
        if self._made is None:
            shared_memory = Path("/dev/shm")
            parent = self._parent or (str(shared_memory) if shared_memory.is_dir() else None)
            if self._parent is not None:
                Path(self._parent).mkdir(parents=True, exist_ok=True)
            self._made = Path(tempfile.mkdtemp(prefix="verifiers-weights-", dir=parent))
        return self._made
