"""Streamed micro-batches are the block's, in plan order, and their gradient has the whole update's denominators."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.data.batch_plan import BatchPlan, make_plan
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.micro_batches import MicroSteps, all_micro_batches
from verifiers.train.batching.training_block import BlockStream, build_training_block
from verifiers.train.config import GRPOConfig
from verifiers.train.loss.prefixes import SHARED_ROWS
from verifiers.types import Failure, Outcome, RolloutKey

# without vespo, which is refused where rollouts have several rows
STREAMED_LOSSES = ("grpo", "sapo", "dr_grpo", "dapo", "cispo", "luspo")


def a_rollout(key: RolloutKey, draw: random.Random) -> Rollout:
    """One or two rows whose token ids tell whose they are; some fail, some rewards are equal."""
    if draw.random() < 0.15:
        failure = Failure("LookupError", "failed")
        return Rollout(key, Outcome.ENVIRONMENT_ERROR, "p", "", failure=failure)
    number = 100 * key.example_id + 10 * key.generation
    rows = []
    for row in range(draw.choice([1, 1, 2])):
        count = draw.randint(1, 5)
        ids = [number + row] * count
        rows.append(
            TokenSequence([1] * draw.randint(1, 3), ids, [1] * count, [-0.5] * count, [draw.randint(0, 3)] * count)
        )
    return Rollout(key, Outcome.COMPLETED, "p", "", reward=float(draw.randint(0, 2)), rows=rows)


def a_block(plan: BatchPlan, seed: int, block_id: int = 0) -> ScoredBlock:
    draw = random.Random(seed)
    groups = [
        Group(
            example,
            [a_rollout(RolloutKey(block_id, example, g), draw) for g in range(plan.num_generations)],
        )
        for example in plan.example_ids(block_id)
    ]
    return ScoredBlock(block_id, groups)


@functools.cache
def some_settings(loss_type: str, skip: bool = False) -> GRPOConfig:
    sizes = {"epsilon_high": 5.0 if loss_type == "cispo" else None, "max_completion_length": 7}
    return GRPOConfig("unused", use_cpu=True, bf16=False, loss_type=loss_type, skip_zero_advantage_rows=skip, **sizes)


class Prefetcher:
    """Hands out a finished block group by group."""

    def __init__(self, block: ScoredBlock, oldest: int | None = None) -> None:
        self._block, self._oldest = block, oldest

    def groups(self, block_id: int, count: int, optimizer_step: int) -> list[Group]:
        return self._block.groups[:count]

    def take(self, block_id: int, optimizer_step: int) -> ScoredBlock:
        return self._block

    def oldest_version(self, optimizer_step: int) -> int | None:
        return self._oldest


def streamed(
    block: ScoredBlock, plan: BatchPlan, args: Any, oldest: int | None = None
) -> tuple[MicroSteps, list[float], Any]:
    """Return the micro-batches, the scale of each update's gradient, and what was dropped."""
    prefetcher: Any = Prefetcher(block, oldest)
    stream = BlockStream(prefetcher, plan, args, block.block_id, 0)
    parts = [stream.next() for _ in range(plan.steps_per_generation)]
    scales = [scale for _, scale in parts if scale is not None]
    _, trained = stream.finish()
    return [by_rank for by_rank, _ in parts], scales, trained.dropped


