"""Section "Rubric": classic calls of any rubric, and classic overrides, in both generations."""

from __future__ import annotations

import asyncio
import math
from types import MethodType
from typing import Any
from unittest import mock

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


def fails(completion: Any) -> float:
    raise KeyError("lost")


def ranks(completions: Any, answers: Any, states: Any, tasks: Any, infos: Any, prompts: Any) -> list[float]:
    return [float(place) for place in range(len(completions))]


def state_of(**more: Any) -> vf.State:
    return vf.State(prompt=[], completion=TALK, answer="abc", task="t", info={}, **more)


@pytest.mark.parametrize("inside", [False, True])
async def test_a_function_gets_what_it_names_and_its_failure_counts_nothing_but_is_recorded(inside: bool) -> None:
    rubric = vf.Rubric([half, broken], [1.0, 0.0])
    rubric.add_class_object("judge", "J")
    state = state_of()

    async def call(func: Any, **more: Any) -> float:
        # a group calls a function by the rubric that has it, one that none has by the first
        one = vf.RubricGroup([rubric, vf.Rubric()]) if inside else rubric
        return await one.call_reward_func(func, [], TALK, "abc", state, "t", {"k": 1}, **more)

    assert [await call(func) for func in (half, later, everything)] == [0.5, 3.0, 1.0]
    assert await call(lambda judge, more: {"J": 7}[judge] + more, more=1) == 8.0
    assert math.isnan(await call(broken)), "a metric that fails is not there"
    assert "grading_errors" not in state
    assert [await call(func) for func in (fails, lambda: float("nan"))] == [0.0, 0.0]
    assert state["grading_errors"] == [
        {"func": "fails", "error": "KeyError: 'lost'"},
        {"func": "<lambda>", "error": "GradingError: returned nan, not a finite number"},
    ]


async def test_one_rollout_is_scored_by_its_columns_or_by_its_state() -> None:
    rubric = vf.RubricGroup([vf.Rubric([half, later], [2.0, 0.0]), vf.Rubric([broken])])
    state = vf.State(completion=[], answer="not this one")
    score = await rubric.score_rollout([], TALK, "abc", state, "t", {})
    assert (score.reward, score["reward"], score.metrics) == (1.0, 1.0, {"half": 0.5, "later": 3.0, "broken": 0.0})
    assert [failed["func"] for failed in score.errors] == ["broken"]
    assert (state["completion"], state["answer"], "reward" in state) == (TALK, "not this one", False)
    state = state_of()
    score = await rubric.score_rollout(state=state, score_sem=asyncio.Semaphore(1))
    assert (score.reward, state["reward"], state["metrics"]) == (1.0, 1.0, score.metrics)


async def test_columns_are_scored_in_order_each_row_by_itself() -> None:
    async def given(answer: str, more: float = 0.0) -> float:
        return len(answer) + more

    for rubric in (vf.Rubric([given]), vf.RubricGroup([vf.Rubric([given]), vf.Rubric()])):
        for bound in ({}, {"max_concurrent": 1}):
            # one state may serve all rows
            columns = [[]] * 2, [TALK] * 2, ["a", "ab"], [vf.State()] * 2
            scores = await rubric.score_rollouts(*columns, **bound)
            assert (scores.reward, scores["metrics"]) == ([1.0, 2.0], {"given": [1.0, 2.0]})
            assert (await rubric.score_rollouts(*columns, ["t"] * 2, [{}] * 2, more=1.0, **bound)).reward == [
                2.0,
                3.0,
            ]
    assert await rubric.score_rollouts([], [], [], []) == {"reward": [], "metrics": {"given": []}}
    with pytest.raises(ValueError, match="2 prompts, 1 completions"):
        await rubric.score_rollouts([[]] * 2, [TALK], ["x"] * 2, [vf.State()] * 2)


async def test_functions_of_a_group_are_called_for_groups_alone() -> None:
    rubric = vf.Rubric(funcs=[later, ranks], weights=[1.0, 10.0])
    for one in (rubric, vf.RubricGroup([vf.Rubric(), rubric])):
        states = [state_of(), state_of()]
        await one.score_group(states, asyncio.Semaphore(1))
        assert [state["reward"] for state in states] == [3.0, 13.0]
        assert states[1]["metrics"] == {"later": 3.0, "ranks": 1.0}
        alone = one.score_rollout(states[0]), one.score_rollouts([[]], [TALK], ["a"], [vf.State()])
        for refused in alone:
            with pytest.raises(ValueError, match=r"'ranks' compares the rollouts of a whole group.*use score_group"):
                await refused


async def test_the_scoring_semaphore_bounds_rollouts_scored_at_once() -> None:
    at_once, most = 0, 0

    async def watched(answer: str) -> float:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return 1.0

    states = [state_of() for _ in range(6)]
    await vf.Rubric(funcs=[watched]).score_group(states, asyncio.Semaphore(2))
    assert most == 2
    assert [state["reward"] for state in states] == [1.0] * 6


# -- overrides ---------------------------------------------------------------------------------------------------


def words(completion: Any) -> float:
    return len(completion)


async def by_columns_of_one(self: Any, prompt: Any, completion: Any, answer: Any, state: Any, **kwargs: Any) -> Any:
    return vf.RolloutScore(reward=10.0 * len(completion), metrics={"own": float(kwargs["info"]["n"])})


async def by_name(self: Any, completion: Any) -> float:
    return 10.0 * len(completion)


