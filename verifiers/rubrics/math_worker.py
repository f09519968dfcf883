"""Equality of two mathematical expressions by math-verify. Imported in worker processes only.

Importing it takes half a second and warms math-verify up, so that each call, which runs in a fork of the worker,
finds its parsers ready. math-verify's own time limits are signals that only work in a main thread; they are
switched off, for the worker is killed at the deadline.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import math_verify
import sympy

_DIFFERENCE = sympy.Float("1e-5")

for _name in ("math_verify", "latex2sympy2_extended"):
    # switching the limits off is intended, and a worker's log is not read
    logging.getLogger(_name).setLevel(logging.CRITICAL)


def equal(answer: str, response: str) -> bool:
    """Return whether math-verify finds two answers equal; an answer that it cannot read equals nothing.

    Args:
        answer: the right one; the comparison is not symmetric.
        response: the policy's.

    Raises:
        MemoryError: the comparison needs more than there is.
    """
    expected, given = _expressions(answer), _expressions(response)
    return any(_same(one, other) for one, other in itertools.product(expected, given))


def _expressions(text: str) -> list[Any]:
    try:
        found: list[Any] = math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True)
        return found
    except MemoryError:
        raise
    except Exception:
        return []


def _same(one: Any, other: Any) -> bool:
    try:
        is_equal = math_verify.verify(one, other, timeout_seconds=None, raise_on_error=True)
        return bool(is_equal) and _same_digits(sorted(_numbers(one)), sorted(_numbers(other)))
    except MemoryError:
        raise
    except Exception:
        return False


def _same_digits(ones: list[sympy.Float], others: list[sympy.Float]) -> bool:
    """Return whether numbers agree in five digits: to math-verify, which rounds to six decimals, small ones are 0."""
    pairs = zip(ones, others, strict=False)
    return len(ones) != len(others) or all(abs(x - y) <= _DIFFERENCE * max(abs(x), abs(y)) for x, y in pairs)


def _numbers(found: Any) -> list[sympy.Float]:
    """Return the real numbers that an expression, or a set, an interval or a matrix of them, consists of."""
    if isinstance(found, sympy.Eq):
        return _numbers(found.rhs)
    if isinstance(found, sympy.Interval):
        found = (found.start, found.end)
    if isinstance(found, (sympy.FiniteSet, sympy.Tuple, sympy.MatrixBase, tuple, list)):
        return [number for part in found for number in _numbers(part)]
    if isinstance(found, sympy.Expr) and found.is_number and found.is_real and found.is_finite:
        return [sympy.Float(sympy.N(found, 15))]
    return []


_WARM_UP = (
    ("\\frac{1}{2}", "0.5"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\{1, 2\\}", "[0, 1)"),
    ("\\frac{7}{3} + x", "x + 2"),
    ("x^2 + x", "x = 2"),
)
for _one, _other in _WARM_UP:
    equal(_one, _other)
