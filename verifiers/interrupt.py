"""The end of a run by a signal, and by a function that lets nothing else run.

Python handles a signal between two steps of the main thread's own code, and runs nothing while C code holds the
interpreter's lock, as a regular expression does that tries too many ways. `faulthandler`, which is written in C, can
print the stacks of all threads and end the process even then.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from types import FrameType
from typing import Any, Protocol

_GIVEN_BACK_WITHIN_S = 6.0
_LOOP_RUNS_WITHIN_S = 5.0
_ENDS_WITHIN_S = 12.0
"""Longer than the methods marked `@vf.teardown` have, and than the servers of tools take to end."""
_STDERR = 2

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedBySignal(SystemExit):
    """Raised by SIGTERM and SIGHUP; the exit code is 128 and the signal's number, as in a shell."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._name = signal.Signals(number).name

    def __str__(self) -> str:
        return f"ended by {self._name}"


class Termination:
    """The state of a run that a signal ends: further ones wait some seconds, in which it gives back what it holds.

    An impatient second Ctrl-C would otherwise leave a server paused, or pushed weights in memory.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._waiting: int | None = None

    @property
    def has_begun(self) -> bool:
        return self._since is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a signal came while the run was being ended."""
        return self._waiting is not None

    def begin(self) -> None:
        """Hold back further signals: the run is being ended, for whatever reason."""
        self._since = self._since or time.monotonic()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt or EndedBySignal, unless the run is being ended."""
        if self._since is not None and time.monotonic() - self._since < _GIVEN_BACK_WITHIN_S:
            self._waiting = number
            return
        self._since = time.monotonic()
        raise _raised_by(number)

    def raise_waiting(self) -> None:
        """Raise what waited, at the end of a run that ended well: its caller is to end, too."""
        if self._waiting is not None:
            raise _raised_by(self._waiting)


@contextlib.contextmanager
def ended_by_signals(*, keep_after_failure: bool = False) -> Iterator[Termination]:
    """Handle signals as `Termination` says, on the main thread; handlers that a caller has set stay.

    With `keep_after_failure` the launcher's SIGTERM, which follows a failure, does not cut off its report.
    """
    ended = Termination()
    with handlers(dict.fromkeys(_ENDS, ended.handle) | {signal.SIGTSTP: stopped_with_its_timer}) as before:
        try:
            yield ended
        except BaseException:
            if keep_after_failure:
                before.clear()
            raise


async def exit_if_blocked(limit_s: float) -> None:
    """End this process where the running event loop runs nothing for `limit_s` seconds; runs until it is cancelled.

    Prints the stacks of all threads to stderr and exits with code 1; nothing is closed or flushed. Uses the process's
    one timer of `faulthandler.dump_traceback_later`.
    """
    try:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
            await asyncio.sleep(min(1.0, limit_s / 4))
    finally:
        faulthandler.cancel_dump_traceback_later()


class Drainable(Protocol):
    """Work that can be ended; `drain` gives it `drain_s` seconds."""

    drain_s: float
    requested: bool
    exit_code: int

    def drain(self) -> None: ...

    def abort(self) -> None: ...


@contextlib.asynccontextmanager
async def drained_by_signals(
    name: str, work: Drainable, limit_s: float, *, at_once: Collection[int] = (signal.SIGTERM, signal.SIGHUP)
) -> AsyncIterator[None]:
    """Drain `work` at the first signal, unless that is one of `at_once`, and abort it at the second.

    A function that blocks the event loop for `limit_s` seconds, and for 5 after a signal, ends the process as
    `exit_if_blocked` says; so does work that goes on 12 seconds after it was aborted. `name` is the command's.
    """
    loop, process, is_over = asyncio.get_running_loop(), os.getpid(), False

    def exit_in_time(_: object) -> None:
        if not is_over:
            faulthandler.dump_traceback_later(_ENDS_WITHIN_S, exit=True, file=_STDERR)

    def end(number: int) -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
        work.exit_code = 128 + number
        if number not in at_once and not work.requested:
            line = f"{name}: finishing the work in flight, for at most {work.drain_s:g} s; again to stop at once"
            work.drain()
            with contextlib.suppress(OSError):
                print(line, file=sys.stderr)
        else:
            # a task that goes on when it is cancelled would keep the loop, which the guard sees running
            guard.add_done_callback(exit_in_time)
            guard.cancel()
            work.abort()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:
            # a forked child has the handler too
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        faulthandler.dump_traceback_later(_LOOP_RUNS_WITHIN_S, exit=True, file=_STDERR)
        loop.call_soon_threadsafe(end, number)

    guard = asyncio.create_task(exit_if_blocked(limit_s))
    try:
        with handlers(dict.fromkeys(_ENDS, handle) | {signal.SIGTSTP: stopped_with_its_timer}, in_asyncio=True):
            yield
    finally:
        is_over = True
        guard.cancel()
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def handlers(given: Mapping[Any, Any], *, in_asyncio: bool = False) -> Iterator[dict[int, Any]]:
    """Replace Python's own handlers, on the main thread; yield those before, which the end puts back.

    A caller's own handlers stay, and so do signals that are ignored, as nohup has it. `in_asyncio` replaces those of
    `asyncio.run` too.
    """
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        present = {number: signal.getsignal(number) for number in given}
        own = (signal.SIG_DFL, signal.default_int_handler)
        before = {n: one for n, one in present.items() if one in own or (in_asyncio and one is not signal.SIG_IGN)}
    for number in before:
        signal.signal(number, given[number])
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped_with_its_timer(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-Z: the timer of `exit_if_blocked` would count on while the process is stopped."""
    faulthandler.cancel_dump_traceback_later()
    os.kill(os.getpid(), signal.SIGSTOP)


def _raised_by(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else EndedBySignal(number)
