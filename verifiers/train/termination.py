"""The first SIGINT or SIGTERM ends a run as an error does; no further one keeps it from giving back what it holds."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["Ending", "ended_by_signals"]

_DEAF_S = 6.0
"""Longer than a run takes to end."""

_HANDLED_OVER = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""Whoever handles a signal in a way of their own goes on doing so."""


class Ending:
    """What SIGINT and SIGTERM do to a run: the first raises, those of the next seconds wait until all is given back.

    SIGINT raises KeyboardInterrupt and SIGTERM, which schedulers and launchers send before they kill, SystemExit. An
    impatient second Ctrl-C would otherwise leave a server paused, or pushed weights in memory.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._waits: int | None = None

    @property
    def has_begun(self) -> bool:
        return self._since is not None

    def begin(self) -> None:
        """The run is being ended, whatever for."""
        if self._since is None:
            self._since = time.monotonic()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        now = time.monotonic()
        if self._since is not None and now - self._since < _DEAF_S:
            self._waits = number
            return
        self._since = now
        _raise(number)

    def raise_waiting(self) -> None:
        """Raise what waited, at the end of a run that ended well: whoever called it is to end too."""
        waits, self._waits = self._waits, None
        if waits is not None:
            _raise(waits)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Ending]:
    """While open, SIGINT and SIGTERM do what `Ending` says.

    For a run of one process: one that waits in a collective would not come to run a handler. It does nothing in other
    threads than the main one, which get no signals.
    """
    ending = Ending()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: handler for number, handler in _HANDLED_OVER.items() if signal.getsignal(number) is handler}
    for number in before:
        signal.signal(number, ending.handle)
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    # a text as code: it is printed, and the exit code is 1
    raise SystemExit("ended by SIGTERM")