def influence(micro_steps: MicroSteps, scales: Sequence[float], plan: BatchPlan) -> dict[int, float]:
    """Return by token id (which tells rollout and row) the weight of its tokens in the gradient of their update."""
    return {
        whose(cell, row): float(cell["token_weights"][row]) * scales[number // plan.gradient_accumulation_steps]
        for number, by_rank in enumerate(micro_steps)
        for cell in all_micro_batches([by_rank])
        for row in range(len(cell["input_ids"]))
        if cell["sampled_tokens"][row]
    }


def whose(batch: dict[str, torch.Tensor], row: int) -> int:
    """Return the token id that all sampled tokens of a row share."""
    return int(batch["input_ids"][row][batch["loss_mask"][row].bool()][0])


Sizes = dict[str, int]
SIZES = st.fixed_dictionaries(
    {
        "per_device": st.integers(1, 3),
        "ranks": st.sampled_from([1, 2, 4]),
        "accumulated": st.integers(1, 3),
        "updates": st.integers(1, 2),
        "generations": st.sampled_from([2, 3, 4]),
        "iterations": st.integers(1, 2),
        "groups_lie_across_micro_batches": st.booleans(),
    }
)


def a_plan(sizes: dict[str, int], **changes: int) -> BatchPlan:
    generations = sizes["generations"]
    # the factor that makes whole groups: in the micro-batch, or only in the update
    wide, deep = (1, generations) if sizes["groups_lie_across_micro_batches"] else (generations, 1)
    given = {
        "per_device_train_batch_size": sizes["per_device"] * wide,
        "num_processes": sizes["ranks"],
        "gradient_accumulation_steps": sizes["accumulated"] * deep,
        "steps_per_generation": sizes["accumulated"] * deep * sizes["updates"],
        "num_generations": generations,
        "num_iterations": sizes["iterations"],
        "max_steps": 4,
        "num_prompts": 200,
    }
    return make_plan(**{**given, **changes})


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10**6), loss_type=st.sampled_from(STREAMED_LOSSES), skip=st.booleans())
def test_a_streamed_update_weighs_every_token_as_the_whole_block_does(
    sizes: dict[str, int], seed: int, loss_type: str, skip: bool
) -> None:
    sizes = {**sizes, "updates": 1}
    plan = a_plan(sizes)
    block, args = a_block(plan, seed), some_settings(loss_type, skip)
    micro_steps, scales, dropped = streamed(block, plan, args)
    whole = build_training_block(block, plan, args)
    assert influence(micro_steps, scales, plan) == pytest.approx(influence(whole.micro_steps, [1.0], plan), rel=1e-5)
    assert sorted(map(str, dropped)) == sorted(map(str, whole.dropped))


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10**6), skip=st.booleans(), oldest=st.sampled_from([None, 1, 2]))
def test_every_rollout_is_in_its_planned_micro_batch_or_dropped_with_a_reason(
    sizes: dict[str, int], seed: int, skip: bool, oldest: int | None
) -> None:
    plan = a_plan(sizes)
    block, args = a_block(plan, seed), some_settings("dapo", skip)
    micro_steps, scales, dropped = streamed(block, plan, args, oldest)
    assert len(scales) == sizes["updates"]
    place = {key: index for index, key in enumerate(plan.requests(0))}
    trained = set()
    for number, by_rank in enumerate(micro_steps):
        assert len(by_rank) == plan.num_processes
        for cell in all_micro_batches([by_rank]):
            for row, tokens in enumerate(cell["sampled_tokens"]):
                if tokens:
                    example, generation = whose(cell, row) // 100, whose(cell, row) % 100 // 10
                    assert place[example, generation] // plan.completions_per_micro_step == number
                    trained.add((example, generation))
    gone = [(item.key.example_id, item.key.generation) for item in dropped]
    assert len(set(gone)) == len(gone)
    assert trained | set(gone) == set(plan.requests(0))
    assert not trained & set(gone)
    if oldest is not None:
        old = {
            (r.key.example_id, r.key.generation)
            for r in block
            if r.rows and min(row.oldest_version for row in r.rows) < oldest
        }
        assert not trained & old


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10**6), loss_type=st.sampled_from(["grpo", "dapo"]))
def test_every_update_of_a_streamed_block_divides_by_what_is_in_it(
    sizes: dict[str, int], seed: int, loss_type: str
) -> None:
    plan = a_plan({**sizes, "updates": 2})
    block, args = a_block(plan, seed), some_settings(loss_type)
    micro_steps, scales, _ = streamed(block, plan, args)
    accumulated = plan.gradient_accumulation_steps
    for update in range(2):
        part = micro_steps[update * accumulated : (update + 1) * accumulated]
        shares = influence(part, [scales[update]], plan)
        tokens = {
            whose(cell, row): int(count)
            for cell in all_micro_batches(part)
            for row, count in enumerate(cell["sampled_tokens"])
            if count
        }
        total = sum(share * tokens[name] for name, share in shares.items())
        assert total == pytest.approx(1.0 if tokens else 0.0, rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10**6), streams=st.booleans())
def test_any_number_of_ranks_trains_the_same_tokens_with_the_same_weight(
    sizes: dict[str, int], seed: int, streams: bool
) -> None:
    found = []
    for ranks in (1, 2, 4):
        changes = {"num_processes": ranks, "per_device_train_batch_size": 4 * sizes["generations"] // ranks}
        plan = a_plan({**sizes, "groups_lie_across_micro_batches": False}, **changes)
        block, args = a_block(plan, seed), some_settings("dapo")
        if streams:
            micro_steps, scales, _ = streamed(block, plan, args)
        else:
            micro_steps, scales = build_training_block(block, plan, args).micro_steps, [1.0] * sizes["updates"]
        found.append(influence(micro_steps, scales, plan))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize(
    ("device", "rest", "is_shared"), [("cpu", 2, True), ("cpu", 12, True), ("cuda", 2, True), ("cuda", 12, False)]
)
def test_a_prompt_is_computed_once_where_that_saves_enough_which_is_more_on_a_gpu(
    device: str, rest: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"per_device": 1, "ranks": 1, "accumulated": 1, "updates": 1, "generations": 4, "iterations": 1}
    plan = a_plan({**sizes, "groups_lie_across_micro_batches": False})
    rows = [TokenSequence([1] * 8, [2 + g] * rest, [1] * rest, [-0.5] * rest, [0] * rest) for g in range(4)]
    rollouts = [
        Rollout(RolloutKey(0, 0, g), Outcome.COMPLETED, "p", "", reward=float(g), rows=[row])
        for g, row in enumerate(rows)
    ]
    settings = some_settings("dapo")
    monkeypatch.setattr(GRPOConfig, "device", torch.device(device))
    block = build_training_block(ScoredBlock(0, [Group(0, rollouts)]), plan, settings)
    found = [SHARED_ROWS in batch for batch in all_micro_batches(block.micro_steps)]
    assert found == [is_shared]
