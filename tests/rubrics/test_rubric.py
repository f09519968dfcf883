"""Rubric: functions and weights, groups, and failed grades."""

from __future__ import annotations

import asyncio
import functools
from typing import Any
from unittest.mock import MagicMock

import pytest

from verifiers.errors import ConfigError, GradingError
from verifiers.parsers import Parser, XMLParser
from verifiers.rubrics import Rubric
from verifiers.types import FailedGrade, RolloutScore, State

ROW: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "q"}],
    "completion": [{"role": "assistant", "content": "a"}],
    "answer": "a",
    "task": "sums",
    "info": {"level": 1},
}


def state(**extra: Any) -> State:
    return State({**ROW, "timing": {"generation_ms": 1.0, "scoring_ms": 0.0, "total_ms": 1.0}, **extra})


def half(completion: Any) -> float:
    return 0.5


async def one(answer: str, **kwargs: Any) -> int:
    return 1


def broken(completion: Any) -> float:
    raise ValueError("no such field")


def test_weights_are_one_each_unless_given() -> None:
    rubric = Rubric(funcs=[half, one])
    assert rubric.reward_weights == rubric.weights == rubric.get_reward_weights() == [1.0, 1.0]
    assert rubric.reward_funcs == rubric.funcs == rubric.get_reward_funcs() == [half, one]
    assert rubric.get_reward_func_names() == ["half", "one"]
    assert isinstance(rubric.parser, Parser)
    assert Rubric().reward_funcs == []


def test_a_wrong_number_of_weights_names_both_numbers() -> None:
    with pytest.raises(ValueError, match="2 reward functions but 1 weights"):
        Rubric(funcs=[half, one], weights=[1])


def test_a_mock_is_a_reward_function_without_bounds() -> None:
    assert Rubric([MagicMock(return_value=1.0)]).declared_bounds() == {}


def test_functions_in_the_parsers_place_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parser is \[.*; give a parser, and reward functions as funcs="):
        Rubric(parser=[lambda completion: 1.0])  # type: ignore[arg-type]


async def test_arguments_are_injected_by_name() -> None:
    seen: dict[str, Any] = {}

    def few(parser: Parser, info: dict, judge: str, task: str = "x", missing: int = 7) -> float:
        seen.update(parser=parser, info=info, judge=judge, task=task, missing=missing)
        return 1.0

    def everything(**kwargs: Any) -> float:
        seen["everything"] = set(kwargs)
        return 1.0

    parser = XMLParser(["answer"])
    rubric = Rubric(parser=parser)
    rubric.add_class_object("judge", "strict")
    rubric.add_reward_func(few)
    rubric.add_reward_func(everything)
    await rubric.score_group([state()])
    assert seen["everything"] == {*ROW, "state", "parser", "judge"}
    assert (seen["parser"], seen["info"], seen["judge"]) == (parser, {"level": 1}, "strict")
    assert (seen["task"], seen["missing"]) == ("sums", 7)


class Callable:
    def __call__(self, answer: str) -> bool:
        return answer == "a"


class AsyncCallable:
    async def __call__(self, answer: str) -> float:
        return 0.25

    def method(self, answer: str) -> float:
        return 0.75


def scaled(answer: str, by: float) -> float:
    return by


@pytest.mark.parametrize(
    ("func", "value"),
    [
        (Callable(), 1.0),
        (AsyncCallable(), 0.25),
        (AsyncCallable().method, 0.75),
        (functools.partial(scaled, by=0.125), 0.125),
        (functools.partial(one), 1.0),
        (lambda completion, answer: one(answer), 1.0),
        (lambda answer: "0.5", 0.5),
    ],
)
async def test_every_kind_of_callable_is_a_reward_function(func: Any, value: float) -> None:
    (score,) = await Rubric(funcs=[func]).score_group([state()])
    assert (score.reward, score.errors) == (value, [])


async def test_the_reward_is_the_weighted_sum_and_metrics_of_one_name_are_numbered() -> None:
    rubric = Rubric(funcs=[half, one, half], weights=[2.0, 0.5, 0.0])
    # what is not at the state's top is in its row
    scored = State(input={"prompt": "p", "answer": "a"}, completion="c", timing={"scoring_ms": 0.0, "total_ms": 2.0})
    (score,) = await rubric.score_group([scored])
    assert score == RolloutScore(1.5, {"half_1": 0.5, "one": 1.0, "half_2": 0.5})
    assert (scored["reward"], scored["metrics"]) == (score.reward, score.metrics)
    assert scored["timing"]["scoring_ms"] > 0


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "GradingError: returned None, not a finite number"),
        (float("nan"), "GradingError: returned nan, not a finite number"),
        (1e40, "GradingError: returned 1e+40, and float32 holds 3.4e+38 at most"),
    ],
)
async def test_a_result_that_is_no_finite_number_is_a_failed_grade(result: Any, text: str) -> None:
    def odd(answer: str) -> Any:
        return result

    (score,) = await Rubric([odd]).score_group([state()])
    [error] = score.errors
    assert score.reward == 0.0
    assert error["func"] == "odd"
    assert text in error["error"]


