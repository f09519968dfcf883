"""score_group: its result, group functions, and subclasses that override one of the scoring methods."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.rubrics import Rubric
from verifiers.rubrics.rubric_group import RubricGroup
from verifiers.rubrics.scoring import call_score_group
from verifiers.types import RolloutScore, RolloutScores, State


def states_of(*completions: str) -> list[State]:
    return [State(prompt="p", completion=text, answer="a", task="t", info={"n": 1}) for text in completions]


def length(completion: str) -> float:
    return len(completion)


def rank(completions: list[str], answers: list[str], parser: Any) -> list[float]:
    """0 for the shortest, 1 for the next ..."""
    assert answers == ["a"] * len(completions)
    return [sorted(completions, key=len).index(text) for text in completions]


async def test_group_functions_see_all_rollouts_and_score_each() -> None:
    async def same_task(states: list[State], tasks: list[str], infos: list[dict], prompts: list[str]) -> list[float]:
        return [float(len(set(tasks)) == 1) for _ in states]

    rubric = Rubric(funcs=[rank, length, same_task], weights=[1.0, 0.1, 0.0])
    states = states_of("abc", "a")
    await rubric.score_group(states)
    assert rubric.has_group_funcs
    assert states[0]["metrics"] == {"rank": 1.0, "length": 3.0, "same_task": 1.0}
    assert [scored["reward"] for scored in states] == pytest.approx([1.3, 0.1])
    assert "advantage" not in states[0], "advantages are the trainer's, unless the environment gives them"


@pytest.mark.parametrize("bad", [[1.0], [1.0, 2.0, 3.0], None, 1.0])
async def test_a_group_function_of_the_wrong_length_fails_every_grade(bad: Any) -> None:
    def wrong(completions: list[str]) -> Any:
        return bad

    states = states_of("abc", "a")
    await Rubric(funcs=[length, wrong]).score_group(states)
    for scored in states:
        assert [error["func"] for error in scored["grading_errors"]] == ["wrong"]
    if isinstance(bad, list):
        assert f"returned {len(bad)} rewards for 2 rollouts" in states[0]["grading_errors"][0]["error"]


async def test_one_bad_value_of_a_group_function_fails_that_grade_alone() -> None:
    def partly(completions: list[str]) -> list[float]:
        return [1.0, float("nan")]

    states = states_of("abc", "a")
    await Rubric(funcs=[partly]).score_group(states)
    assert states[0]["reward"] == 1.0
    assert "grading_errors" not in states[0]
    assert states[1]["grading_errors"][0]["func"] == "partly"


async def test_a_single_rollout_is_never_scored_by_a_group_function() -> None:
    rubric = Rubric(funcs=[rank])
    [scored] = states_of("a")
    with pytest.raises(ConfigError, match=r"'rank'.*use score_group"):
        await rubric.score_rollout(scored)
    with pytest.raises(ConfigError, match="use score_group"):
        await rubric.score_rollouts(["p"], ["c"], ["a"], [scored])


async def test_an_empty_group_is_scored_without_calling_anything() -> None:
    await Rubric(funcs=[rank, length]).score_group([])


async def test_a_large_group_of_quick_functions_shares_the_loop() -> None:
    rubric = Rubric(funcs=[length])
    await rubric.score_group(states_of(*["x"] * 8))
    turns = 0
    done = asyncio.Event()

    async def other_work() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(other_work())
    await rubric.score_group(states_of(*["x"] * 20_000))
    done.set()
    await other
    assert turns > 2


async def test_a_group_gets_a_score_for_each_rollout_with_the_functions_that_failed() -> None:
    def picky(completion: str) -> float:
        return float(completion)

    good, bad = states_of("2", "two")
    scores = await Rubric(funcs=[picky, length]).score_group([good, bad])
    assert scores[0] == RolloutScore(3.0, {"picky": 2.0, "length": 1.0})
    assert (scores[1].reward, [failed["func"] for failed in scores[1].errors]) == (3.0, ["picky"])
    assert scores[1].errors == bad["grading_errors"]


async def test_the_runner_gets_scores_from_an_override_that_sets_them_in_the_states() -> None:
    class ByState(Rubric):
        async def score_group(self, states: Any, score_sem: Any) -> None:  # type: ignore[override]
            async with score_sem:
                for state in states:
                    state["reward"], state["metrics"] = {"a": 1, "b": float("inf")}.get(state["completion"]), {"m": 2}

    scores = await call_score_group(ByState(), states_of("a", "b", "c"))
    assert scores[0] == RolloutScore(1.0, {"m": 2.0})
    assert [score.errors[0]["error"] for score in scores[1:]] == [
        "GradingError: returned inf, not a finite number",
        "GradingError: returned None, not a finite number",
    ]


async def test_every_scoring_method_leads_to_score_inputs() -> None:
    class Lengths(Rubric):
        async def score_inputs(self, inputs: Any, *args: Any, **kwargs: Any) -> list[RolloutScore]:
            return [item.score(float(len(item.completion))) for item in inputs]

    for rubric in (Lengths(), RubricGroup([Lengths()])):
        states = states_of("abc")
        assert [score.reward for score in await rubric.score_group(states)] == [3.0] == [states[0]["reward"]]
        assert (await rubric.score_rollout("p", "ab", "a", State())).reward == 2.0
        assert (await rubric.score_rollouts(["p"], ["a"], ["a"], [State()])).reward == [1.0]


class FirstGeneration(Rubric):
    async def score_rollout(  # type: ignore[override]
        self, prompt: Any, completion: Any, answer: Any, state: State, **kwargs: Any
    ) -> RolloutScore:
        if completion == "break":
            raise RuntimeError("cannot grade this")
        return RolloutScore(reward=float(len(completion)), metrics={"own": float(kwargs["info"]["n"])})


class FirstGenerationByName(Rubric):
    async def score_rollout(self, completion: Any, state: State) -> RolloutScore:  # type: ignore[override]
        return RolloutScore(reward=float(len(completion)), metrics={"own": 1.0})


class SecondGeneration(Rubric):
    async def score_rollout(self, state: State, score_sem: Any) -> None:  # type: ignore[override]
        async with score_sem:
            state["reward"] = float(len(state["completion"]))
        state["metrics"] = {"own": 1.0}


class ByColumns(Rubric):
    async def score_rollouts(  # type: ignore[override]
        self, prompts: Any, completions: Any, answers: Any, states: Any, tasks: Any, infos: Any, **kwargs: Any
    ) -> RolloutScores:
        return RolloutScores([float(len(text)) for text in completions], {"own": [1.0] * len(completions)})


class Extended(Rubric):
    async def score_rollout(self, *args: Any, **kwargs: Any) -> RolloutScore:
        score = await super().score_rollout(*args, **kwargs)
        return RolloutScore(score.reward, {**score.metrics, "own": 1.0})


@pytest.mark.parametrize("cls", [FirstGeneration, FirstGenerationByName, SecondGeneration, ByColumns, Extended])
async def test_an_override_of_the_classic_methods_scores_the_group(cls: type[Rubric]) -> None:
    states = states_of("abc", "a")
    await cls(funcs=[length]).score_group(states)
    assert [scored["reward"] for scored in states] == [3.0, 1.0]
    assert all(scored["metrics"]["own"] == 1.0 for scored in states)
    assert all("grading_errors" not in scored for scored in states)


@pytest.mark.parametrize("cls", [FirstGeneration, FirstGenerationByName, Extended])
async def test_an_override_of_score_rollout_scores_columns_too(cls: type[Rubric]) -> None:
    scores = await cls(funcs=[length]).score_rollouts(["p"], ["abc"], ["a"], states_of("abc"), ["t"], [{"n": 1}])
    assert scores.reward == [3.0]
    assert scores.metrics["own"] == [1.0]


async def test_an_override_put_on_the_instance_is_used() -> None:
    rubric = Rubric(funcs=[length])

    async def always_two(state: State) -> RolloutScore:
        return RolloutScore(2.0)

    rubric.score_rollout = always_two  # type: ignore[method-assign,assignment]
    states = states_of("abc")
    await rubric.score_group(states)
    assert states[0]["reward"] == 2.0


async def test_an_override_that_raises_fails_its_own_rollout_alone() -> None:
    states = states_of("abc", "break")
    await FirstGeneration().score_group(states)
    assert states[0]["reward"] == 3.0
    assert "grading_errors" not in states[0]
    assert states[1]["grading_errors"] == [{"func": "score_rollout", "error": "RuntimeError: cannot grade this"}]


async def test_an_override_that_sets_no_reward_is_a_failed_grade(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(Rubric):
        async def score_rollout(self, state: State) -> None:  # type: ignore[override]
            return None

    states = states_of("abc")
    with caplog.at_level(logging.ERROR):
        await Forgetful().score_group(states)
    assert "returned None, not a finite number" in states[0]["grading_errors"][0]["error"]


async def test_an_override_of_call_reward_func_is_asked_for_every_value() -> None:
    class Doubling(Rubric):
        async def call_reward_func(self, *args: Any, **kwargs: Any) -> float:
            return 2 * await super().call_reward_func(*args, **kwargs)

    states = states_of("abc", "a")
    await Doubling(funcs=[length]).score_group(states)
    assert [scored["reward"] for scored in states] == [6.0, 2.0]
