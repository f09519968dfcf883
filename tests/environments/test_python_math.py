"""python_math: answers that are right, a sandbox for each rollout, nothing for numbers that happen to be there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import python_math
import shelf
from shelf import Policy, Turn

import verifiers as vf


def result(turn: Turn) -> str:
    return f"\\boxed{{{turn.answer}}}"


def largest_prime_factor(number: int) -> int:
    """By another way: divide by everything from 2 on."""
    largest, factor = 1, 2
    while number > 1:
        while number % factor == 0:
            largest, number = factor, number // factor
        factor += 1
    return largest


@pytest.mark.parametrize("number", [2, 3, 4, 97, 360, 1001, 65_536, 9_991, 999_983])
def test_prime_factors(number: int) -> None:
    assert python_math.prime_factors(number)[-1] == largest_prime_factor(number)


def test_the_sum_over_multiples_and_of_fractions_is_right() -> None:
    rng = random.Random(1)
    for _ in range(5):
        question, answer = python_math.multiples(rng)
        limit, a, b = (int(word.strip(",")) for word in question.split() if word.strip(",").isdigit())
        assert int(answer) == sum(n for n in range(limit) if (n % a == 0) ^ (n % b == 0))
    question, answer = python_math.harmonic(random.Random(0))
    first, last = question.split("/")[1].split()[0], question.split("/")[3].split()[0]
    top, bottom = answer.removeprefix("\\frac{").removesuffix("}").split("}{")
    assert int(top) / int(bottom) == pytest.approx(sum(1 / n for n in range(int(first), int(last) + 1)))


def test_code_that_does_not_end_costs_its_time_and_no_more() -> None:
    def policy(turn: Turn) -> dict[str, Any] | str:
        if turn.number == 0:
            return {"tool_calls": [{"name": "python", "arguments": {"code": "while True: pass"}}]}
        return result(turn)

    (rollout,) = shelf.play(vf.load_environment("python-math", timeout_s=0.5), policy, prompts=1)
    assert rollout.reward == 1.0
    assert "longer than 0.5 s" in str(rollout.completion)


HACKS: dict[str, Policy] = {
    "two boxes": lambda turn: f"\\boxed{{{turn.answer}}} or \\boxed{{0}}",
    "two numbers with a comma": lambda turn: f"\\boxed{{{turn.answer}, 0}}",
    "a choice": lambda turn: f"\\boxed{{x = {turn.answer} \\text{{ or }} x = 0}}",
    "many numbers": lambda turn: f"\\boxed{{{', '.join(map(str, range(1000)))}}}",
    "an interval": lambda turn: "\\boxed{[0, 10^{20}]}",
    "a box that stays open": lambda turn: f"\\boxed{{{turn.answer}",
    "the question": lambda turn: f"\\boxed{{{turn.question}}}",
}


@pytest.mark.parametrize("policy", HACKS.values(), ids=HACKS)
def test_a_hack_does_not_pay(policy: Policy) -> None:
    assert shelf.reward_of(vf.load_environment("python-math"), policy, prompts=10) == 0.0
