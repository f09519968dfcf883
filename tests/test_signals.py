"""What a signal does: the first Ctrl-C or SIGTERM ends a run as an error does, wherever it is."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from verifiers.interrupt import EndedBySignal, ended_by_signals

pytestmark = pytest.mark.usefixtures("_default_handlers")


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGTERM, EndedBySignal), (signal.SIGHUP, EndedBySignal), (signal.SIGINT, KeyboardInterrupt)],
    ids=["SIGTERM", "SIGHUP", "SIGINT"],
)
def test_a_signal_raises_while_a_run_is_on_and_does_what_it_did_afterwards(
    number: int, raised: type[BaseException]
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(raised) as ended, ended_by_signals():
        signal.raise_signal(number)
    if isinstance(ended.value, EndedBySignal):
        assert (ended.value.code, str(ended.value)) == (128 + number, f"ended by {signal.Signals(number).name}")
    assert signal.getsignal(number) is before


def test_a_callers_own_handler_of_sigterm_stays() -> None:
    got = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]


def test_outside_of_the_main_thread_nothing_is_handled() -> None:
    seen = []

    def run() -> None:
        with ended_by_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


STUCK = """
import ctypes, os
from verifiers.interrupt import ended_by_signals
from verifiers.loop_thread import LoopThread
from verifiers.train.processes.distributed import ended_if_stuck

thread = LoopThread(close_last=None, failed=print)
thread.start()
with ended_by_signals() as ended:
    with ended_if_stuck(ended, thread.loop, lambda error: os.write(1, f"gave back: {error}".encode())):
        mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        libc.pthread_mutex_lock(mutex)
        os.write(1, b"stuck\\n")
        libc.pthread_mutex_lock(mutex)
"""


def test_a_signal_ends_a_rank_0_that_is_inside_a_call_which_does_not_return() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stuck\n"
        main = psutil.Process(process.pid)
        used = None
        while used != (used := main.cpu_times().user) or main.status() != psutil.STATUS_SLEEPING:
            # it may still be on its way into the call
            time.sleep(0.1)
        process.terminate()
        printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed) == (143, b"gave back: ended by SIGTERM")
    assert b"inside a call that does not return" in said
