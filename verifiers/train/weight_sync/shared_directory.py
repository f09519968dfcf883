"""Weights through a directory that trainer and servers share: any vLLM or embedded server on the same host."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import WeightSyncError
from verifiers.inference.server_pool import Load, WeightUpdate
from verifiers.train.weight_sync.protocol import ServerSync

__all__ = ["DirectorySync", "VersionFiles"]

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "verifiers-weights-"


class VersionFiles:
    """A directory with one file of tensors a version, each whole or absent; the newest is kept.

    A process that is killed cannot remove its versions, which in /dev/shm are memory. So each directory is locked for
    as long as its process lives, and those that no process holds are removed when the next run makes its own.

    Args:
        parent: where the directory of versions is made; /dev/shm, or the temporary directory where there is no
            /dev/shm, when left out.
    """

    def __init__(self, parent: str | None = None) -> None:
        self._parent = parent
        self._made: Path | None = None
        self._lock: int | None = None
        self._removing: threading.Thread | None = None

    def write(
        self, tensors: Mapping[str, Any], version: int, *, name: str, config: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a new version and return its directory.

        Args:
            tensors: in host memory.
            version: the optimizer step they come from.
            name: of the file that holds the tensors.
            config: written beside it as adapter_config.json, for an adapter.

        Raises:
            WeightSyncError: there is no room; nothing was written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        parent = self.directory()
        self._removed()
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        free = shutil.disk_usage(parent).free
        if needed > free:
            raise WeightSyncError(
                f"{parent} has {free / 1e6:,.0f} MB free, and a push needs {needed / 1e6:,.0f} MB beside the version "
                "before it; set weight_sync_dir to a place with more room."
            )
        directory = parent / f"version-{version}"
        partial = parent / f".version-{version}.partial"
        for old in (directory, partial):
            shutil.rmtree(old, ignore_errors=True)
        try:
            partial.mkdir()
            save_file(dict(tensors), partial / name, metadata={"format": "pt", "version": str(version)})
            if config is not None:
                (partial / "adapter_config.json").write_text(json.dumps(config))
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise WeightSyncError(
                f"the weights of step {version} could not be written to {parent}: {error}"
            ) from error
        # a server must never see half a version
        return partial.rename(directory)

    def keep_only(self, directory: Path | None) -> None:
        """Remove every version but this one, in a thread."""
        if self._made is None:
            return
        others = [other for other in self._made.iterdir() if other != directory]
        self._removed()
        # freeing a gigabyte takes the kernel some 50 ms
        self._removing = threading.Thread(target=_remove_all, args=(others,), name="verifiers-files", daemon=True)
        self._removing.start()

    def _removed(self) -> None:
        """Wait until the removal that runs has ended, and its room is free."""
        removing, self._removing = self._removing, None
        if removing is not None:
            removing.join()

    def remove(self, directory: Path) -> None:
        """Remove one version."""
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Remove all of it. May be called twice."""
        self._removed()
        (made, self._made), (lock, self._lock) = (self._made, None), (self._lock, None)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if lock is not None:
            os.close(lock)

    def directory(self) -> Path:
        """Return the directory of the versions, made at the first call."""
        if self._made is None:
            parent = self._parent or (str(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None)
            if self._parent is not None:
                Path(self._parent).mkdir(parents=True, exist_ok=True)
            else:
                # not where file systems of other hosts may be: their locks cannot be relied on
                _remove_abandoned(Path(parent or tempfile.gettempdir()))
            self._made, self._lock = _make_locked(parent)
            # the server may run as another user
            self._made.chmod(0o755)
        return self._made


def _remove_all(directories: list[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _make_locked(parent: str | None) -> tuple[Path, int]:
    """Make a directory and return it with the descriptor that locks it; it gets its name when it is locked."""
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getpid()}-", dir=parent))
    descriptor = os.open(made, os.O_RDONLY)
    # a file system without locks is one where nothing is removed
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return made.rename(made.with_name(made.name.removeprefix("."))), descriptor


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}[0-9]*-*"):
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except OSError:
            # gone, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            # its process lives
            continue
        finally:
            os.close(descriptor)


class DirectorySync(ServerSync):
    """A weight sync that writes each version once and tells the servers to load it.

    The newest version is kept until the next one is loaded, so that a server that was restarted gets it by HTTP
    alone; older ones are removed. So there must be room for two.

    Args:
        base_url, timeout_s, api_key: as of `ServerSync`.
        directory: where versions are written; a new one under /dev/shm, or the temporary directory where there
            is no /dev/shm, when left out.
    """

    kind = "directory"
    can_send_tied = True

    def __init__(
        self,
        base_url: str | Sequence[str],
        directory: str | None = None,
        timeout_s: float = 120.0,
        api_key: str = "EMPTY",
    ) -> None:
        super().__init__(base_url, timeout_s, api_key)
        self._files = VersionFiles(directory)

    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named_parameters}
        _copy_shared_memory(tensors)
        directory = self._write(tensors, version)

        try:
            self.pool.run(self.pool.push(WeightUpdate(version, self._load_of(directory))))
        except BaseException:
            self._files.remove(directory)
            raise
        self._files.keep_only(directory)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._files.close()

    def _write(self, tensors: Mapping[str, Any], version: int) -> Path:
        return self._files.write(tensors, version, name="model.safetensors")

    def _load_of(self, directory: Path) -> Load:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        return lambda server, timeout_s: server.request("POST", "/collective_rpc", body, timeout_s)


def _copy_shared_memory(tensors: dict[str, Any]) -> None:
    """Replace tensors that share memory with an earlier one by copies, as a file of tensors cannot hold ties."""
    seen = set()
    for name, tensor in tensors.items():
        place = tensor.data_ptr()
        if place in seen and tensor.numel():
            tensors[name] = tensor.clone()
        seen.add(place)