async def by_state(self: Any, state: Any, score_sem: Any) -> None:
    async with score_sem:
        state["reward"], state["metrics"] = 10.0 * len(state["completion"]), {"own": 1.0}


async def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
    score = await vf.Rubric.score_rollout(self, *args, **kwargs)
    return vf.RolloutScore(10.0 * score.reward, {**score.metrics, "own": 1.0})


async def by_columns(self: Any, completions: Any, **kwargs: Any) -> Any:
    return vf.RolloutScores([10.0 * len(text) for text in completions], {"own": [1.0] * len(completions)})


async def by_group(self: Any, states: Any, score_sem: Any) -> None:
    await vf.Rubric.score_group(self, states, score_sem)
    for state in states:
        state["reward"], state["metrics"] = 10.0 * state["reward"], {"own": 1.0}


async def by_call(self: Any, func: Any, *args: Any, **kwargs: Any) -> float:
    return 10.0 * await vf.Rubric.call_reward_func(self, func, *args, **kwargs)


OVERRIDES = [
    ("score_rollout", by_columns_of_one),
    ("score_rollout", by_name),
    ("score_rollout", by_state),
    ("score_rollout", extended),
    ("score_rollouts", by_columns),
    ("score_group", by_group),
    ("call_reward_func", by_call),
]


def overriding(name: str, method: Any, where: str) -> vf.Rubric:
    if where == "in a base":
        return type("Own", (type("Mixin", (), {name: method}), vf.Rubric), {})([words])
    cls = type("Own", (vf.Rubric,), {name: method} if where == "in its class" else {})
    rubric = cls([words])
    if where == "on itself":
        setattr(rubric, name, MethodType(method, rubric))
    return rubric


@pytest.mark.parametrize("where", ["in its class", "in a base", "on itself"])
@pytest.mark.parametrize(("name", "method"), OVERRIDES, ids=lambda item: getattr(item, "__name__", ""))
async def test_an_override_scores_groups_alone_and_among_others(name: str, method: Any, where: str) -> None:
    for others in ([], [vf.Rubric([words])]):
        rubric: Any = overriding(name, method, where)
        assert not rubric.is_empty
        if others:
            rubric = vf.RubricGroup([*others, rubric, *others])
        states = [vf.State(prompt="p", completion=text, info={"n": 1}) for text in ("abc", "a")]
        scores = await rubric.score_group(states)
        factor = 10.0 + 2 * len(others)
        assert [score.reward for score in scores] == [state["reward"] for state in states] == [3 * factor, factor]
        assert not scores[0].errors
        own = {"words"} if method is by_call else {"own"} if method is not by_name else set()
        assert own <= set(states[0]["metrics"])


async def test_an_override_of_score_rollout_scores_columns_too() -> None:
    for name, method in OVERRIDES[:4]:
        rubric = overriding(name, method, "in its class")
        for one in (rubric, vf.RubricGroup([rubric])):
            scores = await one.score_rollouts(["p"], ["abc"], ["a"], [vf.State()], ["t"], [{"n": 1}])
            assert scores.reward == [30.0]


async def raises_for_some(self: Any, completion: Any, state: Any) -> float:
    if completion == "b":
        raise RuntimeError("cannot grade this")
    return 1.0


async def forgets(self: Any, *args: Any, **kwargs: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("name", "method", "text"),
    [
        ("score_rollout", raises_for_some, "RuntimeError: cannot grade this"),
        ("score_rollout", forgets, "GradingError: returned None, not a finite number"),
        ("score_group", forgets, "GradingError: returned None, not a finite number"),
        ("score_rollouts", forgets, "TypeError"),
    ],
)
async def test_an_override_that_gives_no_reward_is_a_failed_grade(name: str, method: Any, text: str) -> None:
    rubric = overriding(name, method, "in its class")
    # one that sets a score must not lend it to the next
    for one, reward in ((rubric, 0.0), (vf.RubricGroup([overriding(*OVERRIDES[5], "in its class"), rubric]), 10.0)):
        states = [vf.State(prompt="p", completion=text) for text in ("a", "b")]
        scores = await one.score_group(states)
        failed = scores[1].errors[0]
        assert (failed["func"], failed["error"].startswith(text), scores[1].reward) == (name, True, reward)
        assert bool(scores[0].errors) == (method is not raises_for_some)


async def test_a_metric_that_raises_in_an_override_of_the_call_leaves_the_reward_alone() -> None:
    async def lets_pass(self: Any, func: Any, *args: Any, **kwargs: Any) -> float:
        return float(func(kwargs["completion"]))

    rubric = overriding("call_reward_func", lets_pass, "in its class")
    rubric.add_metric(broken)
    for weight, failed in ((0.0, []), (0.5, ["broken"])):
        rubric.reward_weights[1] = weight
        (score,) = await rubric.score_group([vf.State(prompt="p", completion="a")])
        assert (score.reward, [error["func"] for error in score.errors]) == (1.0, failed)


async def test_a_mock_put_in_the_place_of_a_method_can_be_taken_away() -> None:
    rubric = vf.Rubric([words])
    states = [vf.State(prompt="p", completion="abc")]
    with mock.patch.object(rubric, "score_rollout", mock.AsyncMock(return_value=7.0)) as mocked:
        assert rubric.score_rollout is mocked
        assert (await rubric.score_group(states))[0].reward == 7.0
        mocked.assert_awaited_once()
    assert (await rubric.score_group(states))[0].reward == 3.0
