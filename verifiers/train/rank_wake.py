"""Getting a rank's main thread out of whatever it waits in, once the run is lost.

A wait in Python ends when a signal's handler raises. A collective does not: gloo's ends when its connections do,
NCCL's when its communicators are aborted. Nothing here waits for other ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from verifiers.train.termination import Ending

__all__ = ["Signals", "break_collectives", "came_from_collective"]

WAKING = signal.SIGURG
"""Raised in our own main thread. Systems ignore it by default, so one that comes too late does nothing."""


class Signals:
    """Signals of the main thread while a run is on, and the pipe on which another thread sees each at once.

    Python runs a handler only between two steps of the main thread's own code, so one that is inside a collective
    would not answer to Ctrl-C until the collective ends. The pipe tells of it meanwhile.

    Args:
        on_wake: called in the main thread by `wake`; may raise.
        ending: what SIGINT and SIGTERM do; launchers send the latter to all ranks once one has ended.

    Attributes:
        readable: the end of the pipe that becomes readable with a signal's number in it.
        is_in_force: False where a run is trained outside of the main thread: then nothing is handled.
        answered: whether the main thread has run handlers since the last `wake`.
    """

    def __init__(self, on_wake: Callable[[], None], ending: Ending) -> None:
        self._on_wake = on_wake
        self._before: dict[int, Any] = {}
        self._fd_before = -1
        self.readable, self._writable = os.pipe()
        os.set_blocking(self.readable, False)
        os.set_blocking(self._writable, False)
        self.answered = True
        self.is_in_force = threading.current_thread() is threading.main_thread()
        if not self.is_in_force:
            return
        self._handle(WAKING, self._woken, only_over=(signal.SIG_DFL, signal.SIG_IGN, None))
        self._handle(signal.SIGINT, ending.handle, only_over=(signal.default_int_handler,))
        self._handle(signal.SIGTERM, ending.handle, only_over=(signal.SIG_DFL,))
        self._fd_before = signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)

    def wake(self) -> None:
        """Have `on_wake` called in the main thread, also where that waits in Python."""
        self.answered = False
        main = threading.main_thread().ident
        if self.is_in_force and main is not None:
            signal.pthread_kill(main, WAKING)

    def nudge(self) -> None:
        """Make the pipe readable."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writable, b"\0")

    def read(self) -> bool:
        """Empty the pipe; True where a signal that is to end this process was in it."""
        try:
            numbers = os.read(self.readable, 4096)
        except BlockingIOError:
            return False
        return any(number in (signal.SIGINT, signal.SIGTERM) and number in self._before for number in numbers)

    def close(self) -> None:
        if self.is_in_force:
            if signal.set_wakeup_fd(self._fd_before) != self._writable:
                self._fd_before = -1
            for number, handler in self._before.items():
                signal.signal(number, handler)
        os.close(self.readable)
        os.close(self._writable)

    def _handle(
        self, number: int, handler: Callable[[int, FrameType | None], None], only_over: tuple[Any, ...]
    ) -> None:
        before = signal.getsignal(number)
        if before in only_over:
            self._before[number] = before
            signal.signal(number, handler)

    def _woken(self, number: int, frame: FrameType | None) -> None:
        self.answered = True
        self._on_wake()


def break_collectives() -> None:
    """End every collective that this process is in, with an error; no other can follow.

    gloo has no call for that. Its connections are those TCP connections of the process that no Python object holds.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    backend = str(dist.get_backend())
    if "gloo" in backend:
        _end_foreign_connections()
    if backend != "gloo":
        # by the name that torch's own launcher uses; it aborts the communicators of sub-groups too
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None:
            threading.Thread(target=_quietly, args=(abort,), name="verifiers-abort", daemon=True).start()


def came_from_collective(error: BaseException) -> bool:
    """Whether an error tells that another rank is gone, rather than what is wrong."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "process group")
    return isinstance(error, (RuntimeError, ValueError)) and any(sign in text for sign in signs)


def _end_foreign_connections() -> None:
    # not isinstance: it would ask lazily made modules for their class
    ours = {thing.fileno() for thing in gc.get_objects() if issubclass(type(thing), socket.socket)}
    for name in os.listdir("/dev/fd"):
        number = int(name)
        if number in ours:
            continue
        with contextlib.suppress(OSError):
            # the number stays open, so nothing else can come to stand under it
            held = socket.socket(fileno=os.dup(number))
            try:
                # gloo ends the process where one that listens is shut down; that has no peer
                if held.family in (socket.AF_INET, socket.AF_INET6) and held.getpeername():
                    held.shutdown(socket.SHUT_RDWR)
            finally:
                held.close()


def _quietly(work: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        work()
