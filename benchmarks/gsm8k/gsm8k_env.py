r"""GSM8K as an environment: 7,473 problems to train on, 1,319 to evaluate on, one turn, right or wrong.

An answer is the number after the last `####`, else that in the last `\boxed{...}`; a completion with neither has none
and is worth 0. Numbers are compared as numbers, without `$`, `%` and the commas of thousands.

`synthetic=True` makes ten problems to train on and ten to evaluate on in GSM8K's format, without network, for a
small model of characters. They show that everything runs, and measure nothing.
"""

from __future__ import annotations

import re
import sys
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import verifiers as vf

sys.path.insert(0, str(Path(__file__).parents[1] / "training_faults"))
from grades import Grades

__all__ = ["load_environment", "number_in", "same_number", "synthetic_problems"]

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
    synthetic: bool = False,
    num_train: int = -1,
    num_eval: int = -1,
    grades: str | None = None,
    fail_share: float = 0.0,
    seed: int = 0,
) -> vf.Environment:
    """Build the environment.

    Args:
        synthetic: the ten made-up problems; else GSM8K, from the Hugging Face hub or its cache.
        num_train: training problems; all of them by default.
        num_eval: eval problems; all of them by default.
        grades: file to which the true reward of each training rollout is appended.
        fail_share: share of the training rollouts whose grade fails, for the fault row; needs `grades`.
        seed: of the choice of problems, and of the grades that fail.

    Raises:
        vf.ConfigError: `fail_share` without `grades`, or not from 0 to below 1.
    """
    if not 0 <= fail_share < 1:
        raise vf.ConfigError(f"fail_share is {fail_share!r}, but it must be from 0 to below 1, such as 0.05.")
    if fail_share and grades is None:
        raise vf.ConfigError(f"fail_share is {fail_share!r}, so give grades too: the file for the true rewards.")
    noted = Grades(grades, fail_share=fail_share, seed=seed) if grades is not None else None
    train: Any
    eval_rows: Any
    if synthetic:
        rows = synthetic_problems()
        train, eval_rows = rows[SYNTHETIC:], rows[:SYNTHETIC]
    else:
        train = vf.load_example_dataset("gsm8k", split="train", n=num_train, seed=seed)
        eval_rows = vf.load_example_dataset("gsm8k", split="test", n=num_eval, seed=seed)
    asked = {row["question"] for row in train}

    def correct(prompt: Any, completion: Any, answer: str) -> float:
        """Reward the right number with 1.0; in a run with faults, training grades are noted and may fail."""
        reward = float(same_number(number_in(completion[-1]["content"]), answer))
        question = prompt[-1]["content"]
        return noted.reward(question, reward) if noted is not None and question in asked else reward

    return vf.SingleTurnEnv(
        dataset=train,
        eval_dataset=eval_rows,
        system_prompt=None if synthetic else SYSTEM_PROMPT,
        rubric=vf.Rubric(funcs=[correct]),
    )
