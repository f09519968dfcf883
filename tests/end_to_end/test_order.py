"""Invariants 4 and 9: neither the order of arrival nor the number of ranks changes what is trained."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import tiny_world
import torch

from verifiers.testing import FakeOpenAIServer

CLOCKS = ("time/", "_s", "step_time", "runtime", "per_second", "overlap", "busy", "in_flight", "queued")
CLOCKS += ("memory/", "server/")


def run(make_fake_trainer: Callable[..., Any], env: Any, latency_seed: int, **overrides: Any) -> Any:
    latency = random.Random(latency_seed)
    answer = functools.partial(tiny_world.letters, fails=0.1)
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
