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

__all__ = ["equal"]

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
        return bool(math_verify.verify(one, other, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:
        return False


_WARM_UP = (
    ("\\frac{1}{2}", "0.5"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\{1, 2\\}", "[0, 1)"),
    ("\\frac{7}{3} + x", "x + 2"),
    ("x^2 + x", "x = 2"),
)
for _one, _other in _WARM_UP:
    equal(_one, _other)
