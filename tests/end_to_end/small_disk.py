"""A disk that can be filled: a small tmpfs that only this process sees, or a limit on the size of its files.

The second, where a process may not mount, fails writes with "File too large" instead of "No space left on device".
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

__all__ = ["fill", "mounted"]

_NEW_MOUNTS, _NEW_USERS = 0x00020000, 0x10000000
_FILLER = "filler"
_MEGABYTE = bytes(2**20)


@contextlib.contextmanager
def mounted(directory: Path) -> Iterator[None]:
    """Mount it at `directory` until the process ends; its files are copied to the disk below on the way out.

    To be called while the process has one thread.
    """
    directory.mkdir(parents=True, exist_ok=True)
    below = os.open(directory, os.O_RDONLY)
    try:
        if not _mount(directory):
            yield
            return
        try:
            yield
        finally:
            (directory / _FILLER).unlink(missing_ok=True)
            shutil.copytree(directory, f"/proc/self/fd/{below}", dirs_exist_ok=True)
    finally:
        os.close(below)


def fill(directory: Path) -> None:
    """Leave no room."""
    if not os.path.ismount(directory):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return
    with contextlib.suppress(OSError), open(directory / _FILLER, "wb", buffering=0) as filler:
        while filler.write(_MEGABYTE) == len(_MEGABYTE):
            pass


def _mount(directory: Path) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare"):
        return False
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USERS | _NEW_MOUNTS) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return bool(libc.mount(b"none", str(directory).encode(), b"tmpfs", 0, b"size=64m") == 0)
