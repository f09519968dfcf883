"""Questions of reasoning-gym: distinct, repeatable, from one task or a mix, at a curriculum's level."""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any

import pytest

import verifiers as vf
from verifiers.integrations.reasoning_gym import GymTask, Row, draw_split, gym_tasks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs the rg extra")

MIX = ["gcd", {"name": "ab", "weight": 3}, {"name": "ab", "config": {"length": 5}, "weight": 2}]


def draw(
    gym: Any, num_train: int = 60, num_eval: int = 30, seed: int = 0, **settings: Any
) -> tuple[list[Row], list[Row]]:
    return draw_split(gym_tasks(gym), num_train=num_train, num_eval=num_eval, seed=seed, **settings)


def questions(rows: list[tuple[int, dict[str, Any]]]) -> list[str]:
    return [entry["question"] for _, entry in rows]


def test_a_mix_draws_its_tasks_by_weight_and_repeats_no_question() -> None:
    train, evaluation = draw(MIX, num_train=600, num_eval=60)
    shares = Counter(position for position, _ in train)
    assert shares[0] / 600 == pytest.approx(1 / 6, abs=0.06)
    assert shares[1] / 600 == pytest.approx(3 / 6, abs=0.08)
    assert len(set(questions(train) + questions(evaluation))) == 660


def test_one_task_twice_in_a_mix_gives_no_training_question_that_is_evaluated_on() -> None:
    train, evaluation = draw(["spell_backward", "spell_backward"], num_train=200, num_eval=200)
    assert not set(questions(train)) & set(questions(evaluation))


@pytest.mark.parametrize("gym", ["spell_backward", MIX])
def test_evaluation_questions_depend_on_the_seed_and_not_on_the_training_rows(gym: Any) -> None:
    train, evaluation = draw(gym)
    longer, same = draw(gym, num_train=90)
    assert (longer[:60], same) == (train, evaluation)
    assert draw(gym) == (train, evaluation)
    assert draw(gym, seed=1)[1] != evaluation


def test_reasoning_gyms_own_specs_are_taken() -> None:
    from reasoning_gym.composite import DatasetSpec

    assert gym_tasks([DatasetSpec("ab", 2, {"length": 4})]) == [GymTask("ab", {"length": 4}, 2.0)]


@pytest.mark.parametrize(
    ("levels", "settings"),
    [
        (0, {"min_word_len": 3, "max_word_len": 3}),
        (2, {"min_word_len": 3, "max_word_len": 7}),
        (99, {"min_word_len": 3, "max_word_len": 11}),
        ({"word_len": 1}, {"min_word_len": 3, "max_word_len": 5}),
    ],
)
def test_a_curriculum_level_sets_the_tasks_settings(levels: Any, settings: dict[str, int]) -> None:
    assert gym_tasks("spell_backward", curriculum=levels) == [GymTask("spell_backward", settings)]
    assert gym_tasks([{"name": "spell_backward", "curriculum": levels}])[0].settings == settings


def test_a_higher_level_gives_harder_questions_and_task_config_goes_before() -> None:
    easy, hard = (
        draw([{"name": "spell_backward", "curriculum": level}], num_train=50, num_eval=0)[0] for level in (0, 3)
    )
    assert {len(entry["metadata"]["word"]) for _, entry in easy} == {3}
    assert max(len(entry["metadata"]["word"]) for _, entry in hard) > 5
    (task,) = gym_tasks("spell_backward", curriculum=3, task_config={"max_word_len": 4})
    assert task.settings == {"min_word_len": 3, "max_word_len": 4}


@pytest.mark.parametrize(
    ("gym", "settings", "message"),
    [
        ("spel_backward", {}, r"no task 'spel_backward'; the nearest names are \['spell_backward'\]"),
        ("composite", {}, "give a list of them"),
        ([], {}, "gym is empty"),
        (["ab", {"name": "gcd", "weight": 0}], {}, "weight 0; it must be a number above 0"),
        ([{"name": "ab", "wieght": 2}], {}, "has the keys name, weight, config, curriculum"),
        (["ab"], {"task_config": {"length": 3}}, "task_config and curriculum go with one task"),
        ("ab", {"task_config": {"lenght": 3}}, "reasoning-gym refuses task 'ab' with settings"),
        ("ab", {"task_config": {"seed": 3}}, r"task_config must not set \['seed'\]"),
        ("gsm_symbolic", {"curriculum": 1}, "Task 'gsm_symbolic' has no curriculum"),
        ("gcd", {"curriculum": {"valu": 1}}, r"its levels are \{'num_terms': '0..3', 'value': '0..3'\}"),
        ("gcd", {"curriculum": {"value": 9}}, r"cannot take curriculum=\{'value': 9\}"),
        ("gcd", {"curriculum": -1}, "cannot take curriculum=-1"),
    ],
)
def test_what_cannot_work_is_named(gym: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(vf.ConfigError, match=message):
        gym_tasks(gym, **settings)


def test_nothing_is_printed_while_questions_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    draw("bf", num_train=3, num_eval=0)
    assert capsys.readouterr().out == ""
