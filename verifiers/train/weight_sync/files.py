"""Versions of weights as directories that servers on the same host read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.errors import WeightSyncError

__all__ = ["VersionFiles"]


class VersionFiles:
    """Writes each version once, whole or not at all, and keeps the newest.

    Args:
        parent: where the directory of versions is made; /dev/shm, or the temporary directory where there is no
            /dev/shm, when left out.
    """

    def __init__(self, parent: str | None = None) -> None:
        self._parent = parent
        self._made: Path | None = None

    def write(
        self, tensors: Mapping[str, Any], version: int, *, name: str, config: Mapping[str, Any] | None = None
    ) -> Path:
        """The directory of a new version.

        Args:
            name: of the file that holds the tensors.
            config: written beside it as adapter_config.json, for an adapter.

        Raises:
            WeightSyncError: there is no room; nothing was written.
        """
        from safetensors.torch import save_file

        parent = self.directory()
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
        partial.mkdir()
        save_file(dict(tensors), partial / name, metadata={"format": "pt", "version": str(version)})
        if config is not None:
            (partial / "adapter_config.json").write_text(json.dumps(config))
        # a server must never see half a version
        return partial.rename(directory)

    def keep_only(self, directory: Path | None) -> None:
        """Remove every version but this one."""
        if self._made is None:
            return
        for other in self._made.iterdir():
            if other != directory:
                shutil.rmtree(other, ignore_errors=True)

    def remove(self, directory: Path) -> None:
        """Remove one version."""
        shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Remove all of it. May be called twice."""
        made, self._made = self._made, None
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)

    def directory(self) -> Path:
        """Where the versions are."""
        if self._made is None:
            shared_memory = Path("/dev/shm")
            parent = self._parent or (str(shared_memory) if shared_memory.is_dir() else None)
            if self._parent is not None:
                Path(self._parent).mkdir(parents=True, exist_ok=True)
            self._made = Path(tempfile.mkdtemp(prefix="verifiers-weights-", dir=parent))
            # the server may run as another user
            self._made.chmod(0o755)
        return self._made
