"""The data loop: what each of two ranks trains, what is logged of it, and where a run may stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerControl, TrainerState

from verifiers.data.batch_plan import BatchPlan, make_plan
from verifiers.monitoring.findings import LearningSignal
from verifiers.monitoring.stage_timer import StageTimer
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.advantages import group_advantages
from verifiers.train.batching.block_metrics import block_metrics
from verifiers.train.batching.micro_batches import MicroBatch
from verifiers.train.config import GRPOConfig
from verifiers.train.data_loop import DataLoop, StopsBetweenBlocks
from verifiers.train.processes.distributed import Ranks
from verifiers.types import Outcome, RolloutKey

PLAN = make_plan(
    per_device_train_batch_size=4, num_processes=2, num_generations=4, max_steps=1, num_prompts=9, seed=3
)


class Meeting:
    """Meeting point at which two ranks exchange values."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60.0)
        self._held: list[Any] = [None, None]

    def exchange(self, rank: int, own: Any) -> list[Any]:
        self._held[rank] = own
        self._barrier.wait()
        held = list(self._held)
        self._barrier.wait()
        return held


class RankOfTwo:
    """The interface of `Ranks`, for one of two threads."""

    count = 2

    def __init__(self, meeting: Meeting, index: int) -> None:
        self._meeting, self.index = meeting, index

    def gather(self, own: Any) -> list[Any]:
        return self._meeting.exchange(self.index, own)

    def on_rank_0(self, work: Callable[[], Any]) -> Any:
        return self._meeting.exchange(self.index, work() if self.index == 0 else None)[0]

    def scatter(self, work: Callable[[], Sequence[Any]]) -> Any:
        return self.on_rank_0(work)[self.index]


def a_block(rewards: Sequence[float]) -> ScoredBlock:
    """Return two groups of four; the rollouts have different lengths and one of them two rows."""

    def row(tokens: int) -> TokenSequence:
        return TokenSequence([1, 2], [3] * tokens, [1] * tokens, [-0.5] * tokens, [0] * tokens)

    def rollout(index: int) -> Rollout:
        key = RolloutKey(0, index // 4, index % 4)
        rows = [row(1 + index % 5)] + [row(2)] * (index == 6)
        return Rollout(key, Outcome.COMPLETED, prompt="p", completion="c", reward=rewards[index], rows=rows)

    return ScoredBlock(0, [Group(number, [rollout(4 * number + g) for g in range(4)]) for number in range(2)])


def reference(batch: MicroBatch) -> Tensor:
    """Return log-probs under which each token of rollout i is 0.1 i nats less likely than when it was sampled."""
    return batch["sampler_logps"] - 0.1 * batch["rollout_index"].unsqueeze(1)


def data_loop(block: ScoredBlock, plan: BatchPlan, ranks: Any, logged: dict[str, float], **settings: Any) -> DataLoop:
    prefetcher = SimpleNamespace(
        check=lambda: None,
        begin=lambda *_: None,
        take=lambda *_: block,
        groups=lambda _, count, step: block.groups[:count],
        oldest_version=lambda _: None,
    )
    session: Any = SimpleNamespace(open=lambda: prefetcher, publisher=SimpleNamespace(copy_of=lambda step: None))
    logprobs: Any = SimpleNamespace(of_reference=reference, old=lambda batch, _: batch["sampler_logps"])
    return DataLoop(
        plan,
        GRPOConfig("unused", use_cpu=True, bf16=False, **{"skip_zero_advantage_rows": False, **settings}),
        ranks,
        logprobs,
        session,
        StageTimer(),
        record=lambda block, trained, step: block_metrics(block, trained, plan, optimizer_step=step),
        log_block=lambda *_: None,
        log=logged.update,
    )


def run_ranks(block: ScoredBlock, **settings: Any) -> tuple[list[list[MicroBatch]], list[dict[str, float]]]:
    """Return the micro-batches and the logged metrics of each rank."""
    meeting, logged = Meeting(), [dict[str, float](), dict[str, float]()]

    def run(rank: int) -> list[MicroBatch]:
        return data_loop(block, PLAN, RankOfTwo(meeting, rank), logged[rank], **settings).micro_batches(0, 0)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2))), logged


def rollouts_of(batches: Sequence[MicroBatch]) -> list[int]:
    return sorted({index for batch in batches for index in batch["rollout_index"].tolist() if index >= 0})


