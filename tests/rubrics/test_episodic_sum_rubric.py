"""EpisodicSumRubric: an episode's reward is the sum of its steps'."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import verifiers as vf
from verifiers.types import State


def always_one(completion: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("steps", "total"),
    [
        ([{"reward": 0.5}, {"reward": None}, {"reward": -2}, {}], -1.5),
        ([SimpleNamespace(reward=1.0), {"reward": 1.0}], 2.0),
        ([], 0.0),
        (None, 0.0),
    ],
)
async def test_the_reward_is_the_sum_of_the_steps(steps: Any, total: float) -> None:
    scored = State(prompt="p", completion="c", trajectory=steps)
    await vf.EpisodicSumRubric().score_group([scored])
    assert scored["reward"] == total
    assert scored["metrics"] == {"sum_step_rewards": total}


async def test_further_functions_and_weights_are_as_in_a_rubric() -> None:
    rubric = vf.EpisodicSumRubric(weight=0.5, funcs=[always_one], weights=[0.25], parser=vf.XMLParser(["answer"]))
    scored = State(prompt="p", completion="c", trajectory=[{"reward": 3.0}])
    await rubric.score_group([scored])
    assert scored["reward"] == 1.75
    assert isinstance(rubric.parser, vf.XMLParser)
    assert vf.EpisodicSumRubric(funcs=[always_one]).weights == [1.0, 1.0]


async def test_a_step_without_a_number_is_a_failed_grade() -> None:
    for reward in (float("nan"), "much"):
        scored = State(prompt="p", completion="c", trajectory=[{"reward": reward}])
        await vf.EpisodicSumRubric().score_group([scored])
        assert scored["grading_errors"][0]["func"] == "sum_step_rewards"
