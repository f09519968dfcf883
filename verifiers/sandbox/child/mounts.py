"""The root directory of a namespaces sandbox: system and Python read-only, a private /tmp, and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from verifiers.sandbox.child import system

__all__ = ["HOME", "USER", "Source", "build_root", "open_sources"]

HOME = "/sandbox"
USER = 1000

_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_REMOUNT, _BIND, _REC, _PRIVATE = 32, 4096, 16384, 1 << 18

_OCTAL = re.compile(r"\\([0-7]{3})")
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_ETC = {
    "passwd": f"sandbox:x:{USER}:{USER}::{HOME}:/bin/sh\n",
    "group": f"sandbox:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
# how the linker and commands such as awk and editor are found
_ETC_COPIED = ("ld.so.cache", "localtime")
_ETC_BOUND = ("alternatives",)

# (descriptor of the host's file, path inside, whether it is a directory)
Source = tuple[int, str, bool]


def _open(path: str) -> Source | None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    return fd, path, os.path.isdir(f"/proc/self/fd/{fd}")


def _covered(path: str, above: Sequence[str]) -> bool:
    return any(path == other or path.startswith(other + "/") for other in above)


def open_sources(readable: Sequence[str]) -> list[Source]:
    """Open what will be bound, while this process may still pass through the host's directories."""
    paths: list[str] = []
    for path in sorted({os.path.normpath(path) for path in readable}):
        if not _covered(path, ["/usr", *paths]):
            paths.append(path)
    wanted = [f"/{name}" for name in _SYSTEM if not os.path.islink(f"/{name}")]
    wanted += [f"/dev/{name}" for name in _DEVICES] + [f"/etc/{name}" for name in _ETC_BOUND] + paths
    return [source for source in map(_open, wanted) if source is not None]


def _make(path: str, directory: bool) -> None:
    if directory:
        os.makedirs(path, exist_ok=True)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.exists(path):
        with open(path, "w"):
            pass


def _write_etc(base: str) -> None:
    os.makedirs(f"{base}/etc", exist_ok=True)
    for name, text in _ETC.items():
        with open(f"{base}/etc/{name}", "w") as file:
            file.write(text)
    for name in _ETC_COPIED:
        try:
            with open(f"/etc/{name}", "rb") as source, open(f"{base}/etc/{name}", "wb") as target:
                target.write(source.read())
        except OSError:
            continue


def _mount_points(base: str) -> list[tuple[str, set[str]]]:
    """The mounts below a directory, each with its options."""
    found = []
    with open("/proc/self/mountinfo") as file:
        for line in file:
            fields = line.split()
            # spaces and the like are written as octal escapes
            point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
            if point == base or point.startswith(base + "/"):
                found.append((point, set(fields[5].split(","))))
    return found


def _make_read_only(base: str, writable: Sequence[str]) -> None:
    """Remount every mount below `base` but the writable ones; what a mount already forbids has to be kept."""
    kept = {"nodev": _NODEV, "noexec": _NOEXEC}
    for point, options in _mount_points(base):
        if point in writable or point == f"{base}/proc":
            continue
        flags = _REMOUNT | _BIND | _RDONLY | _NOSUID
        flags |= sum(flag for name, flag in kept.items() if name in options)
        if not point.startswith(f"{base}/dev/"):
            flags |= _NODEV
        system.mount("none", point, None, flags)


def build_root(sources: Sequence[Source], *, disk_bytes: int) -> None:
    """Make the new root and move into it. Runs as the first process of new user, mount and pid namespaces.

    Nothing may be imported on the way: the standard library can be out of reach until the end.
    """
    base = next(path for path in ("/tmp", "/run", "/mnt", "/var") if os.path.isdir(path))
    system.mount("none", "/", None, _REC | _PRIVATE)
    system.mount("tmpfs", base, "tmpfs", _NOSUID | _NODEV, "size=4m,mode=755")
    scratch = f"{base}/.scratch"
    os.mkdir(scratch)
    files = max(1024, min(disk_bytes // 4096, 1 << 18))
    system.mount("tmpfs", scratch, "tmpfs", _NOSUID | _NODEV, f"size={disk_bytes},nr_inodes={files},mode=755")
    writable = {HOME: 0o755, "/tmp": 0o1777, "/dev/shm": 0o1777}
    for number, (path, mode) in enumerate(writable.items()):
        os.mkdir(f"{scratch}/{number}")
        os.chmod(f"{scratch}/{number}", mode)
        os.makedirs(base + path)
        system.mount(f"{scratch}/{number}", base + path, None, _BIND)
    system.unmount(scratch)
    os.rmdir(scratch)
    for name in _SYSTEM:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{base}/{name}")
    _write_etc(base)
    for fd, path, directory in sources:
        _make(base + path, directory)
        system.mount(f"/proc/self/fd/{fd}", base + path, None, _BIND | _REC)
        os.close(fd)
    for name, target in _LINKS.items():
        os.symlink(target, f"{base}/dev/{name}")
    os.makedirs(f"{base}/proc", exist_ok=True)
    try:
        system.mount("proc", f"{base}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    except OSError:
        # some containers forbid it; an empty /proc tells even less
        pass
    _make_read_only(base, [base + path for path in writable])
    os.chdir(base)
    system.pivot_root(".", ".")
    system.unmount(".")
    os.chdir("/")
