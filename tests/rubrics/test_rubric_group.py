"""RubricGroup: several rubrics as one, through every way of scoring."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.parsers import Parser, XMLParser
from verifiers.rubrics import Rubric
from verifiers.testing import FakeOpenAIServer
from verifiers.types import RolloutScore, RolloutScores, State

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


class FirstGeneration(Rubric):
    async def score_rollout(  # type: ignore[override]
        self, prompt: Any, completion: Any, answer: Any, state: State, **kwargs: Any
    ) -> RolloutScore:
        return RolloutScore(reward=10.0 * len(completion), metrics={"own": 1.0})


class SecondGeneration(Rubric):
    async def score_rollout(self, state: State, score_sem: Any) -> None:  # type: ignore[override]
        async with score_sem:
            state["reward"] = 10.0 * len(state["completion"])
        state["metrics"] = {"own": 1.0}


class ByColumns(Rubric):
    async def score_rollouts(self, completions: Any, **kwargs: Any) -> RolloutScores:  # type: ignore[override]
        return RolloutScores([10.0 * len(text) for text in completions], {"own": [1.0] * len(completions)})


class ByGroup(Rubric):
    async def score_group(self, states: Any, score_sem: Any = None) -> None:
        for one in states:
            one["reward"], one["metrics"] = 10.0 * len(one["completion"]), {"own": 1.0}


class Forgetful(Rubric):
    async def score_group(self, states: Any, score_sem: Any = None) -> None:
        return None


class Raising(Rubric):
    async def score_rollout(self, *args: Any, **kwargs: Any) -> RolloutScore:
        raise RuntimeError("cannot grade this")


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


@pytest.mark.parametrize("own", [FirstGeneration, SecondGeneration])
async def test_every_way_of_scoring_sums_rewards_and_metrics(own: type[Rubric]) -> None:
    group = vf.RubricGroup(
        [
            Rubric(funcs=[half, length], weights=[2.0, 1.0]),
            own(),
            vf.RubricGroup([Rubric(funcs=[half]), Rubric(funcs=[quarter], weights=[0.0])]),
        ]
    )
    expected = 1.0 + 3.0 + 30.0 + 0.5
    metrics = {"half": 1.0, "length": 3.0, "own": 1.0, "quarter": 0.25}

    classic = await group.score_rollout(**ROW, state=state())
    assert (classic.reward, classic.metrics) == (expected, metrics)

    columns = await group.score_rollouts(["p"] * 2, ["abc", "a"], ["a"] * 2, [state(), state(completion="a")])
    assert columns.reward == [expected, 1.0 + 1.0 + 10.0 + 0.5]
    assert columns.metrics == {"half": [1.0, 1.0], "length": [3.0, 1.0], "own": [1.0, 1.0], "quarter": [0.25, 0.25]}

    single = state()
    assert (await group.score_rollout(single, asyncio.Semaphore(1))).reward == expected
    assert (single["reward"], single["metrics"]) == (expected, metrics)

    states = [state(), state(completion="a")]
    await group.score_group(states)
    assert [one["reward"] for one in states] == columns.reward
    assert states[0]["metrics"] == metrics
    assert states[0]["timing"]["scoring_ms"] > 0
    assert all("grading_errors" not in one for one in states)


@pytest.mark.parametrize("own", [ByColumns, ByGroup])
async def test_rubrics_that_score_columns_or_groups_by_themselves_count_in_a_group(own: type[Rubric]) -> None:
    group = vf.RubricGroup([Rubric(funcs=[half]), own(), Rubric(funcs=[half])])
    states = [state(), state(completion="a")]
    await group.score_group(states)
    assert [one["reward"] for one in states] == [31.0, 11.0]
    assert states[0]["metrics"] == {"half": 1.0, "own": 1.0}
    if own is ByColumns:
        scores = await group.score_rollouts(["p"] * 2, ["abc", "a"], ["a"] * 2, states, max_concurrent=1)
        assert scores.reward == [31.0, 11.0]


async def test_group_functions_work_in_a_group_of_rubrics_and_refuse_single_rollouts() -> None:
    group = vf.RubricGroup([Rubric(funcs=[length]), vf.RubricGroup([Rubric(funcs=[shortest], weights=[100.0])])])
    states = [state(), state(completion="a")]
    await group.score_group(states)
    assert [one["reward"] for one in states] == [3.0, 101.0]
    for refused in (
        group.score_rollout(state()),
        group.score_rollout(**ROW, state=State()),
        group.score_rollouts(["p"], ["c"], ["a"], [state()]),
    ):
        with pytest.raises(ConfigError, match=r"'shortest'.*use score_group"):
            await refused


async def test_each_rubric_keeps_its_parser_and_its_objects() -> None:
    def parsed(parser: Parser, completion: str) -> float:
        return float(parser.parse_answer(completion))

    def of_level(level: float = 0.0) -> float:
        return level

    first, second = Rubric(funcs=[parsed, of_level], parser=XMLParser(["answer"])), Rubric(funcs=[parsed, of_level])
    second.add_class_object("level", 100.0)
    group = vf.RubricGroup([first, second])
    assert group.parser is first.parser
    scored = state(completion="<answer>3</answer>")
    await group.score_group([scored])
    assert scored["grading_errors"][0]["func"] == "parsed"
    assert scored["metrics"] == {"parsed": 3.0, "of_level": 100.0}
    row = {**ROW, "completion": "<answer>4</answer>", "state": State()}
    assert await group.call_reward_func(parsed, **row) == 4.0


@pytest.mark.parametrize("how", ["group", "single", "classic", "columns"])
async def test_a_failed_grade_in_one_rubric_is_noted_and_the_others_count(how: str) -> None:
    group = vf.RubricGroup([Rubric(funcs=[half]), Raising(), Rubric(funcs=[broken, half])])
    scored = state()
    if how == "group":
        await group.score_group([scored])
    elif how == "single":
        await group.score_rollout(scored)
    elif how == "classic":
        assert (await group.score_rollout(**ROW, state=scored)).reward == 1.0
    else:
        assert (await group.score_rollouts(["p"], ["abc"], ["a"], [scored])).reward == [1.0]
    assert [(error["func"], error["error"]) for error in scored["grading_errors"]] == [
        ("score_rollout", "RuntimeError: cannot grade this"),
        ("broken", "ValueError: no such field"),
    ]
    if how in ("group", "single"):
        assert scored["reward"] == 1.0


async def test_a_rubric_that_sets_no_score_is_a_failed_grade_and_not_the_score_before_it() -> None:
    scored = state()
    await vf.RubricGroup([ByGroup(), Forgetful()]).score_group([scored])
    assert scored["reward"] == 30.0
    [error] = scored["grading_errors"]
    assert "returned None, not a finite number" in error["error"]


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


async def test_weights_that_do_not_fit_are_a_mistake_and_no_failed_grade() -> None:
    wrong = Rubric(funcs=[half])
    wrong.reward_funcs.append(length)
    group = vf.RubricGroup([Rubric(funcs=[half]), wrong])
    for scoring in (group.score_group([state()]), group.score_rollout(state())):
        with pytest.raises(ConfigError, match="2 reward functions but 1 weights"):
            await scoring


async def test_groups_are_copied_and_pickled_with_their_rubrics() -> None:
    group = vf.RubricGroup([Rubric(funcs=[half]), vf.MathRubric(), vf.JudgeRubric(), vf.RankingRubric()])
    for twin in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert twin.get_reward_func_names() == group.get_reward_func_names()
        assert twin.rubrics[0] is not group.rubrics[0]
        assert twin.rubrics[2].class_objects["judge"].__self__ is twin.rubrics[2]


def test_an_environment_scores_by_a_group_and_one_with_group_functions() -> None:
    env = vf.SingleTurnEnv(
        eval_dataset=[{"question": "?", "answer": "yes"}],
        rubric=vf.RubricGroup(
            [
                Rubric(funcs=[lambda completion, answer: float(completion[-1]["content"] == answer)]),
                Rubric(funcs=[lambda completions: [0.5] * len(completions)]),
            ]
        ),
    )
    with FakeOpenAIServer(["yes", "no"]) as server:
        results = env.evaluate_sync(server.url, "fake", rollouts_per_example=2, max_concurrent=1)
    assert sorted(results.reward) == [0.5, 1.5]
