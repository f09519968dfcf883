"""Rewards of single turns: where they come from, and which sampled tokens each turn has."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import NothingScoredError
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.recording_client import rows_from_turns
from verifiers.rollouts.rollout import Group, Rollout, RolloutRequest, ScoredBlock, Turn
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.batching.advantages import turn_advantages
from verifiers.types import Outcome, RolloutKey

PROMPT = [{"role": "user", "content": "x"}]


class Dialogue(vf.MultiTurnEnv):
    """Three turns, of which the second gets a reward in its step."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        if state["turn"] == 2:
            state["trajectory"][-1]["reward"] = 0.5
            state["trajectory"][-1]["advantage"] = 7.0
        return [{"role": "user", "content": f"turn {state['turn']}"}]


@vf.turn_reward
def lengths(completion: Any) -> list[float]:
    return [float(len(message["content"])) for message in completion if message["role"] == "assistant"]


@vf.turn_reward
def lengths_of_said(completion: Any) -> list[float]:
    return [length for length in lengths(completion) if length]


@vf.turn_reward
async def asks_for_all(states: list[Any]) -> list[list[float]]:
    return [[1.0] * state["turn"] for state in states]


def played(
    *rubrics: vf.Rubric, kind: type[vf.MultiTurnEnv] = Dialogue, answers: Sequence[Any] = ("a", "bb", "ccc")
) -> Rollout:
    rubric = rubrics[0] if len(rubrics) == 1 else vf.RubricGroup(list(rubrics))
    env = kind(dataset=[{"prompt": PROMPT, "answer": ""}], rubric=rubric, max_turns=3)
    with FakeOpenAIServer(list(answers)) as server, AsyncBatchGenerator(env, server.url, "fake") as blocks:
        blocks.submit_batch(BatchRequest(0, [RolloutRequest(RolloutKey(0, 0, 0), PROMPT)]))
        (rollout,) = blocks.get_batch(0, 20.0).rollouts
    return rollout


def test_steps_and_marked_functions_give_rewards_to_turns_and_not_to_the_rollout() -> None:
    rollout = played(
        vf.Rubric([lengths, lambda completion: 3.0], weights=[2.0, 1.0]), vf.Rubric([asks_for_all], weights=[10.0])
    )
    assert rollout.reward == 3.0
    assert rollout.turn_rewards == [12.0, 14.5, 16.0]
    assert rollout.turn_advantages == [None, 7.0, None]
    assert (rollout.metrics["lengths"], rollout.metrics["asks_for_all"]) == (6.0, 3.0)
    (row,) = rollout.rows
    assert list(row.turn_lengths) == [0, 1, 2]
    assert sum(row.turn_lengths.values()) == row.sampled_tokens


@pytest.mark.parametrize("func", [lengths, lengths_of_said])
def test_a_last_prompt_that_is_too_long_is_a_step_and_no_turn(func: Any) -> None:
    too_long = Fault(400, body={"error": {"message": "maximum context length", "code": "context_length_exceeded"}})
    rollout = played(vf.Rubric([func, lambda completion: 3.0]), answers=["a", "bb", too_long])
    assert (rollout.outcome, rollout.turns) == (Outcome.TRUNCATED, 2)
    assert rollout.turn_rewards == [1.0, 2.5]
    assert rollout.turn_advantages == [None, 7.0]
    group = Group(0, [rollout, dataclasses.replace(rollout, key=RolloutKey(0, 0, 1))])
    assert len(turn_advantages(ScoredBlock(0, [group]), discount=0.5)[rollout.key]) == 2


def test_without_any_the_turns_have_none() -> None:
    class Plain(Dialogue):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return PROMPT

    rollout = played(vf.Rubric([lambda: 1.0]), kind=Plain)
    assert rollout.turn_rewards is None is rollout.turn_advantages


def test_steps_of_another_kind_give_no_credit() -> None:
    class Kept(Dialogue):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            state["trajectory"].append("a step of mine")
            return PROMPT

    rollout = played(vf.Rubric([lambda: 1.0]), kind=Kept)
    assert (rollout.reward, rollout.turn_rewards) == (1.0, None)


@pytest.mark.parametrize("given", [3.0, ["a"], [float("nan")]])
def test_a_turn_reward_that_is_no_list_of_numbers_is_a_failed_grade(given: Any) -> None:
    with pytest.raises(NothingScoredError, match=r"1 grading_error\); .* <lambda>: .*returned"):
        played(vf.Rubric([vf.turn_reward(lambda: given)]))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_another_number_of_rewards_than_of_turns_is_a_failed_grade(count: int) -> None:
    @vf.turn_reward
    def short() -> list[float]:
        return [1.0] * count

    with pytest.raises(
        NothingScoredError, match=rf"short: GradingError: it returned {count} numbers, .* had 3 turns"
    ):
        played(vf.Rubric([short, lengths]))


def test_turns_that_forked_keep_their_numbers() -> None:
    def turn(prompt: list[int], sampled: list[int]) -> Turn:
        return Turn(prompt, sampled, [-0.1] * len(sampled), [0] * len(sampled))

    rows, forks = rows_from_turns([turn([1], [2, 3]), turn([9], [4]), turn([1, 2, 3, 8], [5, 6]), turn([9, 4], [7])])
    assert forks == 1
    assert [row.turn_lengths for row in rows] == [{0: 2, 2: 2}, {1: 1, 3: 1}]
