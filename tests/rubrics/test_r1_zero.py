"""r1_zero_reward: format and truth, as three numbers and as a rubric."""

from __future__ import annotations

from typing import Any

import pytest

import verifiers as vf
from verifiers.rubrics.r1_zero import r1_zero_rubric
from verifiers.types import State

CASES = [
    ("so 4 it is</think> <answer>4</answer>", "4", (1, 1, 1)),
    ("so 4 it is</think> <answer> \\boxed{4} </answer>", 4, (1, 1, 1)),
    ("so</think> <answer>The answer is \\boxed{2\\sqrt{2}}.</answer>", "\\sqrt{8}", (1, 1, 1)),
    ("so</think> <answer>5</answer>", "4", (1, 0, 0)),
    ("so</think> <answer></answer>", "4", (1, 0, 0)),
    ("4", "4", (0, 0, 0)),
    ("so</think><answer>4</answer>", "4", (0, 0, 0)),
    ("so</think>  <answer>4</answer>", "4", (0, 0, 0)),
    ("so</think>\n<answer>4</answer>", "4", (0, 0, 0)),
    ("so</think> <answer>4", "4", (0, 0, 0)),
    ("</answer>so</think> <answer>4", "4", (0, 0, 0)),
    ("a</think> <answer>5</answer> no: </think> <answer>4</answer>", "4", (1, 1, 1)),
    ("so</think> <answer>4</answer>", ["3", "4"], (1, 1, 1)),
]


@pytest.mark.parametrize(("response", "truth", "expected"), CASES)
def test_format_answer_and_reward_are_the_worked_examples(
    response: str, truth: Any, expected: tuple[int, int, int]
) -> None:
    result = vf.r1_zero_reward(response, truth)
    assert (result["format"], result["answer"], result["reward"]) == expected
    assert set(result) == {"format", "answer", "reward"}


@pytest.mark.parametrize(("response", "truth", "expected"), CASES)
async def test_the_rubric_gives_the_same(response: str, truth: Any, expected: tuple[int, int, int]) -> None:
    scored = State(prompt="p", completion=[{"role": "assistant", "content": response}], answer=truth)
    await r1_zero_rubric().score_group([scored])
    assert scored["reward"] == expected[2]
    assert scored["metrics"] == {"r1_zero_answer": expected[1], "r1_zero_format": expected[0]}
    assert "grading_errors" not in scored


def test_an_answer_that_runs_out_of_time_is_wrong() -> None:
    result = vf.r1_zero_reward("</think> <answer>10^{10^{10}}</answer>", "\\sqrt{2}", timeout_s=0.5)
    assert result == {"format": 1.0, "answer": 0.0, "reward": 0.0}
