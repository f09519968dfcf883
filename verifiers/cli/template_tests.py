"""The tests of the packages that `vf-init` writes: each plays its environment against a fake endpoint."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["TESTS"]

_SORTING = '''\
"""The environment against a fake endpoint: right answers score 1, wrong ones 0."""

from verifiers.testing import FakeOpenAIServer

from MODULE import load_environment


def solve(request: dict) -> str:
    words = request["messages"][-1]["content"].partition(": ")[2].split(", ")
    return f"<answer>{', '.join(sorted(words))}</answer>"


def rewards(answers) -> list[float]:
    env = load_environment(num_train=1, num_eval=5)
    with FakeOpenAIServer(answers) as server:
        return env.evaluate_sync(server.url, "fake").reward


def test_right_answers_score_one() -> None:
    assert rewards(solve) == [1.0] * 5


def test_wrong_answers_score_zero() -> None:
    assert rewards("<answer>zebra, apple</answer>") == [0.0] * 5


def test_no_question_is_both_trained_and_evaluated_on() -> None:
    env = load_environment()
    questions = set(env.get_dataset()["question"])
    assert questions.isdisjoint(env.get_eval_dataset()["question"])
'''

_GUESSING = '''\
"""The environment against a fake endpoint: who halves the range finds the number."""

from verifiers.testing import FakeOpenAIServer

from MODULE import load_environment


def halve(request: dict) -> str:
    low, high, guess = 1, 100, 50
    for message in request["messages"][1:]:
        if message["role"] == "assistant":
            guess = int(message["content"])
        elif message["content"] == "higher":
            low = guess + 1
        else:
            high = guess - 1
    return str((low + high) // 2)


def results(answers):
    env = load_environment(num_train=1, num_eval=5)
    with FakeOpenAIServer(answers) as server:
        return env.evaluate_sync(server.url, "fake")


def test_halving_the_range_finds_every_number() -> None:
    found = results(halve)
    assert found.reward == [1.0] * 5
    assert max(found.metrics["guesses"]) <= 7


def test_a_policy_that_does_not_guess_is_told_so_and_scores_zero() -> None:
    lost = results("no idea")
    assert lost.reward == [0.0] * 5
    assert lost.completion[0][1]["content"] == "Answer with a number alone."
'''

_SHOPPING = '''\
"""The environment against a fake endpoint: looking the prices up gives the total."""

import re

from verifiers.testing import FakeOpenAIServer

from MODULE import load_environment


def look_up(request: dict):
    basket = re.findall(r"(\\d) x (\\w+)", request["messages"][1]["content"])
    prices = [int(m["content"]) for m in request["messages"] if m["role"] == "tool"]
    if not prices:
        return {
            "tool_calls": [
                {"name": "price_of", "arguments": {"item": item}} for _, item in basket
            ]
        }
    counts = [int(count) for count, _ in basket]
    return str(sum(c * p for c, p in zip(counts, prices, strict=True)))


def results(answers):
    env = load_environment(num_train=1, num_eval=5)
    with FakeOpenAIServer(answers) as server:
        return env.evaluate_sync(server.url, "fake")


def test_looking_the_prices_up_scores_one() -> None:
    right = results(look_up)
    assert right.reward == [1.0] * 5
    assert right.metrics["tool_calls"] == [3.0] * 5


def test_guessing_scores_zero() -> None:
    assert results("7").reward == [0.0] * 5
'''

TESTS: Mapping[str, str] = {"single-turn": _SORTING, "multi-turn": _GUESSING, "tool": _SHOPPING}
"""By kind; MODULE stands for the module's name."""
