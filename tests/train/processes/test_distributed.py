"""What rank 0 does for all ranks, and the end of all: rank 0 names the rank that failed first."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifiers import interrupt
from verifiers.errors import RankError
from verifiers.interrupt import EndedBySignal
from verifiers.train.processes import distributed
from verifiers.train.processes.distributed import Ranks, end_together

pytestmark = pytest.mark.usefixtures("_default_handlers")

ONE_PROCESS = SimpleNamespace(num_processes=1, is_main_process=True)


def test_one_process_does_its_own_work() -> None:
    ranks = Ranks(ONE_PROCESS)
    assert ranks.on_rank_0(lambda: 3) == 3
    assert ranks.scatter(lambda: ["mine"]) == "mine"
    with pytest.raises(ValueError, match="no rows"):
        ranks.scatter(_fail)


def _fail() -> list[int]:
    raise ValueError("no rows")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_rank_gets_its_own_part_of_what_rank_0_made_and_every_rank_its_failure() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    script = Path(__file__).with_name("run_distributed.py")
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"rank {rank} is done" in done.stdout for rank in range(2)] == [True, True]


def signals(*numbers: int) -> Callable[..., None]:
    def work(*_: Any) -> None:
        for number in numbers:
            signal.raise_signal(number)

    return work


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C again", "SIGTERM after it"])
def test_a_second_signal_lets_a_run_give_back_all_that_it_holds(second: int) -> None:
    did = []

    def work(_: Any) -> None:
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
        end_together(ONE_PROCESS, lambda _: None, close)
    assert did == ["closed"]


def test_a_run_that_does_not_end_is_ended_by_a_later_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "_GIVEN_BACK_WITHIN_S", 0.0)
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

    from verifiers.train.batching.rollout_session import RolloutSession
    from verifiers.train.trainer import GRPOTrainer
    from verifiers.train.weight_sync.publisher import WeightPublisher

    publisher = SimpleNamespace(
        _check=SimpleNamespace(forget=closes("check")), sync=SimpleNamespace(close=closes("weights")), _pool=None
    )
    session = SimpleNamespace(generator=SimpleNamespace(close=closes("generator")), prefetcher=None)
    session._tracing = contextlib.ExitStack()
    session.publisher = SimpleNamespace(close=lambda: WeightPublisher.close(publisher))
    trainer: Any = SimpleNamespace(
        directory=SimpleNamespace(close=closes("lock")),
        session=SimpleNamespace(close=lambda: RolloutSession.close(session)),
        evaluator=SimpleNamespace(stored=SimpleNamespace(own=set())),
    )
    with pytest.raises(KeyboardInterrupt):
        GRPOTrainer.close(trainer)
    assert did == ["generator", "check", "weights", "lock"]


RANK_1 = SimpleNamespace(num_processes=2, process_index=1, is_main_process=False)


def test_a_rank_above_0_is_killed_by_signals_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    rank = SimpleNamespace(**vars(RANK_1), wait_for_everyone=lambda: None)
    handlers = end_together(
        rank, lambda _: [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)], lambda: None
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
    monkeypatch.setattr(distributed, "_run_number", itertools.repeat(0))
    monkeypatch.setattr(distributed, "_LAUNCHER_S", 0.0)
    monkeypatch.setattr(distributed, "_EXIT_S", 3600.0)
    yield distributed._FirstFailure
    del store


GLOO = RuntimeError("[pair.cc:555] gloo: Connection closed by peer [127.0.0.1]:5432")
SIGTERM = EndedBySignal(signal.SIGTERM)


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
    monkeypatch.setattr(distributed, "_STORE_TIMEOUT_S", 0.2)
    error = ValueError("no rows")
    assert two_ranks(0).cause_of(error) is error
