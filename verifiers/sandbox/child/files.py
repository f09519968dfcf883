"""Reading and writing a sandbox's files from inside it, and removing a tree that somebody hostile has built."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["open_inside", "read_file", "remove_tree", "write_file"]

_CHUNK = 1 << 16


def _parts(path: str, directory: str) -> list[str]:
    """The components of a path below `directory`."""
    whole = os.path.normpath(os.path.join(directory, path))
    if whole != directory and not whole.startswith(directory.rstrip("/") + "/"):
        raise PermissionError(errno.EACCES, "the path leads out of the sandbox's directory", path)
    return [part for part in os.path.relpath(whole, directory).split("/") if part != "."]


def open_inside(path: str, directory: str, flags: int, *, make_directories: bool = False) -> int:
    """Open a file below `directory`, following no symbolic link on the way: one could lead anywhere."""
    parts = _parts(path, directory)
    if not parts:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    here = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            if make_directories:
                try:
                    os.mkdir(part, 0o755, dir_fd=here)
                except FileExistsError:
                    pass
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = below
        return os.open(parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=here)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, getattr(errno, "EMLINK", -1)):
            raise OSError(error.errno, "a symbolic link or a file stands in the way", path) from None
        raise OSError(error.errno, os.strerror(error.errno or 0), path) from None
    finally:
        os.close(here)


def _open(path: str, directory: str, flags: int, contained: bool) -> int:
    # O_NONBLOCK: opening a named pipe must not wait for its other end
    flags |= os.O_NONBLOCK | os.O_NOCTTY
    writing = bool(flags & os.O_WRONLY)
    if not contained:
        fd = open_inside(path, directory, flags, make_directories=writing)
    else:
        whole = os.path.normpath(os.path.join(directory, path))
        if writing:
            os.makedirs(os.path.dirname(whole), exist_ok=True)
        fd = os.open(whole, flags | os.O_CLOEXEC, 0o644)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number), path)
    return fd


def read_file(path: str, directory: str, out: int, max_bytes: int, contained: bool) -> None:
    """Copy a file to the descriptor `out`.

    Args:
        contained: the root directory is the sandbox's own, so any path and any link is harmless.
    """
    fd = _open(path, directory, os.O_RDONLY, contained)
    left = max_bytes
    while data := os.read(fd, _CHUNK):
        left -= len(data)
        if left < 0:
            raise OSError(errno.EFBIG, f"the file is longer than {max_bytes} bytes", path)
        while data:
            data = data[os.write(out, data) :]


def write_file(path: str, directory: str, source: int, contained: bool) -> None:
    """Copy the descriptor `source` to a file."""
    fd = _open(path, directory, os.O_WRONLY | os.O_CREAT, contained)
    # only now: a special file would have been truncated before it was looked at
    os.ftruncate(fd, 0)
    while data := os.read(source, _CHUNK):
        while data:
            data = data[os.write(fd, data) :]
    os.close(fd)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _is_directory(name: str, here: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _empty(here: int) -> list[str]:
    """Unlink all files of a directory; returns its directories."""
    directories = []
    for name in os.listdir(here):
        if _is_directory(name, here):
            directories.append(name)
        else:
            os.unlink(name, dir_fd=here)
    return directories


def remove_tree(path: str) -> None:
    """Remove a directory with all it holds, however deep. Nothing may still be writing to it.

    It walks down and up again by one descriptor, so depth costs neither recursion nor descriptors, and no path is
    ever longer than the system takes.
    """
    os.chmod(path, 0o700)
    here = os.open(path, _DIRECTORY)
    # for each directory on the way down: its name, what it is, and the directories left in the one above
    way: list[tuple[str, tuple[int, int], list[str]]] = []
    try:
        left = _empty(here)
        while left or way:
            if left:
                name = left.pop()
                os.chmod(name, 0o700, dir_fd=here)
                way.append((name, _identity(here), left))
                below = os.open(name, _DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
                left = _empty(here)
                continue
            name, above, left = way.pop()
            up = os.open("..", _DIRECTORY, dir_fd=here)
            os.close(here)
            here = up
            if _identity(here) != above:
                raise OSError(errno.ESTALE, "a directory was moved while it was removed", path)
            os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(path)