def test_every_rank_logs_the_mean_of_rank_0_and_the_mean_of_all() -> None:
    plain = [0.1 * index for index in range(8)]
    plain_block = a_block(plain)
    plain_block.groups[1].rollouts[2].rows.pop()
    first, second = map(rollouts_of, run_ranks(plain_block)[0])
    assert len(first) == len(second) == 4
    rewards = dict(zip(first, [0.4, 0.5, 0.45, 0.55], strict=True))
    rewards |= dict(zip(second, [0.3075, 0.4075, 0.5075, 0.4075], strict=True))
    block = a_block([rewards[index] for index in range(8)])
    block.groups[1].rollouts[2].rows.pop()
    batches, logged = run_ranks(block)
    assert [*map(rollouts_of, batches)] == [first, second]
    assert logged[0] == logged[1]
    assert logged[0]["reward/mean_per_completion"] == pytest.approx(0.475)
    assert logged[0]["reward"] == logged[0]["reward/mean_per_completion_global"] == pytest.approx(0.44125)
    assert logged[0]["reward/denominator/completions_local"] == 4
    assert logged[0]["reward/denominator/completions_global"] == 8


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("max_steps", [1, 2])
def test_on_one_process_the_local_mean_is_the_global_one_streamed_or_not(streaming: bool, max_steps: int) -> None:
    """Group 1 has no advantage, and a run of one step ends before the second half of its block."""
    sizes = {"per_device_train_batch_size": 2, "num_generations": 4, "num_prompts": 9, "steps_per_generation": 4}
    plan = make_plan(**sizes, num_processes=1, gradient_accumulation_steps=2, max_steps=max_steps, seed=3)
    logged: dict[str, float] = {}
    block = a_block([0.1, 0.2, 0.3, 0.4, 0.635, 0.635, 0.635, 0.635])
    block.filtered.append(
        Group(2, [replace(one, key=RolloutKey(0, 2, place)) for place, one in enumerate(block.groups[1].rollouts)])
    )
    only_rank = Ranks(SimpleNamespace(num_processes=1, process_index=0, is_main_process=True))
    loop = data_loop(block, plan, only_rank, logged, skip_zero_advantage_rows=True, streaming=streaming)
    for step in range(max_steps):
        for micro_step in range(2):
            loop.micro_batches(step, micro_step)
    assert logged["reward/denominator/completions_local"] == logged["reward/denominator/completions_global"] == 12
    assert logged["reward/mean_per_completion"] == logged["reward/mean_per_completion_global"]


def test_a_run_that_trains_on_its_kl_alone_has_no_signal() -> None:
    options = {"kl_in_reward": True, "scale_rewards": "none", "loss_type": "dapo"}
    batches, logged = run_ranks(a_block([0.0] * 8), beta=0.5, **options)
    assert any(batch["advantages"].any() for own in batches for batch in own)
    assert (logged[0]["reward_std"], logged[0]["frac_reward_zero_std"]) == (0.0, 1.0)
    assert logged[0]["rollouts/with_advantage"] == 0.0
    signal = LearningSignal()
    for _ in range(3):
        signal.take({"steps": 1, **logged[0]})
    assert "every reward was 0" in str(signal.finding())


def test_the_kl_of_a_rollout_is_subtracted_from_its_reward_whichever_ranks_train_its_rows() -> None:
    rewards = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    block = a_block(rewards)
    batches, logged = run_ranks(block, beta=0.5, kl_in_reward=True, scale_rewards="none", loss_type="dapo")
    tokens = [sum(row.sampled_tokens for row in rollout.rows) for rollout in block.rollouts]
    assert tokens == [1, 2, 3, 4, 5, 1, 4, 3]
    kl = [0.1 * index * count for index, count in enumerate(tokens)]
    penalised = [reward - 0.5 * nats for reward, nats in zip(rewards, kl, strict=True)]
    wanted = group_advantages([penalised[:4], penalised[4:]], "none").advantages
    found = {}
    for batch in (batch for own in batches for batch in own):
        of_rows = batch["advantages"].sum(1) / batch["sampled_tokens"]
        found |= dict(zip(batch["rollout_index"].tolist(), of_rows.tolist(), strict=True))
        assert "reference_logps" not in batch
    found.pop(-1, None)
    assert [found[index] for index in range(8)] == pytest.approx([*wanted[0], *wanted[1]], abs=1e-5)
    assert logged[0] == logged[1]
    assert logged[0]["kl"] == pytest.approx(sum(kl) / sum(tokens), abs=1e-6)
    assert logged[0]["reward/kl_penalty"] == pytest.approx(0.5 * sum(kl) / 8, abs=1e-6)
    assert logged[0]["reward"] == pytest.approx(0.5), "what the environment gave"
    torch.testing.assert_close(penalised[1], 0.9)


# -- stops -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def at() -> StopsBetweenBlocks:
    return StopsBetweenBlocks(updates_per_block=4)


def after(callback: StopsBetweenBlocks, event: str, step: int, **asked: bool) -> tuple[bool, bool]:
    """Return whether the run stops, and saves, after an event at which a callback asked for it."""
    control = TrainerControl(**asked)
    state = TrainerState(global_step=step, max_steps=10)
    getattr(callback, event)(None, state, control)
    return control.should_training_stop, control.should_save


def test_a_stop_between_blocks_is_left_alone(at: StopsBetweenBlocks) -> None:
    assert after(at, "on_step_end", 4, should_training_stop=True) == (True, False)
    assert after(at, "on_step_end", 8) == (False, False)


@pytest.mark.parametrize(
    ("event", "step"), [("on_step_end", 2), ("on_log", 3), ("on_evaluate", 1), ("on_save", 1), ("on_substep_end", 0)]
)
def test_a_stop_inside_a_block_waits_for_its_end_and_a_save_comes_with_it(
    at: StopsBetweenBlocks, event: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    at.on_train_begin(None, TrainerState(global_step=step, max_steps=10), None)
    assert after(at, event, step, should_training_stop=True, should_save=True) == (False, False)
    assert after(at, event, step, should_training_stop=True) == (False, False)
    assert after(at, "on_step_end", 3) == (False, False)
    assert after(at, "on_step_end", 4) == (True, True)
    assert [record.getMessage() for record in caplog.records] == [
        "a callback stops the run inside a block: it ends at step 4, when the block has been trained."
    ]


def test_a_run_may_end_inside_its_last_block_and_a_new_one_knows_nothing_of_it(at: StopsBetweenBlocks) -> None:
    assert after(at, "on_step_end", 10, should_training_stop=True, should_save=True) == (True, True)
    after(at, "on_step_end", 9, should_training_stop=True)
    at.on_train_begin(None, TrainerState(), None)
    assert after(at, "on_step_end", 4) == (False, False)
