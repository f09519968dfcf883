"""Watchdogs of code that lets no other code run: on an event loop, or in the whole interpreter.

An ordinary thread notices that a loop stands still, since a coroutine that calls `time.sleep` releases the
interpreter's lock. A regular expression does not release it, and no Python code runs until it has ended: there
faulthandler, which is written in C, ends the process after a limit, and notes that a signal arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

from verifiers import signal_watcher

__all__ = [
    "BLOCKING_ADVICE",
    "LoopPulse",
    "LoopWatchdog",
    "exit_if_interpreter_is_held",
    "exit_if_signal_is_unhandled",
    "restored_handlers",
    "running_function",
    "tick_s",
]

BLOCKING_ADVICE = (
    "make it an async def that awaits its slow part (asyncio.to_thread), or, where it is the run of an AgentEnv, a "
    "plain def; other plain functions run on the loop too, once three calls in a row were quick"
)
"""Advice for a blocked event loop, to end a sentence."""

UNHANDLED_S = 5.0
"""Seconds after a signal in which Python code has run, unless something holds the interpreter."""

_PACKAGE = str(Path(__file__).parent) + os.sep


def tick_s(limit_s: float) -> float:
    """Return the seconds between two looks at what may last `limit_s` seconds."""
    return min(1.0, limit_s / 4)


class LoopPulse:
    """The time for which an event loop runs nothing, as counted by another thread that asks the loop regularly.

    Of an interval that lasted too long, twice its due length counts: the asking thread could not run either, because
    the process was stopped or the machine was overloaded, and the loop has to get a chance to answer.

    Attributes:
        thread: identifier of the loop's thread, once the loop has answered.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.thread: int | None = None
        self._loop = loop
        self._counted_s, self._asked = 0.0, time.monotonic()
        self._has_run = True
        self.ask(0.0)

    @property
    def silent_s(self) -> float:
        """Seconds for which the loop has run nothing."""
        return 0.0 if self._has_run else self._counted_s

    def ask(self, due_s: float) -> None:
        """Count the time since the last call, which was to last `due_s` seconds, and ask the loop again."""
        now = time.monotonic()
        elapsed_s, self._asked = now - self._asked, now
        if not self._has_run:
            self._counted_s += min(elapsed_s, 2 * due_s)
            return
        self._counted_s, self._has_run = 0.0, False
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self.thread, self._has_run = threading.get_ident(), True


class LoopWatchdog:
    """A thread that notices an event loop which runs nothing for `limit_s` seconds, and names the function.

    Args:
        loop: the loop. Thread-safe functions of it alone are called.
        limit_s: seconds for which one piece of code may keep the loop from all others; may be changed meanwhile.
        blocked: called once, in the watchdog's thread, with the function's name and place.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit_s: float, blocked: Callable[[str], None]) -> None:
        self.limit_s = limit_s
        self._pulse, self._blocked = LoopPulse(loop), blocked
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="verifiers-watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread. To be called once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; `blocked` is not called from now on. May be called twice."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            # it ends at once, unless it is in `blocked`
            self._thread.join(1.0)

    @property
    def silent_s(self) -> float:
        """Seconds for which the loop has run nothing."""
        return self._pulse.silent_s

    def _watch(self) -> None:
        while not self._stopped.wait(due_s := tick_s(self.limit_s)):
            self._pulse.ask(due_s)
            if self.silent_s >= self.limit_s:
                self._blocked(running_function(self._pulse.thread))
                return


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
    `faulthandler.dump_traceback_later`. The time for which Ctrl-Z stops the process does not count where this is used
    on the main thread.

    Args:
        limit_s: seconds.
        sentence: what to print among the stacks, in ASCII and at most 500 characters.
    """
    # faulthandler prints file, line and name of functions, and no text of ours: so the sentence is the name of a file
    acquire = FunctionType(_acquire.__code__.replace(co_filename=sentence, co_name="watchdog"), {})
    running, arming = threading.Lock(), threading.RLock()
    running.acquire()

    def arm() -> None:
        with arming:
            faulthandler.dump_traceback_later(limit_s, exit=True, file=2)

    def rearm() -> None:
        arm()
        while not acquire(running, tick_s(limit_s)):
            arm()
        faulthandler.cancel_dump_traceback_later()

    def stop(number: int, frame: FrameType | None) -> None:
        # the timer counts on while the process is stopped
        with arming:
            faulthandler.cancel_dump_traceback_later()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, stop)

    thread = threading.Thread(target=rearm, name="verifiers-interpreter", daemon=True)
    with contextlib.ExitStack() as handlers:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            handlers.enter_context(restored_handlers(signal.SIGTSTP))
            signal.signal(signal.SIGTSTP, stop)
        thread.start()
        try:
            yield
        finally:
            running.release()
            thread.join()


