"""Section "Rubric": the base class, in both generations."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import verifiers as vf

TALK = [{"role": "assistant", "content": "four"}]


def half(completion: Any) -> float:
    return 0.5


async def later(answer: str, state: Any) -> int:
    return len(answer)


def everything(**kwargs: Any) -> float:
    wanted = {"prompt", "completion", "answer", "state", "task", "info", "parser", "judge"}
    return float(wanted <= set(kwargs))


def broken(completion: Any) -> float:
    raise KeyError("lost")


def ranks(completions: Any, answers: Any, states: Any, tasks: Any, infos: Any, prompts: Any) -> list[float]:
    return [float(place) for place in range(len(completions))]


def state_of(**more: Any) -> vf.State:
    return vf.State(prompt=[], completion=TALK, answer="abc", task="t", info={}, **more)


def test_functions_and_weights_are_kept_and_must_fit() -> None:
    rubric = vf.Rubric(funcs=[half], weights=[2.0], colour="red")
    rubric.add_reward_func(later)
    rubric.add_metric(everything)
    assert rubric.get_reward_func_names() == ["half", "later", "everything"]
    assert rubric.get_reward_funcs() == rubric.funcs == rubric.reward_funcs == [half, later, everything]
    assert rubric.get_reward_weights() == rubric.weights == rubric.reward_weights == [2.0, 1.0, 0.0]
    assert rubric.colour == "red"  # type: ignore[attr-defined]
    assert rubric.class_objects["parser"] is rubric.parser
    with pytest.raises(ValueError, match="weights"):
        vf.Rubric(funcs=[half, half], weights=[1.0])


async def test_a_function_gets_what_it_names_and_its_failure_counts_nothing_but_is_recorded() -> None:
    rubric = vf.Rubric([half])
    rubric.add_class_object("judge", "J")
    state = state_of()

    async def call(func: Any) -> float:
        return await rubric.call_reward_func(func, [], TALK, "abc", state, "t", {"k": 1})

    assert [await call(func) for func in (half, later, everything)] == [0.5, 3.0, 1.0]
    assert await call(lambda judge: {"J": 7}[judge]) == 7.0
    assert "grading_errors" not in state
    assert await call(broken) == 0.0
    assert state["grading_errors"] == [{"func": "broken", "error": "KeyError: 'lost'"}]


async def test_the_first_generations_scores_are_weighted_sums_with_plain_metrics() -> None:
    rubric = vf.Rubric([half, later], [2.0, 0.0])
    score = await rubric.score_rollout([], TALK, "abc", vf.State(), "t", {})
    assert (score.reward, score["reward"], score.metrics) == (1.0, 1.0, {"half": 0.5, "later": 3.0})
    scores = await rubric.score_rollouts(
        [[], []], [TALK, TALK], ["a", "ab"], [vf.State(), vf.State()], ["t", "t"], [{}, {}], max_concurrent=1
    )
    assert (scores.reward, scores["metrics"]) == ([1.0, 1.0], {"half": [0.5, 0.5], "later": [1.0, 2.0]})


async def test_the_second_generation_scores_states_alone_and_in_groups() -> None:
    rubric = vf.Rubric(funcs=[later, ranks], weights=[1.0, 10.0])
    states = [state_of(), state_of()]
    await rubric.score_group(states, asyncio.Semaphore(1))
    assert [state["reward"] for state in states] == [3.0, 13.0]
    assert states[1]["metrics"] == {"later": 3.0, "ranks": 1.0}
    single = vf.Rubric([later])
    state = state_of()
    await single.score_rollout(state, asyncio.Semaphore(1))
    assert (state["reward"], state["metrics"]) == (3.0, {"later": 3.0})
    with pytest.raises(ValueError, match="'ranks' compares the rollouts of a whole group"):
        await rubric.score_rollout(state)


async def test_scores_answer_to_attributes_and_to_items() -> None:
    for made in (vf.RolloutScore(reward=1.0, metrics={}), vf.RolloutScores(reward=[1.0], metrics={})):
        assert made.reward == made["reward"]
        assert made.metrics == made["metrics"] == {}
