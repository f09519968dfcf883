"""One training block goes the way that the architecture names, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_world

from verifiers.data.sampler import RepeatSampler
from verifiers.envs import environment
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rubrics.rubric import Rubric
from verifiers.train.batching import training_block
from verifiers.train.batching.rollout_session import RolloutPrefetcher

ROAD: list[tuple[Any, str, str]] = [
    (RepeatSampler, "__init__", "RepeatSampler"),
    (BatchRequest, "__init__", "BatchRequest"),
    (AsyncBatchGenerator, "submit_batch", "AsyncBatchGenerator.submit_batch"),
    (tiny_world.vf.Environment, "run_rollouts", "Environment.run_rollouts"),
    (Rubric, "score_group", "Rubric.score_group"),
    (AsyncBatchGenerator, "get_batch", "AsyncBatchGenerator.get_batch"),
    (training_block, "rollout_advantages", "advantages"),
    (training_block, "shuffle_tensor_dict", "shuffle_tensor_dict"),
    (training_block, "split_tensor_dict", "split_tensor_dict"),
    (tiny_world.GRPOTrainer, "_compute_loss", "GRPOTrainer._compute_loss"),
]
"""Each step, as an attribute of its owner and under its name in the documentation."""


def test_a_training_block_goes_the_road_in_order(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def noting(name: str, function: Callable[..., Any], *, returns: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not returns:
                seen.append(name)
            result = function(*args, **kwargs)
            seen.append(name)
            return result

        return call

    for owner, attribute, name in ROAD:
        # it waits, so it counts when it returns
        step = noting(name, getattr(owner, attribute), returns=attribute == "get_batch")
        monkeypatch.setattr(owner, attribute, step)
    make_trainer(tiny_world.single_turn(), max_steps=1).train()
    assert list(dict.fromkeys(seen)) == [name for _, _, name in ROAD]


def test_one_request_goes_unchanged_from_the_plan_to_its_rollout(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    played: list[Any] = []
    plan, play_one = RolloutPrefetcher.batch_request, environment.play

    def batch_request(*args: Any) -> BatchRequest:
        batch = plan(*args)
        planned.extend(batch.requests)
        return batch

    async def play(env: Any, request: Any, run: Any) -> Any:
        played.append(request)
        return await play_one(env, request, run)

    monkeypatch.setattr(RolloutPrefetcher, "batch_request", batch_request)
    monkeypatch.setattr(environment, "play", play)
    make_trainer(tiny_world.single_turn(), max_steps=1).train()
    assert len(played) >= 4
    assert {id(request) for request in played} == {id(request) for request in planned}
