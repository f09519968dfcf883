"""The end of a process that a signal asks to end while code holds the interpreter.

Python runs a signal's handler between two steps of Python code, and a regular expression that tries too many ways
lets no step come, in any thread. faulthandler's handler, which is written in C, runs all the same, and writes to a
pipe. At the other end this file runs as a program: it ends the process unless a thread there shows that Python runs.
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
from collections.abc import Iterator, Sequence

__all__ = ["end_if_signals_wait"]

_RUNS = b"\0"
"""Written every second: Python code runs."""

_IS_OVER = b"\1"

_TICK_S = 1.0

_STACKS_WITHIN_S = 2.0
"""Seconds in which the stacks of all threads are printed."""

_registered: set[int] = set()


@contextlib.contextmanager
def end_if_signals_wait(sentence: str, numbers: Sequence[int], within_s: float = 5.0) -> Iterator[None]:
    """End this process where no Python code of it has run for `within_s` seconds after a signal arrived.

    Use it on the main thread, while the handlers of these signals stay as they are. `sentence` is printed to stderr
    then, and after it the stacks of all threads, as by any SIGQUIT meanwhile; that signal ends the process, or, where
    it is ignored, SIGKILL.

    Args:
        sentence: what to print.
        numbers: the signals.
        within_s: seconds.
    """
    import subprocess

    _forget_in_children()
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(within_s), sentence]
    # Ctrl-C at a terminal must not end it
    watcher = subprocess.Popen(command, stdin=readable, stdout=subprocess.DEVNULL, start_new_session=True)
    os.close(readable)
    ended = threading.Event()

    def show_running() -> None:
        while not ended.wait(_TICK_S):
            _write(writable, _RUNS)

    thread = threading.Thread(target=show_running, name="verifiers-signal-watch", daemon=True)
    thread.start()
    registered = [number for number in numbers if number not in _registered]
    # a shell's background jobs ignore it
    if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN) and signal.SIGQUIT not in _registered:
        faulthandler.register(signal.SIGQUIT, file=2, all_threads=True, chain=True)
        registered.append(signal.SIGQUIT)
    for number in registered:
        if number != signal.SIGQUIT:
            # of this thread alone: others run on, and their stacks with them
            faulthandler.register(number, file=writable, all_threads=False, chain=True)
    _registered.update(registered)
    try:
        yield
    finally:
        for number in registered:
            faulthandler.unregister(number)
        _registered.difference_update(registered)
        ended.set()
        thread.join()
        _write(writable, _IS_OVER)
        os.close(writable)
        watcher.wait()


def _write(descriptor: int, word: bytes) -> None:
    # the watcher may have been killed, or be behind
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(descriptor, word)


def _forget_in_child() -> None:
    # a signal to a forked child is none to its parent
    for number in _registered:
        faulthandler.unregister(number)
        # another hook may have set it, which unregistering undoes
        signal.signal(number, signal.getsignal(number))
    _registered.clear()


@functools.cache
def _forget_in_children() -> None:
    os.register_at_fork(after_in_child=_forget_in_child)


def watch(process: int, within_s: float, sentence: str) -> None:
    """End the parent process where a signal arrived and nothing shows within `within_s` that Python code runs."""
    deadline: float | None = None
    while os.getppid() == process:
        left_s = _TICK_S if deadline is None else deadline - time.monotonic()
        if left_s <= 0:
            print(sentence, file=sys.stderr, flush=True)
            os.kill(process, signal.SIGQUIT)
            time.sleep(_STACKS_WITHIN_S)
            if os.getppid() == process:
                os.kill(process, signal.SIGKILL)
            return
        if not select.select([0], [], [], left_s)[0]:
            continue
        written = os.read(0, 1 << 16)
        if not written or _IS_OVER in written:
            return
        if _RUNS in written:
            deadline = None
        if written.rpartition(_RUNS)[2]:
            deadline = deadline or time.monotonic() + within_s


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
