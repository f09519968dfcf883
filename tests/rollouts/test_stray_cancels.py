"""Code of an environment that waits for a cancelled task of its own ends its own rollout, and no other."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.testing import FakeOpenAIServer
from verifiers.types import RolloutKey


async def wait_for_what_was_cancelled() -> str:
    task = asyncio.create_task(asyncio.sleep(9))
    task.cancel()
    await task
    return ""


async def look_up(word: str) -> str:
    """Look a word up."""
    return await wait_for_what_was_cancelled()


class Waits(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return await wait_for_what_was_cancelled() if state["answer"] == "1" else "go on"


class SaysNumbers(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": np.int64(1) if state["answer"] == "1" else "1"}]


async def graded(answer: str) -> float:
    return float(len(await wait_for_what_was_cancelled())) if answer == "1" else 1.0


def calls_a_tool(body: dict[str, Any]) -> Any:
    asked = body["messages"]
    calls = asked[0]["content"] == "1?" and asked[-1]["role"] != "tool"
    return {"tool_calls": [{"name": "look_up", "arguments": {"word": "a"}}]} if calls else "done"


def env_of(kind: Any, reward: Any = lambda: 1.0, **options: Any) -> vf.Environment:
    return kind(dataset=[{"question": "?"}], rubric=vf.Rubric([reward]), **options)


def played(env: vf.Environment) -> list[Rollout]:
    with FakeOpenAIServer(calls_a_tool) as server, AsyncBatchGenerator(env, server.url, "m") as generator:
        asked = [[{"role": "user", "content": f"{number}?"}] for number in range(4)]
        keys = [RolloutKey(0, number, 0) for number in range(4)]
        requests = [RolloutRequest(key, prompt, str(key.example_id)) for key, prompt in zip(keys, asked, strict=True)]
        generator.submit_batch(BatchRequest(0, requests))
        return list(generator.get_batch(0, 30.0).launched)


@pytest.mark.parametrize(
    ("env", "outcome", "said"),
    [
        (env_of(Waits, max_turns=2), "environment_error", "waited for a task that was cancelled"),
        (env_of(vf.SingleTurnEnv, graded), "grading_error", "waited for a task that was cancelled"),
        (env_of(SaysNumbers, max_turns=2), "environment_error", "a message cannot be written as JSON"),
    ],
)
def test_it_fails_its_own_rollout_and_the_others_end(env: vf.Environment, outcome: str, said: str) -> None:
    rollouts = played(env)
    assert [str(one.outcome) for one in rollouts] == ["completed", outcome, "completed", "completed"]
    assert said in str(rollouts[1].failure)


def test_the_policy_is_told_of_a_tool_that_does() -> None:
    rollouts = played(env_of(vf.ToolEnv, tools=[look_up]))
    assert [str(one.outcome) for one in rollouts] == ["completed"] * 4
    assert "waited for a task that was cancelled" in str(rollouts[1].completion)


def test_turns_without_a_bound_are_none_or_less_than_nothing() -> None:
    assert (env_of(Waits, max_turns=None).max_turns, env_of(Waits).max_turns) == (-1, -1)
    with pytest.raises(ConfigError, match="max_turns is '3'; give a number"):
        env_of(Waits, max_turns="3")