def exits(answer: str) -> float:
    raise SystemExit(3)


def stops(answer: str) -> float:
    return next(iter([]))


async def breaks_later(answer: str) -> float:
    raise KeyError("late")


@pytest.mark.parametrize("func", [broken, exits, stops, breaks_later, lambda unknown: 1.0, len])
async def test_a_failed_grade_is_never_a_zero_reward(func: Any, caplog: pytest.LogCaptureFixture) -> None:
    rubric = Rubric(funcs=[one, func])
    states = [state(), state()]
    await rubric.score_group(states)
    for scored in states:
        assert scored["reward"] == 1.0, "the classic sum counts a failed function as 0.0"
        [error] = scored["grading_errors"]
        assert error["func"] == rubric.get_reward_func_names()[1]
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(caplog.records) == 2
    assert len(tracebacks) == 1, "one traceback is enough for a function that keeps failing"


async def test_cancellation_always_passes() -> None:
    entered = asyncio.Event()

    async def hangs(answer: str) -> float:
        entered.set()
        await asyncio.Event().wait()
        return 1.0

    scored = state()
    task = asyncio.create_task(Rubric(funcs=[hangs, one]).score_group([scored, state()]))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "grading_errors" not in scored
    assert "reward" not in scored


async def test_a_metric_that_raises_leaves_reward_and_outcome_alone(caplog: pytest.LogCaptureFixture) -> None:
    def right(completion: Any) -> float:
        return 1.0

    def broken(completion: Any) -> float:
        raise ZeroDivisionError("no words")

    def broken_of_group(completions: Any) -> list[float]:
        return [float("nan"), 2.0]

    rubric = Rubric([right])
    rubric.add_metric(broken)
    rubric.add_metric(broken_of_group)
    states = [state(), state()]
    scores = await rubric.score_group(states)
    assert [(score.reward, score.errors) for score in scores] == [(1.0, []), (1.0, [])]
    assert [score.metrics for score in scores] == [{"right": 1.0}, {"right": 1.0, "broken_of_group": 2.0}]
    assert "broken failed: ZeroDivisionError: no words" in caplog.text
    # with a weight it is a reward, and a failed one is a failed grade
    rubric.reward_weights[1] = 0.5
    assert [score.errors[0]["func"] for score in await rubric.score_group(states)] == ["broken", "broken"]


# -- groups ------------------------------------------------------------------------------------------------------


def states_of(*completions: str) -> list[State]:
    return [state(completion=text) for text in completions]


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


@pytest.mark.parametrize("bad", [[1.0], [1.0, 2.0, 3.0], None, 1.0, {0: 0.5, 1: 0.25}, {0.5, 0.25}, "10", b"10"])
async def test_a_group_function_without_a_reward_for_each_in_order_fails_every_grade(bad: Any) -> None:
    def wrong(completions: list[str]) -> Any:
        return bad

    states = states_of("abc", "a")
    await Rubric(funcs=[length, wrong]).score_group(states)
    for scored in states:
        assert [error["func"] for error in scored["grading_errors"]] == ["wrong"]
    if isinstance(bad, list):
        assert f"returned {len(bad)} rewards for 2 rollouts" in states[0]["grading_errors"][0]["error"]


async def test_a_group_gets_a_score_for_each_rollout_with_the_functions_that_failed() -> None:
    def picky(completion: str) -> float:
        return float(completion)

    good, bad = states_of("2", "two")
    scores = await Rubric(funcs=[picky, length]).score_group([good, bad])
    failed = {"func": "picky", "error": "ValueError: could not convert string to float: 'two'"}
    assert scores[0] == RolloutScore(3.0, {"picky": 2.0, "length": 1.0})
    assert (scores[1].reward, scores[1].errors, bad["grading_errors"]) == (3.0, [failed], [failed])


async def test_a_subclass_scores_states_in_its_own_way_and_its_failures_are_in_both_places() -> None:
    class Lengths(Rubric):
        async def score_states(self, states: Any) -> list[RolloutScore]:
            self.record_failure("noted", [states[0]], GradingError("too odd"))
            failed = FailedGrade(func="given", error="of the score")
            return [RolloutScore(float(len(state["completion"])), errors=[failed]) for state in states]

    rubric = Lengths()
    assert not rubric.is_empty
    states = states_of("abc", "a")
    scores = await rubric.score_group(states)
    assert [score.reward for score in scores] == [state["reward"] for state in states] == [3.0, 1.0]
    assert [[failed["func"] for failed in score.errors] for score in scores] == [["noted", "given"], ["given"]]
    assert [state["grading_errors"] for state in states] == [score.errors for score in scores]
