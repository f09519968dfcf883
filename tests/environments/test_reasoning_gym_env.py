"""The reasoning-gym environment: its arguments, and the baselines that its README states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.testing import FakeClient

reasoning_gym_env = pytest.importorskip(
    "reasoning_gym_env", reason="pip install -e environments/reasoning_gym_env", exc_type=ImportError
)

SHORT_WORDS = {"min_word_len": 3, "max_word_len": 5}
LOWER_CASE = r": [a-z]+$"


def split(**settings: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    arguments = {"num_train": 300, "num_eval": 100, "seed": 0, "task_config": SHORT_WORDS} | settings
    return reasoning_gym_env.disjoint_entries("spell_backward", **arguments)


def words(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["metadata"]["word"].casefold() for entry in entries]


def completion(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": text}]


async def rewards_of(env: vf.Environment, text: str) -> dict[str, float]:
    row = env.get_dataset()[0]
    return {
        function.__name__: await env.rubric.call_reward_func(
            function, row["prompt"], completion(text), row["answer"], vf.State(), "default", row["info"]
        )
        for function in env.get_reward_funcs()
        if function.__name__ in ("score", "exact_match")
    }


def test_words_that_differ_only_in_case_count_as_one() -> None:
    train, evaluation = split(num_train=1000, num_eval=200, task_config={"min_word_len": 3, "max_word_len": 3})
    assert any(entry["metadata"]["word"] != entry["metadata"]["word"].lower() for entry in train)
    assert len({*words(train), *words(evaluation)}) == 1200


def test_word_lengths_and_the_question_pattern_choose_the_words() -> None:
    train, evaluation = split(task_config={"min_word_len": 4, "max_word_len": 5}, question_pattern=LOWER_CASE)
    chosen = [entry["metadata"]["word"] for entry in train + evaluation]
    assert {len(word) for word in chosen} == {4, 5}
    assert all(word == word.lower() for word in chosen)


def test_too_few_distinct_questions_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"gave 1\d\d\d distinct questions .* need 1400"):
        split(num_train=1200, num_eval=200, task_config={"min_word_len": 3, "max_word_len": 3})


def test_an_unknown_task_and_a_reserved_setting_are_named() -> None:
    with pytest.raises(ValueError, match="'spell_backwards'"):
        reasoning_gym_env.load_environment(task="spell_backwards")
    with pytest.raises(ValueError, match=r"task_config must not set \['seed', 'size'\]"):
        reasoning_gym_env.load_environment(task_config={"seed": 1, "size": 2})
    with pytest.raises(ValueError, match="reward='both' is unknown"):
        reasoning_gym_env.load_environment(reward="both")


async def test_partial_credit_is_a_score_and_not_an_exact_match() -> None:
    env = reasoning_gym_env.load_environment(num_train=5, num_eval=5, task_config={"min_word_len": 4})
    answer = env.get_dataset()[0]["answer"]
    rewards = await rewards_of(env, answer[:2])
    assert rewards["score"] == pytest.approx(2 / len(answer))
    assert rewards["exact_match"] == 0.0


def stated_baselines() -> list[tuple[str, float, float, float]]:
    """Return the rows of the README's table."""
    readme = (Path(__file__).parents[2] / "environments" / "reasoning_gym_env" / "README.md").read_text()
    cells = re.findall(r"^\| (\w+) \| (\d\.\d+) \| (\d\.\d+) \| (\d\.\d+) \|$", readme, re.MULTILINE)
    return [(task, float(oracle), float(following), float(nothing)) for task, oracle, following, nothing in cells]


@pytest.mark.parametrize(
    ("task", "oracle", "following", "nothing"),
    [pytest.param(*row, marks=() if row[0] == "spell_backward" else pytest.mark.slow) for row in stated_baselines()],
)
def test_scripted_policies_score_what_the_readme_says(
    task: str, oracle: float, following: float, nothing: float
) -> None:
    env = reasoning_gym_env.load_environment(task=task, num_train=0, num_eval=50)
    rows = env.get_eval_dataset()
    questions, answers = list(rows["question"]), list(rows["answer"])
    expected = {"oracle": oracle, "following": following, "nothing": nothing}
    policies = {"oracle": answers, "following": answers[1:] + answers[:1], "nothing": [" "] * 50}
    for name, said in policies.items():
        script = dict(zip(questions, said, strict=True))
        client = FakeClient(lambda body, script=script: script[body["messages"][-1]["content"]])
        rewards = env.evaluate_sync(client, "m")["reward"]
        assert sum(rewards) / 50 == pytest.approx(expected[name], abs=0.0006), name
