"""The first Ctrl-C or SIGTERM ends a run as an error does; rank 0 names the rank that failed first."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from verifiers.errors import RankError
from verifiers.train.processes import termination
from verifiers.train.processes.termination import end_together, ended_by_signals

ONE_PROCESS = SimpleNamespace(num_processes=1)


@pytest.fixture(autouse=True)
def nobody_handles_signals() -> Iterator[None]:
    """As in a process that has just begun; a command that another test ran may have left its own handler."""
    begun_with = ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler))
    before = [(number, signal.signal(number, handler)) for number, handler in begun_with]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_raises_while_a_run_is_on_and_does_what_it_did_afterwards(
    number: int, raised: type[BaseException]
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(raised, match="ended by SIGTERM" if raised is SystemExit else None), ended_by_signals():
        signal.raise_signal(number)
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


def signals(*numbers: int) -> Callable[[], None]:
    def work() -> None:
        for number in numbers:
            signal.raise_signal(number)

    return work


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C again", "SIGTERM after it"])
def test_a_second_signal_lets_a_run_give_back_all_that_it_holds(second: int) -> None:
    did = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            # such as letting a server go on that was paused
            signal.raise_signal(second)
            did.append("unwound")

    def close() -> None:
        signal.raise_signal(second)
        did.append("closed")

    with pytest.raises(KeyboardInterrupt):
        end_together(ONE_PROCESS, work, close)
    assert did == ["unwound", "closed"]


def test_a_signal_that_comes_while_a_finished_run_closes_ends_what_follows_and_not_the_closing() -> None:
    did = []

    def close() -> None:
        signal.raise_signal(signal.SIGINT)
        did.append("closed")

    with pytest.raises(KeyboardInterrupt):
        end_together(ONE_PROCESS, lambda: None, close)
    assert did == ["closed"]


def test_a_run_that_does_not_end_is_ended_by_a_later_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(termination, "_ENDS_WITHIN_S", 0.0)
    with pytest.raises(SystemExit):
        end_together(ONE_PROCESS, signals(signal.SIGINT), signals(signal.SIGTERM))


@pytest.mark.parametrize("broken", ["generator", "check"])
def test_closing_a_run_gives_back_the_weights_whatever_else_fails(broken: str) -> None:
    did = []

    def closes(name: str) -> Callable[[], None]:
        def close() -> None:
            did.append(name)
            if name == broken:
                raise KeyboardInterrupt

        return close

    from verifiers.train.run_lifecycle import RolloutSession, RunLifecycle
    from verifiers.train.weight_sync.publisher import WeightPublisher

    publisher = SimpleNamespace(
        _check=SimpleNamespace(abandon=closes("check")), sync=SimpleNamespace(close=closes("weights")), _pool=None
    )
    session = SimpleNamespace(generator=SimpleNamespace(close=closes("generator")), prefetcher=None)
    session._publisher = SimpleNamespace(close=lambda: WeightPublisher.close(publisher))
    evaluator = SimpleNamespace(give_up=lambda: None, state=dict)
    parts: Any = {
        "plan": SimpleNamespace(source=None),
        "ranks": None,
        "directory": SimpleNamespace(close=closes("lock")),
        "session": SimpleNamespace(close=lambda: RolloutSession.close(session)),
        "evaluator": evaluator,
        "schedule": SimpleNamespace(),
        "monitor": None,
    }
    with pytest.raises(KeyboardInterrupt):
        RunLifecycle(**parts).close()
    assert did == ["generator", "check", "weights", "lock"]


STUCK = """
import ctypes, os
from verifiers.train.processes.termination import ended_by_signals

with ended_by_signals(lambda error: os.write(1, f"gave back: {error}".encode())):
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    os.write(1, b"stuck\\n")
    libc.pthread_mutex_lock(mutex)
"""


def test_a_signal_ends_a_rank_0_that_is_inside_a_call_which_does_not_return() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"stuck\n"
        used, child = None, psutil.Process(process.pid)
        while used != (used := child.cpu_times()) or child.status() != psutil.STATUS_SLEEPING:
            # it may still be on its way into the call
            time.sleep(0.1)
        process.terminate()
        printed, said = process.communicate(timeout=60)
    assert (process.returncode, printed) == (1, b"gave back: ended by SIGTERM")
    assert b"inside a call that does not return" in said


RANK_1 = SimpleNamespace(num_processes=2, process_index=1, is_main_process=False)


def test_a_rank_above_0_is_killed_by_signals_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    rank = SimpleNamespace(**vars(RANK_1), wait_for_everyone=lambda: None)
    handlers = end_together(
        rank, lambda: [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], lambda: None
    )
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Any]]:
    """Make the view that a rank has of failures; the ranks meet at one store."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setattr(termination, "_run_number", itertools.repeat(0))
    monkeypatch.setattr(termination, "_LAUNCHER_S", 0.0)
    monkeypatch.setattr(termination, "_EXIT_S", 3600.0)
    yield termination._FirstFailure
    del store


GLOO = RuntimeError("[pair.cc:555] gloo: Connection closed by peer [127.0.0.1]:5432")
SIGTERM = SystemExit("ended by SIGTERM")


@pytest.mark.parametrize("error", [GLOO, SIGTERM, ValueError("because of it")], ids=["gloo", "SIGTERM", "an error"])
def test_rank_0_names_the_rank_that_failed_first_with_its_traceback(
    two_ranks: Callable[[int], Any], error: BaseException
) -> None:
    zero, one = two_ranks(0), two_ranks(1)
    own = KeyError("no such column")
    assert one.cause_of(own) is own
    named = zero.cause_of(error)
    assert isinstance(named, RankError)
    assert str(named) == "rank 1 stopped: KeyError: 'no such column'"
    assert "no such column" in named.__notes__[0]


def test_what_follows_another_ranks_end_is_never_named_as_the_first_failure(two_ranks: Callable[[int], Any]) -> None:
    zero, one = two_ranks(0), two_ranks(1)
    told = RankError("rank 0 stopped: ValueError: no rows")
    assert one.cause_of(told) is told
    assert "another rank ended without an error of its own" in str(one.cause_of(GLOO))
    assert zero.cause_of(SIGTERM) is SIGTERM
    assert zero.cause_of(interrupt := KeyboardInterrupt()) is interrupt


def test_a_store_that_is_gone_hides_no_error(
    two_ranks: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(termination, "_STORE_TIMEOUT_S", 0.2)
    error = ValueError("no rows")
    assert two_ranks(0).cause_of(error) is error
