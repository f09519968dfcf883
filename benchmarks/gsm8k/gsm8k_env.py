r"""GSM8K as an environment: 7,473 problems to train on, 1,319 to evaluate on, one turn, right or wrong.

An answer is the number after the last `####`, else that in the last `\boxed{...}`; a completion with neither has none
and is worth 0. Numbers are compared as numbers, without `$`, `%` and the commas of thousands.

`synthetic=True` makes ten problems to train on and ten to evaluate on in GSM8K's format, without network, for a
small model of characters. They show that everything runs, and measure nothing.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

import verifiers as vf

SYSTEM_PROMPT = 'Solve the problem step by step, and end with the answer as a number after "####".'
SYNTHETIC = 10
_NAMES = ("Amy", "Ben", "Eva", "Ida", "Leo", "Mia", "Ned", "Ola", "Sam", "Tom")


def number_in(completion: str) -> str | None:
    r"""Return the answer of a completion: after the last `####`, else in the last `\boxed{...}`; None without any."""
    if "####" in completion:
        after = completion.rsplit("####", 1)[1].strip()
        return after.splitlines()[0] if after else None
    return vf.extract_boxed_answer(completion, strict=True) or None


def same_number(said: str | None, answer: str) -> bool:
    """Return True where both are the same number."""
    left, right = _number(said or ""), _number(answer)
    return left is not None and left == right


def _number(text: str) -> Decimal | None:
    # what follows the number, such as a unit, is ignored; a fraction is none
    found = re.match(r"\\?\$?\s*([-+]?[\d,]*\.?\d+)(?![\d/])", text.strip())
    try:
        return Decimal(found[1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def synthetic_problems() -> list[dict[str, str]]:
    """Return twenty problems with answers of one digit; the first ten are the eval set."""
    rows = []
    for is_eval in (True, False):
        for place, name in enumerate(_NAMES):
            have, more = 1 + place % 4, (2 if is_eval else 3) + place % 3
            question = f"{name} has {have} and gets {more}. Sum?"
            rows.append({"question": question, "answer": str(have + more)})
    return rows


def load_environment(
    synthetic: bool = False, num_train: int = -1, num_eval: int = -1, seed: int = 0
) -> vf.Environment:
    """Build the environment.

    Args:
        synthetic: the ten made-up problems; else GSM8K, from the Hugging Face hub or its cache.
        num_train: training problems; all of them by default.
        num_eval: eval problems; all of them by default.
        seed: of the choice of problems.
    """
    train: Any
    eval_rows: Any
    if synthetic:
        rows = synthetic_problems()
        train, eval_rows = rows[SYNTHETIC:], rows[:SYNTHETIC]
    else:
        train = vf.load_example_dataset("gsm8k", split="train", n=num_train, seed=seed)
        eval_rows = vf.load_example_dataset("gsm8k", split="test", n=num_eval, seed=seed)

    def correct(completion: Any, answer: str) -> float:
        """Reward the right number with 1.0."""
        return float(same_number(number_in(completion[-1]["content"]), answer))

    return vf.SingleTurnEnv(
        dataset=train,
        eval_dataset=eval_rows,
        system_prompt=None if synthetic else SYSTEM_PROMPT,
        rubric=vf.Rubric(funcs=[correct]),
    )
