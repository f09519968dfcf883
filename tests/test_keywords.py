"""A misspelled name is refused with the name that was meant; an unknown one is logged once and kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import verifiers as vf
from verifiers.keywords import warn_once
from verifiers.testing import FakeClient
from verifiers.train.run_plan import plan_batches

ROWS = [{"question": "2+2?", "answer": "4"}]


@pytest.fixture(autouse=True)
def _nothing_logged_before() -> None:
    warn_once.cache_clear()


def right(completion: Any, answer: str) -> float:
    return 1.0


def misspelled(completion: Any, anwser: str) -> float:
    return 1.0


def environment(**kwargs: Any) -> vf.Environment:
    return vf.SingleTurnEnv(**{"eval_dataset": ROWS, "rubric": vf.Rubric([right]), **kwargs})


@pytest.mark.parametrize(
    ("make", "given", "meant"),
    [
        (lambda: environment(rubrics=vf.Rubric([right])), "rubrics", "rubric"),
        (lambda: vf.SingleTurnEnv(datset=ROWS), "datset", "dataset"),  # type: ignore[call-arg]
        (lambda: vf.ToolEnv(dataset=ROWS, tool=[right]), "tool", "tools"),
        (lambda: vf.Rubric([right], wieghts=[1.0]), "wieghts", "weights"),
        (lambda: vf.Rubric([misspelled]), "anwser", "answer"),
        (lambda: vf.Rubric().add_metric(misspelled), "anwser", "answer"),
        (
            lambda: environment().generate_sync(ROWS, FakeClient(), "m", max_concurent=1),
            "max_concurent",
            "max_concurr",
        ),
    ],
)
def test_a_misspelled_name_is_refused_with_the_name_that_was_meant(
    make: Callable[[], Any], given: str, meant: str
) -> None:
    with pytest.raises(vf.ConfigError, match=rf"has (no|a) parameter '{given}'.* did you mean '{meant}"):
        make()


class Difficult(vf.MultiTurnEnv):
    """An environment as packages write it: keywords of its own, and one that nobody names."""

    rounds = 1

    def __init__(self, rubrics: int = 2, **kwargs: Any) -> None:
        super().__init__(rubrics=rubrics, **kwargs)


def test_what_is_unknown_is_logged_once_and_becomes_an_attribute(caplog: pytest.LogCaptureFixture) -> None:
    envs = [Difficult(dataset=ROWS, rounds=3, level=7, env_id="x") for _ in range(2)]
    assert [(env.rubrics, env.rounds, env.level, env.env_id) for env in envs] == [(2, 3, 7, "x")] * 2
    assert [record.message for record in caplog.records] == [
        "Difficult has no parameter 'level': it only becomes an attribute."
    ]
    assert vf.Parser(custom_attr=1).custom_attr == 1
    assert vf.ThinkParser(custom_attr=1).custom_attr == 1
    assert vf.XMLParser(["answer"], custom_attr=1).custom_attr == 1


def test_an_unknown_argument_of_an_evaluation_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    results = environment().evaluate_sync(FakeClient(), "m", no_such_argument=1)
    assert results.reward == [1.0]
    assert "SingleTurnEnv ignores the unknown argument 'no_such_argument' of this call." in caplog.messages


def test_reward_functions_may_have_defaults_and_class_objects_of_any_name() -> None:
    def graded(completion: Any, answers_: str = "", *, infos_: Any = None) -> float:
        return 1.0

    class Supplying(vf.Rubric):
        async def call_reward_func(self, func: Any, *args: Any, **kwargs: Any) -> float:
            return await super().call_reward_func(func, *args, anwser="4", **kwargs)

    assert vf.Rubric([graded]).reward_weights == [1.0]
    assert Supplying([misspelled]).reward_funcs == [misspelled]
    rubric = vf.Rubric()
    rubric.add_class_object("anwser", "4")
    rubric.add_reward_func(misspelled)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: environment(rubric="oops"), r"rubric is 'oops'; give a rubric, such as Rubric\(funcs="),
        (lambda: environment(parser=len), "parser is <built-in function len>; give a parser, such as XMLParser"),
        (lambda: environment(parser=vf.XMLParser), "parser is <class .*XMLParser'>; give a parser"),
        (lambda: environment(system_prompt=["be brief"]), r"system_prompt is \['be brief'\]; give a text"),
        (lambda: environment(few_shot="Q: 1+1 A: 2"), "few_shot is 'Q: 1[+]1 A: 2'; give a list of messages"),
        (lambda: environment(few_shot=["1+1?", "2"]), "few_shot is .*'2'.; give a list of messages"),
        (lambda: vf.EnvGroup(environment()), "EnvGroup takes a list of environments, not <.*; give several"),
        (lambda: vf.RubricGroup([len]), "A group's rubrics hold <built-in function len>; give rubrics, such as"),
        (lambda: environment(message_type="chta"), "message_type is 'chta'; give 'chat' or 'completion'"),
        (lambda: environment(rubric=vf.Rubric), "rubric is <class .*Rubric'>; give a rubric"),
        (lambda: vf.Rubric([right], [float("nan")]), r"weights are \[nan\]; give one finite number"),
        (lambda: vf.Rubric([right], {"right": 1.0}), r"weights are \['right'\]; give one finite"),  # type: ignore[arg-type]
        (lambda: vf.Rubric(right), "funcs is <function right .*>; give a list of functions"),  # type: ignore[arg-type]
        (lambda: vf.Rubric(["right"]), r"funcs is \['right'\]; give a list of functions"),  # type: ignore[list-item]
        (lambda: vf.ToolEnv(dataset=ROWS, tools=right), "tools is <function right .*>; give a list of functions"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_in_one_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(vf.ConfigError, match=sentence):
        make()


def test_the_rubrics_of_a_group_may_come_one_by_one() -> None:
    assert len(vf.RubricGroup(vf.Rubric([right]) for _ in range(2)).rubrics) == 2


def test_a_rubric_without_functions_is_logged_where_it_scores_and_refused_in_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = vf.SingleTurnEnv(dataset=ROWS, eval_dataset=ROWS)
    with pytest.raises(vf.ConfigError, match=r"rubric has no reward function.* rubric=Rubric\(funcs="):
        plan_batches(SimpleNamespace(teacher_url=None), env)  # type: ignore[arg-type]
    assert caplog.messages == []
    env.evaluate_sync(FakeClient(), "m", score_rollouts=False)
    assert caplog.messages == []
    assert env.evaluate_sync(FakeClient(), "m").reward == [0.0]
    assert caplog.messages == ["A rubric has no reward function: every reward is 0.0; give it funcs=[...]."]


class OwnScores(vf.Rubric):
    async def score_rollout(self, *args: Any, **kwargs: Any) -> vf.RolloutScore:
        return vf.RolloutScore(reward=0.5)


def test_rewards_that_come_from_elsewhere_are_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    own = environment(rubric=OwnScores())
    added = vf.SingleTurnEnv(eval_dataset=ROWS)
    added.add_rubric(vf.Rubric([right]))
    for env, reward in ((own, 0.5), (added, 1.0), (vf.EnvGroup([added]), 1.0)):
        assert not env.rubric.is_empty
        assert env.evaluate_sync(FakeClient(), "m").reward == [reward]
    assert not [text for text in caplog.messages if "no reward function" in text]
