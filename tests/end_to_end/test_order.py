"""Invariants 4 and 9: neither the order of arrival nor the number of ranks changes what is trained."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny_world
import torch

from verifiers.data.batch_plan import make_plan, rollout_seed
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.batching.micro_batches import all_micro_batches
from verifiers.train.batching.training_block import TrainingBlock, build_training_block
from verifiers.types import RolloutKey

CLOCKS = ("time/", "_s", "step_time", "runtime", "per_second", "overlap", "busy", "in_flight", "queued", "memory/")


def answer(body: dict[str, Any]) -> Any:
    """Return an answer that its request alone decides, as a seeded sampler's does; some rollouts fail for good."""
    draw = random.Random(f"{body['seed']}:{body['messages'][-1]['content']}")
    if draw.random() < 0.1 and body["seed"] > 1000:
        return Fault(400)
    return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, 8)))


def run(make_fake_trainer: Callable[..., Any], env: Any, latency_seed: int, **overrides: Any) -> Any:
    latency = random.Random(latency_seed)
    with FakeOpenAIServer(answer, latency_s=lambda _: latency.random() * 0.05) as fake:
        trainer = make_fake_trainer(env, fake.url, **{"max_steps": 4, **overrides})
        trainer.train()
        trainer.seeds = [request.body["seed"] for request in fake.requests]
    trainer.arrived = [body["seed"] for body, _ in trainer.client.answers]
    return trainer


def logged_without_clocks(trainer: Any, others: tuple[str, ...] = ()) -> list[dict[str, float]]:
    return [
        {name: value for name, value in entry.items() if not any(clock in name for clock in (*CLOCKS, *others))}
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize(
    ("make_env", "ahead", "drains", "streaming"),
    [
        pytest.param(tiny_world.Dialogue, 1, True, True, marks=pytest.mark.slow),
        (tiny_world.single_turn, 2, False, True),
    ],
)
def test_the_order_of_arrival_changes_neither_tensors_nor_metrics(
    make_fake_trainer: Callable[..., Any], make_env: Any, ahead: int, drains: bool, streaming: bool
) -> None:
    options = {"num_batches_ahead": ahead, "drain_before_sync": drains, "streaming": streaming}
    first, second = (run(make_fake_trainer, make_env(), seed, **options) for seed in (1, 2))
    assert first.arrived != second.arrived
    assert sorted(first.arrived) == sorted(second.arrived)
    assert len(first.seen) == len(second.seen) == 8
    # what is in flight when weights are pushed depends on the clock; drained, nothing is
    clocked = () if drains or not ahead else ("policy_versions", "staleness")
    for one, other in zip(first.seen, second.seen, strict=True):
        assert one.keys() == other.keys()
        names = [name for name in one if name not in clocked]
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in names)
    assert logged_without_clocks(first, clocked) == logged_without_clocks(second, clocked)


def test_no_two_rollouts_or_turns_share_a_sampling_seed(make_fake_trainer: Callable[..., Any]) -> None:
    trainer = run(make_fake_trainer, tiny_world.Dialogue(), 1, max_steps=2)
    seeds = [seed for seed in trainer.seeds if seed > 1000]
    assert len(seeds) > 2 * 8 * 2
    assert len(set(seeds)) == len(seeds)


def test_the_seed_of_a_rollout_is_that_of_its_identity(make_fake_trainer: Callable[..., Any]) -> None:
    first = run(make_fake_trainer, tiny_world.single_turn(), 1, seed=3, max_steps=1)
    again = run(make_fake_trainer, tiny_world.single_turn(), 2, seed=3, max_steps=1)
    other = run(make_fake_trainer, tiny_world.single_turn(), 1, seed=4, max_steps=1)
    assert sorted(first.seeds) == sorted(again.seeds)
    assert not {s for s in first.seeds if s > 1000} & set(other.seeds)
    key = RolloutKey(2, 5, 1)
    assert rollout_seed(3, key) == rollout_seed(3, key)
    near = [dataclasses.replace(key, **{name: getattr(key, name) + 1}) for name in key.__slots__]
    assert len({rollout_seed(3, k) for k in [key, *near]}) == 4


Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[float, ...], float]


def rows_by_update(block: TrainingBlock, micro_batches_per_update: int) -> list[list[Row]]:
    """Return the real rows of each update, over all its micro-batches and ranks."""
    updates: list[list[Row]] = []
    for start in range(0, len(block.micro_steps), micro_batches_per_update):
        found = []
        for cell in all_micro_batches(block.micro_steps[start : start + micro_batches_per_update]):
            for place in range(len(cell["prompt_ids"])):
                if cell["sampled_tokens"][place]:
                    prompt, ids, mask, logps = (tuple(column) for column in tiny_world.sequence(cell, place))
                    advantage = float(cell["advantages"][place][cell["loss_mask"][place].bool()][0])
                    found.append((prompt, ids, mask, logps, round(advantage, 5)))
        updates.append(sorted(found))
    return updates


@pytest.mark.parametrize("make_env", [tiny_world.single_turn, tiny_world.Rewriting])
def test_ranks_together_train_the_rows_that_one_rank_trains(
    make_fake_trainer: Callable[..., Any], make_env: Any
) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    trainer = run(make_fake_trainer, make_env(), 1, **sizes, max_steps=1)
    block = trainer.last_block
    assert block is not None
    blocks = {}
    for ranks in (1, 2, 4):
        plan = make_plan(
            **{**sizes, "per_device_train_batch_size": 4 // ranks},
            num_processes=ranks,
            num_generations=4,
            max_steps=4,
            num_prompts=16,
            seed=trainer.plan.seed,
        )
        assert plan.example_ids(block.block_id) == trainer.plan.example_ids(block.block_id)
        blocks[ranks] = build_training_block(block, plan, trainer.args, pad_token_id=0)
        assert all(len(cells) == ranks for cells in blocks[ranks].micro_steps)
        rows = [len(batch["prompt_ids"]) for batch in all_micro_batches(blocks[ranks].micro_steps)]
        assert min(rows) > 0
    one = rows_by_update(blocks[1], 2)
    assert [len(rows) for rows in one] != [0, 0]
    assert rows_by_update(blocks[2], 2) == one
    assert rows_by_update(blocks[4], 2) == one
