"""One run writes to an output_dir at a time: a lock that the kernel gives back whatever ends the process."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

from verifiers.errors import CheckpointError

__all__ = ["LOCK", "OutputLock"]

LOCK = ".lock"

_held: set[int] = set()


class OutputLock:
    """Holds the lock of a directory from its making to `release`, on rank 0.

    Where the file system has no locks, or the file cannot be made, it holds nothing and refuses nobody.

    Raises:
        CheckpointError: another run, of this process or any other, holds it.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self.path = Path(output_dir) / LOCK
        self._descriptor: int | None = None
        with contextlib.suppress(ImportError):
            self._take()

    def _take(self) -> None:
        import fcntl

        while self._descriptor is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError:
                return
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # whoever held it may have removed the file meanwhile
                if self._is_there(descriptor):
                    self._descriptor = descriptor
            except BlockingIOError:
                raise CheckpointError(
                    f"another run writes to {self.path.parent} ({self.path.name} there is locked); wait for its end, "
                    "or give another output_dir."
                ) from None
            except OSError:
                return
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        _watch_forks()
        _held.add(self._descriptor)

    def release(self) -> None:
        """Give the lock back and leave no file. May be called twice."""
        descriptor, self._descriptor = self._descriptor, None
        # in a forked child it is closed already, and its number perhaps of something else
        if descriptor is None or descriptor not in _held:
            return
        _held.discard(descriptor)
        with contextlib.suppress(OSError):
            if self._is_there(descriptor):
                self.path.unlink()
        os.close(descriptor)

    def __enter__(self) -> OutputLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(descriptor))
        except FileNotFoundError:
            return False


_watching: list[bool] = []


def _watch_forks() -> None:
    """See to it that a forked child does not hold on to what its parent may lose."""
    if not _watching:
        _watching.append(True)
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()
