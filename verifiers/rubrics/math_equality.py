"""Comparison of mathematical answers: by their text where that decides, else by math-verify in a worker.

math-verify may run without end, or take gigabytes, on what a policy writes, so it never runs in this process. One
pool of workers serves all threads and event loops of the process.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import Any

from verifiers.errors import GradingError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.loop_thread import run_blocking
from verifiers.sandbox.worker_pool import WorkerPool

__all__ = ["MathVerdict", "answer_text", "exact_match", "math_verdict", "math_verdict_blocking"]

MAX_ANSWER_CHARS = 1000
TIMEOUT_S = 5.0
_EQUAL = "verifiers.rubrics.math_worker:equal"
_REMEMBERED = 4096


class MathVerdict(StrEnum):
    """The result of comparing an answer; only the first is worth a reward."""

    RIGHT = "right"
    WRONG = "wrong"
    TOO_LONG = "too_long"
    TIMED_OUT = "timed_out"
    DIED = "died"


async def math_verdict(
    answer: Any, response: Any, *, timeout_s: float = TIMEOUT_S, max_chars: int = MAX_ANSWER_CHARS
) -> MathVerdict:
    """Compare a response with the right answer.

    Args:
        answer: the right one: text, LaTeX or not, or a number.
        response: the policy's.
        timeout_s: how long math-verify may take, in seconds; waiting for a free worker does not count.
        max_chars: texts longer than this are compared as they stand, and never given to math-verify.

    Raises:
        GradingError: no worker could be started.
        WorkerCallError, ConfigError: math-verify cannot be used there, e.g. it is not installed.
    """
    expected, given = answer_text(answer), answer_text(response)
    verdict = exact_match(expected, given, max_chars)
    return verdict or await _by_worker(expected, given, timeout_s)


def math_verdict_blocking(
    answer: Any, response: Any, *, timeout_s: float = TIMEOUT_S, max_chars: int = MAX_ANSWER_CHARS
) -> MathVerdict:
    """Compare a response with the right answer, as `math_verdict`, without an event loop."""
    expected, given = answer_text(answer), answer_text(response)
    verdict = exact_match(expected, given, max_chars)
    return verdict or run_blocking(lambda: _by_worker(expected, given, timeout_s))


# -- by the text -----------------------------------------------------------------------------------------------------

_SPACES = re.compile(r"\s+")
_LOOSE = re.compile(r" ?([,()\[\]{}=<>^_]) ?")
_SIZING = re.compile(r"\\(?:left|right)(?![A-Za-z])")
_FRACTION_STYLE = re.compile(r"\\[dt]frac(?![A-Za-z])")
_WRAPPINGS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_INTEGER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)")
_DECIMAL = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)?\.\d+")
_RATIO = re.compile(r"([+-]?)(?:(\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\}|\\frac(\d)(\d))")


def exact_match(answer: str, response: str, max_chars: int = MAX_ANSWER_CHARS) -> MathVerdict | None:
    """Return the verdict where the texts decide it without algebra, else None.

    Right: the same text but for spacing and LaTeX's delimiters, or the same number (integers, also with commas,
    decimals, fractions of integers). Wrong: one of them is empty, or both are integers and differ.
    """
    if not answer or not response:
        return MathVerdict.WRONG
    if answer == response:
        return MathVerdict.RIGHT
    if max(len(answer), len(response)) > max_chars:
        return MathVerdict.TOO_LONG
    answer, response = _plain(answer), _plain(response)
    if answer == response:
        return MathVerdict.RIGHT if answer else MathVerdict.WRONG
    expected, given = _number(answer), _number(response)
    if expected is None or given is None:
        return None
    if expected == given:
        return MathVerdict.RIGHT
    integers = _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(response)
    # other numbers may still be equal as far as they are written out: math-verify rounds
    return MathVerdict.WRONG if integers else None


def answer_text(answer: Any) -> str:
    """Return an answer as text: floats written out without an exponent, None as an empty text."""
    if answer is None:
        return ""
    if isinstance(answer, float):
        return format(Decimal(repr(answer)), "f")
    return str(answer).strip()


def _plain(text: str) -> str:
    text = _unwrapped(text)
    text = _FRACTION_STYLE.sub(r"\\frac", _SIZING.sub("", text))
    return _LOOSE.sub(r"\1", _SPACES.sub(" ", text)).strip()


def _unwrapped(text: str) -> str:
    for opening, closing in _WRAPPINGS:
        inner = text[len(opening) : -len(closing)]
        if (
            text.startswith(opening)
            and text.endswith(closing)
            and len(text) > len(opening) + len(closing)
            and opening not in inner
            and closing not in inner
        ):
            return inner.strip()
    return text


def _number(text: str) -> Fraction | None:
    if _INTEGER.fullmatch(text) or _DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    top, bottom = [int(part) for part in ratio.groups()[1:] if part is not None]
    if bottom == 0:
        return None
    return Fraction(-top if ratio[1] == "-" else top, bottom)


# -- by a worker --------------------------------------------------------------------------------------------------


_verdicts: dict[tuple[str, str], MathVerdict] = {}
"""Newest verdicts of workers: rollouts of one prompt tend to give the same answers."""
_lock = threading.Lock()


def _pool() -> WorkerPool:
    with _lock:
        return _new_pool()


@functools.cache
def _new_pool() -> WorkerPool:
    # two at least, so that one slow answer does not block the others; they start when they are needed
    workers = min(8, max(2, os.cpu_count() or 1))
    return WorkerPool(workers=workers, timeout_s=TIMEOUT_S, preload=["verifiers.rubrics.math_worker"], name="maths")


async def _by_worker(answer: str, response: str, timeout_s: float) -> MathVerdict:
    known = _verdicts.get((answer, response))
    if known is not None:
        return known
    call = _pool().call
    for attempt in (1, 2):
        try:
            right = await call(_EQUAL, answer, response, timeout_s=timeout_s)
        except WorkerTimeoutError:
            return MathVerdict.TIMED_OUT
        except WorkerCallError as error:
            if error.kind != "MemoryError":
                raise
            return MathVerdict.DIED
        except WorkerError:
            # the first time it may be the machine's fault, which a right answer must not pay for
            if attempt == 2:
                return await _why_it_died()
        else:
            verdict = MathVerdict.RIGHT if right else MathVerdict.WRONG
            with _lock:
                _verdicts[answer, response] = verdict
                if len(_verdicts) > _REMEMBERED:
                    del _verdicts[next(iter(_verdicts))]
            return verdict
    raise AssertionError("the second attempt returns")


async def _why_it_died() -> MathVerdict:
    """Return DIED where workers answer other questions.

    Raises:
        GradingError: they answer none, so nothing is known about this one.
    """
    try:
        await _pool().call(_EQUAL, "\\frac{1}{2}", "0.5", timeout_s=60.0)
    except WorkerError as error:
        raise GradingError(f"Math answers cannot be compared: the workers fail even at 1/2 = 0.5: {error}") from error
    return MathVerdict.DIED
