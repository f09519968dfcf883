"""Expressions too long for the head, worked out with calculator tools through native tool calls."""

from __future__ import annotations

import random
from collections.abc import Callable

import verifiers as vf

__all__ = ["TOOLS", "load_environment"]

PARSER = vf.XMLParser(["answer"])
SYSTEM_PROMPT = """\
Work out the value of the expression with the tools; a tool call may use results of earlier ones.
When you know the value, write it as a whole number in digits: <answer>...</answer>."""


def add(a: int, b: int) -> int:
    """Add two whole numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Take a whole number away from another.

    Args:
        a: the number to take away from
        b: the number to take away
    """
    return a - b


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: the first factor
        b: the second factor
    """
    if max(a.bit_length(), b.bit_length()) > 10_000:
        raise ValueError("the numbers are too large")
    return a * b


def remainder(a: int, b: int) -> int:
    """Return the remainder of a whole number divided by a positive one: from 0 to b - 1.

    Args:
        a: the number to divide
        b: the number to divide by, 1 or more
    """
    if b < 1:
        raise ValueError("b must be 1 or more")
    return a % b


TOOLS: list[Callable[..., int]] = [add, subtract, multiply, remainder]
OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": add, "-": subtract, "*": multiply, "mod": remainder}


def make_expression(rng: random.Random, steps: int) -> tuple[str, int]:
    """Make an expression of `steps` operations, fully in brackets, and its value."""
    if steps == 0:
        number = rng.randint(12, 999)
        return str(number), number
    sign = rng.choice(["+", "-", "*", "*", "mod"])
    # what is divided by must be positive, so it is a plain number
    steps_left = steps - 1 if sign == "mod" else rng.randint(0, steps - 1)
    left, a = make_expression(rng, steps_left)
    right, b = make_expression(rng, steps - 1 - steps_left)
    return f"({left} {sign} {right})", OPERATIONS[sign](a, b)


def right_answer(parser: vf.XMLParser, completion: vf.Messages, answer: str) -> float:
    """Return 1.0 where the last message has the right value; separators of thousands do not count."""
    said = parser.parse_answer(completion[-1:]) or ""
    return float(said.replace(",", "").replace(" ", "").replace("\u2212", "-") == answer)


def load_environment(
    steps: int = 5, num_train: int = 1000, num_eval: int = 200, seed: int = 0, max_turns: int = 10
) -> vf.Environment:
    """Build the environment.

    Args:
        steps: operations of an expression, 2 to 20.
        num_train: training expressions.
        num_eval: evaluation expressions, none of them trained on; they do not depend on `num_train`.
        seed: chooses the expressions.
        max_turns: messages of the policy in one rollout; each may call several tools.

    Raises:
        vf.ConfigError: an argument out of bounds.
    """
    if not 2 <= steps <= 20 or min(num_train, num_eval) < 1 or num_train + num_eval > 100_000:
        raise vf.ConfigError(
            f"steps={steps} must lie between 2 and 20; num_train={num_train} and num_eval={num_eval} must be 1 or "
            "more, and at most 100000 together."
        )
    rng = random.Random(seed)
    expressions: dict[str, int] = {}
    while len(expressions) < num_eval + num_train:
        text, value = make_expression(rng, steps)
        expressions[text] = value
    rows = [{"question": text[1:-1], "answer": str(value)} for text, value in expressions.items()]
    rubric = vf.ToolRubric(tools=TOOLS, parser=PARSER)
    rubric.add_reward_func(right_answer)
    return vf.ToolEnv(
        tools=TOOLS,
        max_turns=max_turns,
        dataset=rows[num_eval:],
        eval_dataset=rows[:num_eval],
        system_prompt=SYSTEM_PROMPT,
        parser=PARSER,
        rubric=rubric,
    )
