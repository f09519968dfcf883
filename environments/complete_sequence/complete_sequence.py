"""Continue a sequence of numbers: completion mode, where a prompt is plain text and needs no chat template."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

import verifiers as vf

__all__ = ["load_environment", "terms"]

SHOWN, HELD_BACK = 5, 3

Rule = tuple[str, int, int]
"""Kind ("add", "multiply" or "fibonacci"), first term, and step, factor or second term."""

EXAMPLES: list[Rule] = [("add", 100, 7), ("multiply", 110, 2), ("fibonacci", 50, 70)]
"""Shown complete before every question; none of them is among `all_rules`."""


def terms(rule: Rule) -> Iterator[int]:
    """Yield the numbers of a sequence, without end."""
    kind, first, second = rule
    if kind == "add":
        yield from itertools.count(first, second)
    elif kind == "multiply":
        yield from (first * second**power for power in itertools.count())
    else:
        while True:
            yield first
            first, second = second, first + second


def all_rules() -> list[Rule]:
    """Return every sequence there is: rising and falling sums, products, and sums of the two terms before."""
    return [
        *(("add", first, step) for first in range(1, 50) for step in range(-15, 16) if step),
        *(("multiply", first, factor) for first in range(1, 100) for factor in range(2, 7)),
        *(("fibonacci", first, second) for first in range(1, 40) for second in range(first + 1, 60)),
    ]


def first_terms(rule: Rule) -> list[str]:
    return [str(number) for number in itertools.islice(terms(rule), SHOWN + HELD_BACK)]


def make_row(rule: Rule) -> dict[str, str]:
    lines = [", ".join(first_terms(example)) for example in EXAMPLES]
    numbers = first_terms(rule)
    lines.append(f"{', '.join(numbers[:SHOWN])},")
    return {"prompt": "\n".join(lines), "answer": ", ".join(numbers[SHOWN:])}


def numbers_in(completion: str) -> list[str]:
    """Return the numbers at the start of the completion, up to the first thing that is neither number nor comma."""
    line = completion.partition("\n")[0].strip().rstrip(",.")
    numbers = [number.strip() for number in line.split(",")]
    return list(itertools.takewhile(lambda number: re.fullmatch(r"-?[0-9]{1,12}", number), numbers))


def continued(completion: str, answer: str) -> float:
    """Return the share of the hidden terms given in order before the first wrong one; more may follow."""
    right = answer.split(", ")
    pairs = zip(numbers_in(completion), right, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(right)


def all_right(completion: str, answer: str) -> float:
    """Return 1.0 where every term held back is there."""
    return float(continued(completion, answer) == 1)


def load_environment(num_train: int = 2000, num_eval: int = 200, seed: int = 0) -> vf.Environment:
    """Build the environment, with sampling arguments that stop at the end of the line.

    Args:
        num_train: training sequences.
        num_eval: evaluation sequences; none of them is a training sequence, and they do not depend on `num_train`.
        seed: chooses the sequences.

    Raises:
        vf.ConfigError: more sequences than there are.
    """
    rules = all_rules()
    if min(num_train, num_eval) < 1 or num_train + num_eval > len(rules):
        raise vf.ConfigError(
            f"num_train={num_train} and num_eval={num_eval} must be 1 or more, and at most {len(rules)} together."
        )
    random.Random(seed).shuffle(rules)
    rows = [make_row(rule) for rule in rules[: num_eval + num_train]]
    return vf.SingleTurnEnv(
        message_type="completion",
        dataset=rows[num_eval:],
        eval_dataset=rows[:num_eval],
        rubric=vf.Rubric(funcs=[continued, all_right], weights=[1.0, 0.0]),
        sampling_args={"max_tokens": 48, "stop": ["\n"]},
    )
