"""A rank that hears of another's failure is ended where it does not end by itself, and left alone where it does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed  # noqa: F401 - a rank that trains has it; importing it takes longer than these tests wait

from verifiers.errors import RankError
from verifiers.train import rank_watch
from verifiers.train.rank_links import Links, RankFailure
from verifiers.train.rank_watch import RankWatch

FAILURE = RankFailure(1, "ValueError: no", "Traceback\n  here")


class Left(RankWatch):
    """Notes when it would end the process."""

    left_after_s = 0.0

    def _leave(self) -> None:
        assert self._pressed_since is not None
        self.left_after_s = self.left_after_s or time.monotonic() - self._pressed_since

    def until_left(self) -> float:
        deadline = time.monotonic() + 5.0
        while not self.left_after_s and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.left_after_s

    def hear(self) -> None:
        self._do(lambda: self._hear(FAILURE))

    def hear_and_wait(self) -> None:
        self.hear()
        time.sleep(5.0)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Left]:
    monkeypatch.setattr(rank_watch, "_WAKE_AFTER_S", 0.05)
    monkeypatch.setattr(rank_watch, "_LEAVE_AFTER_S", 1.0)
    monkeypatch.setattr(rank_watch, "_CLOSED_AFTER_S", 60.0)
    monkeypatch.setattr(rank_watch, "_LINGER_S", 0.1)
    # both are of the whole process
    monkeypatch.setattr(rank_watch, "break_collectives", lambda: None)
    monkeypatch.setattr(rank_watch, "_exit_after", lambda seconds: None)
    watching = Left(Links(0), 2, lambda error: None)
    yield watching
    if watching._thread.is_alive():
        watching.end()


def conclude(watch: Left) -> None:
    with pytest.raises(RankError, match="rank 1 stopped: ValueError: no") as raised:
        watch.hear_and_wait()
    watch.conclude(raised.value)


def test_a_rank_that_closes_what_it_holds_has_longer_than_one_that_cannot_be_woken(watch: Left) -> None:
    conclude(watch)
    time.sleep(1.3)
    watch.end()
    assert watch.left_after_s == 0.0


def test_a_rank_whose_closing_does_not_end_is_ended(watch: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch, "_CLOSED_AFTER_S", 0.5)
    conclude(watch)
    assert watch.until_left() >= 0.5


def test_a_rank_that_cannot_be_woken_is_ended(watch: Left) -> None:
    # its main thread does not come to raise
    watch.ending.begin()
    watch.hear()
    assert watch.until_left() >= 1.0


def test_further_signals_let_a_rank_close_what_it_holds(watch: Left) -> None:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    watch.conclude(KeyboardInterrupt())
    signal.raise_signal(signal.SIGINT)
