"""RubricGroup: several rubrics as one."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.rubrics import Rubric
from verifiers.types import RolloutScore, State

ROW: dict[str, Any] = {"prompt": "p", "completion": "abc", "answer": "a", "task": "t", "info": {"n": 1}}


def state(**extra: Any) -> State:
    return State({**ROW, "timing": {"scoring_ms": 0.0, "total_ms": 1.0}, **extra})


def length(completion: str) -> float:
    return len(completion)


def half(answer: str) -> float:
    return 0.5


async def quarter(answer: str) -> float:
    return 0.25


def shortest(completions: list[str]) -> list[float]:
    return [float(len(text) == min(map(len, completions))) for text in completions]


def broken(answer: str) -> float:
    raise ValueError("no such field")


class Own(Rubric):
    async def score_states(self, states: Any) -> list[RolloutScore]:
        if states[0].get("breaks"):
            raise RuntimeError("cannot grade this")
        return [RolloutScore(10.0 * len(one["completion"]), {"own": 1.0}) for one in states]


def test_a_group_without_rubrics_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one rubric"):
        vf.RubricGroup([])


def test_functions_weights_names_and_objects_are_the_union() -> None:
    judged = Rubric(funcs=[half], weights=[2.0])
    judged.add_class_object("level", 7)
    inner = vf.RubricGroup([Rubric(funcs=[quarter]), Rubric(funcs=[half], weights=[0.0])])
    group = vf.RubricGroup([judged, inner], threshold=0.3)
    assert group.reward_funcs == group.funcs == group.get_reward_funcs() == [half, quarter, half]
    assert group.reward_weights == group.weights == group.get_reward_weights() == [2.0, 1.0, 0.0]
    assert group.get_reward_func_names() == ["half", "quarter", "half"]
    assert group.class_objects["level"] == 7
    assert group.threshold == 0.3
    assert not group.has_group_funcs
    assert vf.RubricGroup([group, Rubric(funcs=[shortest])]).has_group_funcs


def test_what_is_added_goes_to_the_first_rubric() -> None:
    first, second = Rubric(), Rubric()
    group = vf.RubricGroup([first, second])
    group.add_reward_func(half, weight=0.5)
    group.add_metric(quarter)
    group.add_class_object("level", 1)
    assert (first.reward_funcs, first.reward_weights) == ([half, quarter], [0.5, 0.0])
    assert first.class_objects["level"] == 1
    assert second.reward_funcs == []
    assert "level" not in second.class_objects
    with pytest.raises(ConfigError, match="no functions of its own"):
        group.reward_funcs = [half]
    with pytest.raises(ConfigError, match="no weights of its own"):
        group.weights = [1.0]


async def test_rewards_and_metrics_are_summed() -> None:
    group = vf.RubricGroup(
        [
            Rubric(funcs=[half, length], weights=[2.0, 1.0]),
            Own(),
            vf.RubricGroup([Rubric(funcs=[half]), Rubric(funcs=[quarter, shortest], weights=[0.0, 100.0])]),
        ]
    )
    states = [state(), state(completion="a")]
    await group.score_group(states)
    assert [one["reward"] for one in states] == [1.0 + 3.0 + 30.0 + 0.5, 1.0 + 1.0 + 10.0 + 0.5 + 100.0]
    assert states[0]["metrics"] == {"half": 1.0, "length": 3.0, "own": 1.0, "quarter": 0.25, "shortest": 0.0}
    assert states[0]["timing"]["scoring_ms"] > 0
    assert all("grading_errors" not in one for one in states)


async def test_a_rubric_that_fails_is_noted_and_the_others_count() -> None:
    scored = state(breaks=True)
    await vf.RubricGroup([Rubric(funcs=[half]), Own(), Rubric(funcs=[broken, half])]).score_group([scored])
    assert [(error["func"], error["error"]) for error in scored["grading_errors"]] == [
        ("score_group", "RuntimeError: cannot grade this"),
        ("broken", "ValueError: no such field"),
    ]
    assert scored["reward"] == 1.0


async def test_functions_read_the_reward_that_the_environment_has_set_and_not_that_of_another_rubric() -> None:
    def of_the_environment(state: State) -> float:
        return state["reward"]

    scored = state(reward=0.125)
    await vf.RubricGroup([Rubric(funcs=[half]), Rubric(funcs=[of_the_environment])]).score_group([scored])
    assert scored["reward"] == 0.625


async def test_a_later_rubric_reads_what_an_earlier_one_left_in_the_state() -> None:
    async def writes(state: State) -> float:
        await asyncio.sleep(0)
        state["note"] = 0.75
        return 0.0

    def reads(state: State) -> float:
        return state["note"]

    scored = state()
    await vf.RubricGroup([Rubric(funcs=[writes]), Rubric(funcs=[reads])]).score_group([scored])
    assert scored["reward"] == 0.75


async def test_groups_are_copied_and_pickled_with_their_rubrics() -> None:
    group = vf.RubricGroup([Rubric(funcs=[half]), vf.MathRubric(), vf.JudgeRubric(), vf.RankingRubric()])
    for twin in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert twin.get_reward_func_names() == group.get_reward_func_names()
        assert twin.rubrics[0] is not group.rubrics[0]
        assert twin.rubrics[2].class_objects["judge"].__self__ is twin.rubrics[2]
