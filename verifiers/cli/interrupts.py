"""Ctrl-C in two steps: the first lets what is in flight finish and saves it, the second stops at once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Protocol

__all__ = ["Interruptible", "handle_interrupts"]


class Interruptible(Protocol):
    """What is told to end; `drain_s` is the time in seconds that `drain` gives."""

    drain_s: float
    requested: bool

    def drain(self) -> None: ...

    def abort(self) -> None: ...


@contextlib.contextmanager
def handle_interrupts(name: str, work: Interruptible) -> Iterator[None]:
    """While this is open, SIGINT and SIGTERM drain `work`, and a second one aborts it.

    It is used inside the event loop, and does nothing outside of the main thread, which alone gets signals.

    Args:
        name: of the command, for the sentence that is printed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}

    def interrupt() -> None:
        if not work.requested:
            print(
                f"{name}: finishing what is in flight, for at most {work.drain_s:g} s; again to stop at once",
                file=sys.stderr,
            )
            work.drain()
        else:
            work.abort()

    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number] or signal.SIG_DFL)
