"""Watchdogs of code that lets no other code run: on an event loop, or in the whole interpreter.

An ordinary thread notices that a loop stands still, since a coroutine that calls `time.sleep` releases the
interpreter's lock. A regular expression does not release it, and no Python code runs until it has ended: there
faulthandler's thread, which is written in C, ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

__all__ = ["LoopWatchdog", "exit_if_interpreter_is_held", "running_function"]

_PACKAGE = str(Path(__file__).parent)
_TICK_S = 1.0
_LATE_S = 2.0


class LoopWatchdog:
    """A thread that notices an event loop which runs nothing for `limit_s` seconds, and names the function.

    Args:
        loop: the loop. Thread-safe functions of it alone are called.
        limit_s: seconds for which one piece of code may keep the loop from all others; may be changed meanwhile.
        blocked: called once, in the watchdog's thread, with the function's name and place.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, blocked: Callable[[str], None]) -> None:
        self.limit_s = limit_s
        self._loop, self._blocked = loop, blocked
        self._beat = time.monotonic()
        self._loop_thread: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="verifiers-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread. To be called once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; `blocked` is not called from now on. May be called twice."""
        self._stopped.set()

    @property
    def silent_s(self) -> float:
        """Seconds since the loop last ran something."""
        return time.monotonic() - self._beat

    def _watch(self) -> None:
        woke = time.monotonic()
        while not self._stopped.wait(min(_TICK_S, self.limit_s / 4)):
            before, woke = woke, time.monotonic()
            if woke - before > _TICK_S + _LATE_S:
                # this thread could not run either: the process was stopped, which is no fault of the loop
                self._beat = woke
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._note_beat)
            if self.silent_s >= self.limit_s:
                self._blocked(running_function(self._loop_thread))
                return

    def _note_beat(self) -> None:
        self._beat, self._loop_thread = time.monotonic(), threading.get_ident()


def running_function(thread_id: int | None) -> str:
    """Return name, file and line of the function of the user that a thread is in, such as a reward function.

    Args:
        thread_id: of the thread; None for the main thread.
    """
    innermost = sys._current_frames().get(thread_id or threading.main_thread().ident or 0)
    found, caller_is_ours = "code of the environment", False
    for frame, line in reversed(list(traceback.walk_stack(innermost))):
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] in sys.stdlib_module_names:
            continue
        # a function of the user is to blame, and not the libraries that it calls
        is_ours = code.co_filename.startswith(_PACKAGE)
        if caller_is_ours and not is_ours:
            found = f"{code.co_name} ({code.co_filename}, line {line})"
        caller_is_ours = is_ours
    return found


@contextlib.contextmanager
def exit_if_interpreter_is_held(limit_s: float, sentence: str) -> Iterator[None]:
    """End this process with exit code 1 where one thread keeps all others from running for `limit_s` seconds.

    Prints the stacks of all threads to stderr before. Nothing is closed or flushed. Uses the process's one timer of
    `faulthandler.dump_traceback_later`.

    Args:
        limit_s: seconds.
        sentence: what to print among the stacks, in ASCII and at most 500 characters.
    """
    # faulthandler prints file, line and name of functions, and no text of ours: so the sentence is the name of a file
    acquire = FunctionType(_acquire.__code__.replace(co_filename=sentence, co_name="watchdog"), {})
    running = threading.Lock()
    running.acquire()

    def rearm() -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
        while not acquire(running, _TICK_S):
            faulthandler.dump_traceback_later(limit_s, exit=True, file=2)
        faulthandler.cancel_dump_traceback_later()

    thread = threading.Thread(target=rearm, name="verifiers-interpreter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        running.release()
        thread.join()


def _acquire(lock: threading.Lock, timeout_s: float) -> bool:
    return lock.acquire(timeout=timeout_s)
