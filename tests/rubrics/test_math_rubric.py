"""MathRubric: rewards of mathematical answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import ConfigError, GradingError
from verifiers.rubrics import math_rubric
from verifiers.rubrics.math_equality import MathVerdict
from verifiers.types import State


def thought(answer: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": f"<think>hm, \\boxed{{0}}</think> So it is \\boxed{{{answer}}}."}]


def state(completion: Any, answer: Any) -> State:
    return State(prompt="p", completion=completion, answer=answer)


def given(monkeypatch: pytest.MonkeyPatch, verdict: MathVerdict | Exception) -> list[tuple[str, str]]:
    """Every comparison gives this verdict; returns what was compared."""
    compared = []

    async def verdict_of(answer: str, response: str, **_: Any) -> MathVerdict:
        compared.append((answer, response))
        await asyncio.sleep(0)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    monkeypatch.setattr(math_rubric, "math_verdict", verdict_of)
    return compared


def test_its_functions_and_parser_are_the_classic_ones() -> None:
    rubric = vf.MathRubric()
    assert rubric.get_reward_func_names() == ["correct_answer", "math_timeout", "math_worker_died"]
    assert rubric.get_reward_weights() == [1.0, 0.0, 0.0]
    assert type(rubric.parser) is vf.ThinkParser
    assert rubric.parser.parse_answer(thought("7")) == "7"
    more = vf.MathRubric(funcs=[lambda answer: 1.0], weights=[0.5], parser=vf.Parser())
    assert more.get_reward_weights() == [0.5, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (thought("42"), "42", 1.0),
        (thought("\\frac{1}{2}"), 0.5, 1.0),
        (thought("2\\sqrt{2}"), "\\sqrt{8}", 1.0),
        (thought("41"), "42", 0.0),
        ([{"role": "assistant", "content": "\\boxed{42}"}], "42", 0.0),
        ([{"role": "assistant", "content": "</think> 42"}], "42", 1.0),
        ([], "42", 0.0),
        (thought("1" * 1001), "42", 0.0),
    ],
)
async def test_an_answer_is_worth_one_where_it_is_equal(completion: Any, answer: Any, reward: float) -> None:
    scored = state(completion, answer)
    await vf.MathRubric(timeout_s=60).score_group([scored])
    assert scored["reward"] == reward
    assert scored["metrics"] == {"correct_answer": reward, "math_timeout": 0.0, "math_worker_died": 0.0}
    assert "grading_errors" not in scored


@pytest.mark.parametrize(
    ("verdict", "metrics"),
    [
        (MathVerdict.TIMED_OUT, {"correct_answer": 0.0, "math_timeout": 1.0, "math_worker_died": 0.0}),
        (MathVerdict.DIED, {"correct_answer": 0.0, "math_timeout": 0.0, "math_worker_died": 1.0}),
        (MathVerdict.RIGHT, {"correct_answer": 1.0, "math_timeout": 0.0, "math_worker_died": 0.0}),
    ],
)
@pytest.mark.parametrize("side_by_side", [True, False])
async def test_one_comparison_serves_the_reward_and_the_metrics(
    monkeypatch: pytest.MonkeyPatch, verdict: MathVerdict, metrics: dict[str, float], side_by_side: bool
) -> None:
    compared = given(monkeypatch, verdict)
    scored = state(thought("a"), "b")
    await vf.MathRubric(parallelize_scoring=side_by_side).score_group([scored])
    assert scored["metrics"] == metrics
    assert compared == [("b", "a")]


async def test_workers_that_do_not_run_are_a_failed_grade_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, GradingError("the workers do not run"))
    scored = state(thought("a"), "b")
    await vf.MathRubric().score_group([scored])
    assert {error["func"] for error in scored["grading_errors"]} >= {"correct_answer"}


async def test_a_state_that_is_scored_again_with_another_answer_is_compared_again() -> None:
    scored = state(thought("41"), "42")
    rubric = vf.MathRubric(timeout_s=60)
    await rubric.score_group([scored])
    scored["completion"] = thought("42")
    await rubric.score_group([scored])
    assert scored["reward"] == 1.0


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="timeout_s must be above 0, but is 0"):
        vf.MathRubric(timeout_s=0)
