"""SIGTERM, which schedulers send before they kill, ends a run as an error does: what it holds is given back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["ended_by_sigterm"]


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """While open, SIGTERM raises SystemExit in the main thread instead of ending the process on the spot.

    It does nothing in other threads, which get no signals, and where somebody handles SIGTERM already. For a run of
    one process: one that waits in a collective would not come to run the handler.
    """
    of_main_thread = threading.current_thread() is threading.main_thread()
    if not of_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    # a text as code: it is printed, and the exit code is 1
    raise SystemExit("ended by SIGTERM")
