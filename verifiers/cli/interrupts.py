"""Signals and watchdogs of a command that runs an event loop: what ends it, and how."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

from verifiers.cli.main import FAILED, INTERRUPTED, BlockedLoopError
from verifiers.loop_thread import BLOCKING_ADVICE, LoopWatchdog, running_function
from verifiers.signals import exit_if_interpreter_is_held, exit_if_signal_is_unhandled, restored_handlers

__all__ = ["Interruptible", "handle_interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_ANSWERS_WITHIN_S = 5.0
"""Seconds in which the event loop has noticed a signal, unless code blocks it."""

_ENDS_WITHIN_S = 10.0
"""Seconds in which a run has ended whose blocking function was interrupted."""

_STORED = "What is stored stays, and the same command continues."


class Interruptible(Protocol):
    """Work that can be ended; `drain_s` is the time in seconds that `drain` gives."""

    drain_s: float
    requested: bool

    def drain(self) -> None: ...

    def abort(self) -> None: ...


@contextlib.contextmanager
def handle_interrupts(name: str, work: Interruptible, limit_s: float) -> Iterator[None]:
    """Drain `work` on SIGINT and SIGTERM, abort it on the second one, and end what blocks the event loop.

    Used inside the event loop; does nothing outside of the main thread, which alone receives signals.

    Args:
        name: of the command, for the printed sentence.
        limit_s: seconds for which one function may keep the loop, or all threads, from running.

    Raises:
        BlockedLoopError: in whatever runs on the loop, where that blocks it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    blocked: BlockedLoopError | None = None
    ended = threading.Event()

    def interrupt() -> None:
        watchdog.limit_s = limit_s
        if blocked is not None:
            return
        if not work.requested:
            print(
                f"{name}: finishing the work in flight, for at most {work.drain_s:g} s; again to stop at once",
                file=sys.stderr,
            )
            work.drain()
        else:
            work.abort()

    def block(function: str, exit_code: int) -> BlockedLoopError:
        nonlocal blocked
        blocked = BlockedLoopError(
            f"{function} has blocked the event loop for {watchdog.silent_s:.3g} s, so the run ends; "
            f"{BLOCKING_ADVICE}. {_STORED}",
            exit_code,
        )
        return blocked

    def note_signal(number: int, frame: FrameType | None) -> None:
        if blocked is not None:
            raise blocked
        if watchdog.silent_s >= _ANSWERS_WITHIN_S:
            raise block(running_function(None), INTERRUPTED)
        watchdog.limit_s = _ANSWERS_WITHIN_S

    def end_blocked(function: str) -> None:
        error = block(function, FAILED if watchdog.limit_s == limit_s else INTERRUPTED)
        # a signal reaches the main thread inside of a system call, too
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if not ended.wait(_ENDS_WITHIN_S):
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            os._exit(error.exit_code)

    watchdog = LoopWatchdog(loop, limit_s, end_blocked)
    held = (
        f"{name}: a function of one of these threads has kept all others from running for {limit_s:.3g} s (a regular "
        f"expression that tries too many ways?), or the process was stopped, so the run ends with exit code 1. "
        f"{_STORED}"
    )
    unhandled = (
        f"{name}: a signal arrived, and a function of one of these threads keeps Python from handling it (a regular "
        f"expression that tries too many ways?), so the process is killed. {_STORED}"
    )
    with restored_handlers(*_SIGNALS):
        for number in _SIGNALS:
            loop.add_signal_handler(number, interrupt)
            # asyncio's own does nothing; the callback needs a loop that runs
            signal.signal(number, note_signal)
        watchdog.start()
        try:
            with exit_if_interpreter_is_held(limit_s, held), exit_if_signal_is_unhandled(unhandled, _SIGNALS):
                yield
        except BlockedLoopError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise
            # raised in another task, it has left asyncio.run already, which cancels this one
        finally:
            ended.set()
            watchdog.stop()
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
