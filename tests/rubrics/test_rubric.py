"""Rubric: both generations of scoring."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.parsers import Parser, XMLParser
from verifiers.rubrics import Rubric
from verifiers.types import RolloutScore, State

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


async def test_functions_added_past_the_weights_are_refused_when_scoring() -> None:
    rubric = Rubric(funcs=[half])
    rubric.reward_funcs.append(one)
    with pytest.raises(ConfigError, match="2 reward functions but 1 weights"):
        await rubric.score_group([state()])


def test_extra_keywords_become_attributes_and_lists_of_callers_stay_theirs() -> None:
    funcs = [half]
    rubric = Rubric(funcs=funcs, threshold=0.3)
    rubric.add_reward_func(one, weight=0.25)
    rubric.add_metric(broken)
    assert rubric.threshold == 0.3  # type: ignore[attr-defined]
    assert rubric.weights == [1.0, 0.25, 0.0]
    assert funcs == [half]


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
    row = {**ROW, "state": state()}
    assert await rubric.call_reward_func(few, **row) == 1.0
    assert await rubric.call_reward_func(everything, **row, extra=1) == 1.0
    assert seen["everything"] == {*row, "parser", "judge", "extra"}
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
    rubric = Rubric(funcs=[func])
    scored = state()
    for _ in range(5):
        await rubric.score_group([scored])
        assert scored["reward"] == value
    assert "grading_errors" not in scored


async def test_the_reward_is_the_weighted_sum_and_metrics_are_unweighted() -> None:
    rubric = Rubric(funcs=[half, one], weights=[2.0, 0.5])
    score = await rubric.score_rollout(ROW["prompt"], ROW["completion"], "a", state())
    assert score.reward == score["reward"] == pytest.approx(1.5)
    assert score.metrics == {"half": 0.5, "one": 1.0}


async def test_metrics_of_one_name_add_up() -> None:
    rubric = Rubric(funcs=[half, half], weights=[1.0, 0.0])
    assert await rubric.score_rollout("p", "c", "a", state()) == RolloutScore(0.5, {"half": 1.0})


async def test_two_lambdas_are_two_metrics() -> None:
    rubric = Rubric([lambda: 1.0, half, lambda: 2.0])
    (score,) = await rubric.score_group([state()])
    assert score.metrics == {"lambda_1": 1.0, "half": 0.5, "lambda_2": 2.0}
    assert rubric.get_reward_func_names() == ["lambda_1", "half", "lambda_2"]
    assert Rubric([lambda: 1.0]).get_reward_func_names() == ["<lambda>"]


async def test_the_second_generation_scores_a_state_in_place() -> None:
    rubric = Rubric(funcs=[half, one])
    scored = State(input={"prompt": "p", "answer": "a"}, completion="c", timing={"scoring_ms": 0.0, "total_ms": 2.0})
    score = await rubric.score_rollout(scored, asyncio.Semaphore(1))
    assert (scored["reward"], scored["metrics"]) == (1.5, {"half": 0.5, "one": 1.0})
    assert (score.reward, score.metrics) == (scored["reward"], scored["metrics"])
    assert scored["timing"]["scoring_ms"] > 0
    by_name = state()
    await rubric.score_rollout(state=by_name)
    assert by_name["reward"] == 1.5


async def test_columns_are_scored_in_order() -> None:
    def length(completion: str) -> float:
        return len(completion)

    rubric = Rubric(funcs=[length, one], weights=[1.0, 0.0])
    texts = ["abc", "", "a"]
    scores = await rubric.score_rollouts(
        ["p"] * 3, texts, ["x"] * 3, [state() for _ in texts], ["t"] * 3, [{}] * 3, max_concurrent=2
    )
    assert scores.reward == [3.0, 0.0, 1.0]
    assert scores.metrics == {"length": [3.0, 0.0, 1.0], "one": [1.0, 1.0, 1.0]}
    assert await rubric.score_rollouts([], [], [], []) == {"reward": [], "metrics": {"length": [], "one": []}}
    with pytest.raises(ConfigError, match="3 prompts, 2 completions"):
        await rubric.score_rollouts(["p"] * 3, ["c"] * 2, ["x"] * 3, [state()] * 3)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "GradingError: returned None, not a finite number"),
        (float("nan"), "GradingError: returned nan, not a finite number"),
        (float("-inf"), "GradingError: returned -inf, not a finite number"),
        ("much", "GradingError: returned 'much', not a finite number"),
        (10**400, "not a finite number"),
    ],
)
async def test_a_result_that_is_no_finite_number_is_a_failed_grade(result: Any, text: str) -> None:
    def odd(answer: str) -> Any:
        return result

    scored = state()
    assert await Rubric().call_reward_func(odd, **ROW, state=scored) == 0.0
    [error] = scored["grading_errors"]
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


async def test_the_failure_names_the_error_and_its_text() -> None:
    scored = state()
    await Rubric(funcs=[broken]).score_rollout(scored)
    assert scored["grading_errors"] == [{"func": "broken", "error": "ValueError: no such field"}]


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


@pytest.mark.parametrize("parallel", [True, False])
async def test_functions_run_side_by_side_only_where_that_is_wanted(parallel: bool) -> None:
    order: list[str] = []
    second_began = asyncio.Event()

    async def first(state: State) -> float:
        order.append("first begins")
        if parallel:
            await second_began.wait()
        order.append("first ends")
        return 1.0

    async def second(state: State) -> float:
        order.append("second")
        second_began.set()
        return 1.0

    await Rubric(funcs=[first, second], parallelize_scoring=parallel).score_rollout(state())
    expected = ["first begins", "second", "first ends"] if parallel else ["first begins", "first ends", "second"]
    assert order == expected


async def test_the_scoring_semaphore_bounds_rollouts_scored_at_once() -> None:
    at_once, most = 0, 0

    async def watched(answer: str) -> float:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        return 1.0

    states = [state() for _ in range(6)]
    await Rubric(funcs=[watched]).score_group(states, asyncio.Semaphore(2))
    assert most == 2
    assert [scored["reward"] for scored in states] == [1.0] * 6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rubric: pickle.loads(pickle.dumps(rubric))])
async def test_a_copy_scores_by_its_own_functions(copied: Any) -> None:
    rubric = Rubric(funcs=[half, one])
    await rubric.score_group([state()])
    scored = state()
    await copied(rubric).score_group([scored])
    assert scored["reward"] == 1.5


class OwnCalls(Rubric):
    """A rubric that calls reward functions itself, and lets what they raise pass."""

    async def call_reward_func(self, func: Any, *args: Any, **kwargs: Any) -> float:
        return float(func(kwargs["completion"]))


async def test_a_metric_that_raises_in_an_override_of_the_call_leaves_the_reward_alone() -> None:
    def right(completion: Any) -> float:
        return 1.0

    def broken(completion: Any) -> float:
        raise ZeroDivisionError("no words")

    rubric = OwnCalls([right])
    rubric.add_metric(broken)
    states = [State(prompt="p", completion="c", answer="", task="t", info={}) for _ in range(2)]
    scores = await rubric.score_group(states)
    assert [(score.reward, score.metrics, score.errors) for score in scores] == [(1.0, {"right": 1.0}, [])] * 2
    rubric.reward_weights[1] = 0.5
    scores = await rubric.score_group(states)
    assert [(score.reward, score.errors[0]["func"]) for score in scores] == [(1.0, "broken")] * 2


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
    states = [State(prompt="p", completion="c", answer="", task="t", info={}) for _ in range(2)]
    scores = await rubric.score_group(states)
    assert [(score.reward, score.errors) for score in scores] == [(1.0, []), (1.0, [])]
    assert [score.metrics for score in scores] == [{"right": 1.0}, {"right": 1.0, "broken_of_group": 2.0}]
    assert "broken failed: ZeroDivisionError: no words" in caplog.text
    # with a weight it is a reward, and a failed one is a failed grade
    rubric.reward_weights[1] = 0.5
    assert [score.errors[0]["func"] for score in await rubric.score_group(states)] == ["broken", "broken"]
