"""Signals, and code that keeps Python from handling them.

No Python code runs while a regular expression holds the interpreter's lock, for minutes where it tries too many ways.
faulthandler, which is written in C, runs all the same: it notes that a signal arrived, and ends the process after a
limit.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, FunctionType
from typing import Any

from verifiers import signal_watcher
from verifiers.concurrency import tick_s

__all__ = [
    "Termination",
    "ended_by_signals",
    "exit_if_interpreter_is_held",
    "exit_if_signal_is_unhandled",
    "is_by_signal",
    "killed_by_signals",
    "restored_handlers",
]

UNHANDLED_S = 5.0
"""Seconds after a signal in which Python code has run, unless something holds the interpreter."""


# -- the end of a run ------------------------------------------------------------------------------------------------

_ENDS_WITHIN_S = 6.0
"""Seconds in which a run that is being ended has ended; signals wait meanwhile."""

_HANDLED_WITHIN_S = 1.5
"""Seconds after which a signal that the main thread has not handled finds it inside a call that does not return."""

_GIVE_BACK_WITHIN_S = 0.6

_HELD = (
    "a signal arrived, and a function of one of these threads keeps Python from handling it (a regular expression "
    "that tries too many ways?), so the process is killed. The run resumes from its newest checkpoint."
)

# SystemExit with a string prints it and exits with 1
_BY_SIGTERM = "ended by SIGTERM"

_HANDLED_OVER = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""The handlers that are replaced; a caller's own handlers stay."""


class Termination:
    """The state of a run that signals end: the first raises, those of the next seconds wait until all is given back.

    SIGINT raises KeyboardInterrupt and SIGTERM, which schedulers and launchers send before they kill, SystemExit. An
    impatient second Ctrl-C would otherwise leave a server paused, or pushed weights in memory.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._waiting: int | None = None

    @property
    def has_begun(self) -> bool:
        """True while the run is being ended."""
        return self._since is not None

    def begin(self) -> None:
        """Hold back further signals: the run is being ended, for whatever reason."""
        if self._since is None:
            self._since = time.monotonic()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT or SIGTERM."""
        now = time.monotonic()
        if self._since is not None and now - self._since < _ENDS_WITHIN_S:
            self._waiting = number
            return
        self._since = now
        _raise(number)

    def raise_waiting(self) -> None:
        """Raise what waited, at the end of a run that ended well: its caller is to end, too."""
        number, self._waiting = self._waiting, None
        if number is not None:
            _raise(number)


@contextlib.contextmanager
def ended_by_signals(give_back: Callable[[BaseException], None] | None = None) -> Iterator[Termination]:
    """Handle SIGINT and SIGTERM as `Termination` says, while this is open.

    It does nothing in other threads than the main one, which get no signals.

    Args:
        give_back: called with SystemExit before the process is ended, where the main thread does not handle a signal
            because it is inside a collective that does not end; None leaves the process as it is then.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return
    before = {number: handler for number, handler in _HANDLED_OVER.items() if signal.getsignal(number) is handler}
    for number in before:
        signal.signal(number, termination.handle)
    try:
        with contextlib.ExitStack() as guards:
            if before:
                guards.enter_context(exit_if_signal_is_unhandled(_HELD, tuple(before)))
            if give_back is not None:
                guards.enter_context(_ended_if_stuck(termination, give_back))
            yield termination
    except BaseException:
        if give_back is not None:
            # the launcher's SIGTERM is on its way, and must not cut off what is still to be said of the error
            before.clear()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_by_signal(error: BaseException) -> bool:
    """Return whether an error is what a signal raised while `ended_by_signals` was open."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == _BY_SIGTERM)


@contextlib.contextmanager
def killed_by_signals() -> Iterator[Termination]:
    """Make SIGINT kill this process, as SIGTERM does: a rank above 0 holds nothing that would be missed."""
    is_replaced = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_replaced:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield Termination()
    finally:
        if is_replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _ended_if_stuck(termination: Termination, give_back: Callable[[BaseException], None]) -> Iterator[None]:
    """End this process from another thread where the main thread does not come to handle a signal.

    Python runs a handler only between two steps of the main thread's own code. The C code behind it writes each
    signal to a pipe at once.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)

    def watch() -> None:
        deadline: float | None = None
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([readable], [], [], left_s)[0]:
                if not termination.has_begun:
                    _end_process(give_back)
                deadline = None
                continue
            number = os.read(readable, 1)[0]
            # 0 is not a signal, and ends the thread
            if number == 0:
                return
            if number in _HANDLED_OVER and deadline is None:
                deadline = time.monotonic() + _HANDLED_WITHIN_S

    fd_before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="verifiers-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        os.write(writable, b"\0")
        thread.join()
        os.close(readable)
        os.close(writable)


def _end_process(give_back: Callable[[BaseException], None]) -> None:
    os.write(2, b"a signal ends this process, whose main thread is inside a call that does not return.\n")
    error = SystemExit(_BY_SIGTERM)
    closing = threading.Thread(target=give_back, args=(error,), name="verifiers-closing", daemon=True)
    closing.start()
    closing.join(_GIVE_BACK_WITHIN_S)
    os._exit(1)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(_BY_SIGTERM)


# -- code that does not let Python handle a signal -------------------------------------------------------------------


@contextlib.contextmanager
def exit_if_interpreter_is_held(limit_s: float, sentence: str) -> Iterator[None]:
    """End this process with exit code 1 where one thread keeps all others from running for `limit_s` seconds.

    Prints the stacks of all threads to stderr before. Nothing is closed or flushed. Uses the process's one timer of
    `faulthandler.dump_traceback_later`. The time for which Ctrl-Z stops the process does not count where this is used
    on the main thread.

    Args:
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
