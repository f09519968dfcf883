"""The first Ctrl-C or SIGTERM ends a run as an error does; a second one leaves nothing behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from verifiers.train import termination
from verifiers.train.ranks import end_together
from verifiers.train.termination import ended_by_signals
from verifiers.train.trainer import GRPOTrainer

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


def test_who_handles_sigterm_already_goes_on_doing_so() -> None:
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
    monkeypatch.setattr(termination, "_DEAF_S", 0.0)
    with pytest.raises(SystemExit):
        end_together(ONE_PROCESS, signals(signal.SIGINT), signals(signal.SIGTERM))


@pytest.mark.parametrize("broken", ["generator", "probe"])
def test_closing_a_trainer_gives_back_the_weights_whatever_else_fails(broken: str) -> None:
    did = []

    def closes(name: str) -> Callable[[], None]:
        def close() -> None:
            did.append(name)
            if name == broken:
                raise KeyboardInterrupt

        return close

    trainer = SimpleNamespace(
        generator=SimpleNamespace(close=closes("generator")),
        _give_up_evaluation=lambda: None,
        _leave_probe=closes("probe"),
        _lock=SimpleNamespace(release=closes("lock")),
        weight_sync=SimpleNamespace(close=closes("weights")),
        feed=None,
    )
    with pytest.raises(KeyboardInterrupt):
        GRPOTrainer.close(trainer)
    assert did == ["generator", "probe", "weights", "lock"]
