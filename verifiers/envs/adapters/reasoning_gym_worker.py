"""Scoring by a reasoning-gym task's own scorer: the functions that run in a worker process.

Some scorers hand the model's text to `eval` or to sympy's parser, which is `eval` too. A sandbox keeps such text
from the machine, but not from the scorer beside it, whose answer it could forge. So in front of those scorers text
is checked here: `eval` only reads literals, and a formula may hold numbers, names, operators and calls of
mathematical functions. What fails the check scores what an empty answer scores.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import io
import math
import re
from typing import Any

from verifiers.envs.adapters import tagged_json

__all__ = ["EVALUATING_TASKS", "FORMULA_TASKS", "is_formula", "open_scorer", "score", "score_in_worker"]

EVALUATING_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorers call `eval` on an answer, to read a list."""

FORMULA_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorers parse an answer with sympy."""

_MATHEMATICS = """
    Abs Add Ci Ei Eq Integer Integral Mul Ne Piecewise Pow Rational Si abs acos acosh acot acoth acsc asec asin asinh
    atan atan2 atanh binomial ceiling cos cosh cot coth csc csch erf erfi exp factorial floor gamma li log ln polylog
    sec sech sign sin sinh sqrt tan tanh
"""
_FUNCTIONS = frozenset(_MATHEMATICS.split())
_CALL = re.compile(r"(\w+)\s*\(")
_KEYWORD = re.compile(r"\b(?:lambda|for|if|else|import|yield|await|async|in|is|not|and|or)\b")
_FORBIDDEN = re.compile(r"""__|["'`\\;:@={}\[\]]|[\w)]\s*\.\s*[^\W\d]|\)\s*\(""")


def score(task: str, settings: str, entry: str, answer: str | None) -> dict[str, Any]:
    """The task's own score of an answer.

    Args:
        task: name of a reasoning-gym task.
        settings: its settings, without seed and size, as `tagged_json` text.
        entry: what the task yielded (question, answer, metadata), as `tagged_json` text.
        answer: what is scored; None where a completion has no answer.

    Returns:
        `score`, and `raised`: "" or the name of the exception that the scorer raised because of this answer, which
        then scores 0.

    Raises:
        Exception: the task or the entry cannot be opened, which no answer can be blamed for.
    """
    scorer = open_scorer(task, settings)
    whole_entry = tagged_json.loads(entry)
    if task in FORMULA_TASKS and answer is not None and not is_formula(answer):
        answer = ""
    try:
        value = float(scorer.score_answer(answer=answer, entry=whole_entry))
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        return {"score": 0.0, "raised": type(error).__name__}
    if not math.isfinite(value):
        return {"score": 0.0, "raised": "NotFinite"}
    return {"score": value, "raised": ""}


def score_in_worker(task: str, settings: str, entry: str, answer: str | None) -> dict[str, Any]:
    """`score`, in a process whose standard output may be closed: some scorers print."""
    with contextlib.redirect_stdout(io.StringIO()):
        return score(task, settings, entry, answer)


@functools.lru_cache(maxsize=128)
def open_scorer(task: str, settings: str) -> Any:
    """The task's dataset, of which only the scorer is used; opened once for each setting."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=0, size=10, **tagged_json.loads(settings))
    if task in EVALUATING_TASKS:
        # the module's own global is found before the builtin of that name
        vars(importlib.import_module(type(dataset).__module__))["eval"] = ast.literal_eval
    return dataset


def is_formula(text: str) -> bool:
    """True for text of numbers, names, operators and calls of mathematical functions alone."""
    if _FORBIDDEN.search(text) or _KEYWORD.search(text):
        return False
    return all(name in _FUNCTIONS or name.isdigit() for name in _CALL.findall(text))