def _acquire(lock: threading.Lock, timeout_s: float) -> bool:
    return lock.acquire(timeout=timeout_s)


@contextlib.contextmanager
def exit_if_signal_is_unhandled(sentence: str, numbers: Sequence[int]) -> Iterator[None]:
    """End this process where no Python code of it has run for `UNHANDLED_S` seconds after a signal arrived.

    Python runs a signal's handler between two steps of Python code; faulthandler's handler runs all the same, and
    writes to a pipe, whose other end `signal_watcher.py` reads as a process of its own. Use this on the main thread,
    while the handlers of these signals stay as they are. `sentence` is printed to stderr, and after it the stacks of
    all threads, as by any SIGQUIT meanwhile; that signal ends the process, or, where it is ignored, SIGKILL.

    Args:
        sentence: what to print.
        numbers: the signals.
    """
    import subprocess

    _register_fork_hook()
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    command = [sys.executable, "-I", "-S", signal_watcher.__file__, str(os.getpid()), str(UNHANDLED_S), sentence]
    # Ctrl-C at a terminal must not end it
    watcher = subprocess.Popen(command, stdin=readable, stdout=subprocess.DEVNULL, start_new_session=True)
    os.close(readable)
    ended = threading.Event()

    def show_running() -> None:
        while not ended.wait(signal_watcher.TICK_S):
            _write(writable, signal_watcher.RUNS)

    thread = threading.Thread(target=show_running, name="verifiers-signals", daemon=True)
    thread.start()
    registered = [number for number in numbers if number not in _noted_signals]
    # a shell's background jobs ignore it
    if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN) and signal.SIGQUIT not in _noted_signals:
        faulthandler.register(signal.SIGQUIT, file=2, all_threads=True, chain=True)
        registered.append(signal.SIGQUIT)
    for number in registered:
        if number != signal.SIGQUIT:
            # of this thread alone: others run on, and their stacks with them
            faulthandler.register(number, file=writable, all_threads=False, chain=True)
    _noted_signals.update(registered)
    try:
        yield
    finally:
        for number in registered:
            faulthandler.unregister(number)
        _noted_signals.difference_update(registered)
        ended.set()
        thread.join()
        _write(writable, signal_watcher.IS_OVER)
        os.close(writable)
        watcher.wait()


def _write(descriptor: int, word: bytes) -> None:
    # the watcher may have been killed, or be behind
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(descriptor, word)


_noted_signals: set[int] = set()
"""Signals that faulthandler is registered for."""

_handlers_before: dict[int, Any] = {}


@contextlib.contextmanager
def restored_handlers(*numbers: int) -> Iterator[None]:
    """Give signals their present handlers back in the end, and in processes forked meanwhile.

    A forked child shares the file by which Python's handlers wake an event loop: a signal to the child would reach
    the loop of its parent.
    """
    _register_fork_hook()
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in numbers}
    _handlers_before.update(before)
    try:
        yield
    finally:
        for number, handler in before.items():
            del _handlers_before[number]
            signal.signal(number, handler)


@functools.cache
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    # a signal to a forked child is none to its parent
    for number in _noted_signals:
        faulthandler.unregister(number)
        # another hook may have set it, which unregistering undoes
        signal.signal(number, signal.getsignal(number))
    _noted_signals.clear()
    if _handlers_before:
        signal.set_wakeup_fd(-1)
    for number, handler in _handlers_before.items():
        signal.signal(number, handler)
