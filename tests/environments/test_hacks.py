"""Ways to a reward without doing the task, tried on every package: none of them pays."""

from __future__ import annotations

import re
import string

import pytest
import shelf
from shelf import Policy, Turn
from shelf_policies import open_environment, sentences, tagged

NUMBERS = " ".join(map(str, range(2000)))


def both_answers(turn: Turn) -> str:
    return f"<answer>{turn.answer}</answer><answer>0</answer>"


def says_both_results(turn: Turn) -> str:
    return tagged("answer", f"{turn.answer} or 0")


def asked_sum(turn: Turn, signs: str = "") -> str:
    """Write the sum of fractions as it was asked for, and nothing for other questions."""
    found = re.fullmatch(r"What is 1/(\d+) .* 1/(\d+) as one fraction .*", turn.question)
    if found is None:
        return ""
    first, last = map(int, found.groups())
    return f"\\boxed{{{signs.format(first, last) or ' + '.join(f'1/{n}' for n in range(first, last + 1))}}}"


HACKS: list[tuple[str, str, Policy, float]] = [
    ("reverse_text", "every letter twice", lambda turn: tagged("reversed_text", string.ascii_lowercase * 2), 0.0),
    ("reverse_text", "right and wrong", lambda turn: tagged("reversed_text", turn.answer + turn.question), 0.05),
    ("reverse_text", "without tags", lambda turn: turn.answer, 0.0),
    ("spell_backward", "both words", lambda turn: f"{turn.answer} {turn.answer[::-1]}", 0.0),
    ("spell_backward", "a sentence about it", lambda turn: f"The word is {turn.answer}.", 0.0),
    ("doublecheck", "two answers", both_answers, 0.0),
    ("doublecheck", "two results", says_both_results, 0.0),
    ("doublecheck", "yes", lambda turn: "Yes, I am sure." if turn.number else tagged("answer", turn.answer), 0.0),
    ("arithmetic_tools", "two answers", both_answers, 0.0),
    ("arithmetic_tools", "two results", says_both_results, 0.0),
    ("arithmetic_tools", "tools for nothing", lambda turn: {"tool_calls": [{"name": "add", "arguments": "{}"}]}, 0.0),
    ("wordle", "every word at once", lambda turn: " ".join(tagged("guess", word) for word in SECRETS), 0.05),
    ("wordle", "no tags", lambda turn: turn.answer, 0.0),
    ("xml_tools", "two results", says_both_results, 0.0),
    (
        "xml_tools",
        "an answer before the result",
        lambda turn: f"<tool>{{}}</tool>{tagged('answer', turn.answer)}",
        0.0,
    ),
    ("sentence_repeater", "two sentences", lambda turn: " ".join(sentences(turn)[turn.number :][:2]), 0.25),
    ("sentence_repeater", "all at once", lambda turn: turn.question, 0.0),
    ("complete_sequence", "every number", lambda turn: ", ".join(NUMBERS.split()), 0.0),
    ("complete_sequence", "in another line", lambda turn: "\n" + turn.answer, 0.0),
    ("complete_sequence", "right after wrong", lambda turn: "0, " + turn.answer, 0.0),
    ("python_math", "two boxes", lambda turn: f"\\boxed{{{turn.answer}}} or \\boxed{{0}}", 0.0),
    ("python_math", "two numbers with a comma", lambda turn: f"\\boxed{{{turn.answer}, 0}}", 0.0),
    ("python_math", "a choice", lambda turn: f"\\boxed{{x = {turn.answer} \\text{{ or }} x = 0}}", 0.0),
    ("python_math", "many numbers", lambda turn: f"\\boxed{{{', '.join(map(str, range(1000)))}}}", 0.0),
    ("python_math", "an interval", lambda turn: "\\boxed{[0, 10^{20}]}", 0.0),
    ("python_math", "a box that stays open", lambda turn: f"\\boxed{{{turn.answer}", 0.0),
    ("python_math", "the question", lambda turn: f"\\boxed{{{turn.question}}}", 0.0),
    ("python_math", "the sum that was asked for", asked_sum, 0.0),
    ("python_math", "the sum in signs", lambda turn: asked_sum(turn, "\\sum_{{k={}}}^{{{}}} \\frac{{1}}{{k}}"), 0.0),
]
SECRETS = ["crane", "slate", "about", "house", "piano"]


@pytest.mark.parametrize(
    ("name", "policy", "at_most"),
    [(name, policy, at_most) for name, _, policy, at_most in HACKS],
    ids=[f"{name}: {what}" for name, what, _, _ in HACKS],
)
def test_a_hack_does_not_pay(name: str, policy: Policy, at_most: float) -> None:
    with open_environment(name) as env:
        assert shelf.reward_of(env, policy) <= at_most + 1e-9
