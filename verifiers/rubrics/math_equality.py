"""Equality of two mathematical answers: by their text where that decides, else by math-verify in a worker.

math-verify may run without end, or take gigabytes, on what a policy writes, so it never runs in this process. One
pool of workers serves all threads and event loops of the process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import Any

from verifiers.errors import GradingError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.loop_thread import run_blocking
from verifiers.rubrics.scoring import waiting_turn
from verifiers.sandbox.worker_pool import WorkerPool

MAX_ANSWER_CHARS = 1000
TIMEOUT_S = 5.0
_EQUAL = "verifiers.rubrics.math_worker:equal"


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
    """Compare a policy's response with the right answer: text, LaTeX or not, or a number.

    Args:
        timeout_s: how long math-verify may take, in seconds; waiting for a free worker does not count.
        max_chars: texts longer than this are compared as they stand, and never given to math-verify.

    Raises:
        GradingError: no worker could be started.
        WorkerCallError, ConfigError: math-verify cannot be used there, e.g. it is not installed.
    """
    expected, given = answer_text(answer), answer_text(response)
    verdict = exact_match(expected, given, max_chars)
    return verdict or await _by_worker(_in_latex(expected), _in_latex(given), timeout_s)


def math_verdict_blocking(
    answer: Any, response: Any, *, timeout_s: float = TIMEOUT_S, max_chars: int = MAX_ANSWER_CHARS
) -> MathVerdict:
    """Compare a response with the right answer, as `math_verdict`, without an event loop."""
    expected, given = answer_text(answer), answer_text(response)
    verdict = exact_match(expected, given, max_chars)
    return verdict or run_blocking(lambda: _by_worker(_in_latex(expected), _in_latex(given), timeout_s))


# -- by the text -----------------------------------------------------------------------------------------------------

_SPACES = re.compile(r"\s+")
# a comma before three digits is a separator of thousands only where no space follows it
_LOOSE = re.compile(r" ?(,(?! \d{3}(?!\d))|[()\[\]{}=<>^_]) ?")
_SIZING = re.compile(r"\\(?:left|right)(?![A-Za-z])")
_FRACTION_STYLE = re.compile(r"\\[dt]frac(?![A-Za-z])")
_WRAPPINGS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
_INTEGER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)")
_DECIMAL = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)?\.\d+")
_RATIO = re.compile(r"([+-]?)(?:(\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\}|\\frac(\d)(\d))")


def exact_match(answer: str, response: str, max_chars: int = MAX_ANSWER_CHARS) -> MathVerdict | None:
    """Return the verdict where the texts decide it without algebra, else None.

    Right: the same text but for spacing and LaTeX's or Markdown's delimiters, or the same number (integers, also with
    commas, decimals, fractions of integers). Wrong: one of them is empty, or both are integers and differ.
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


_SYMBOLS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "°": r"^\circ",
        "€": r"\$",
        "£": r"\$",
        "²": "^2",
        "³": "^3",
        "½": r"\frac{1}{2}",
        "⅓": r"\frac{1}{3}",
        "⅔": r"\frac{2}{3}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
    }
)
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\\degrees?(?![A-Za-z])"), r"^\\circ"),
    (re.compile(r"√\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"√\s*(\d+(?:\.\d+)?|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"√"), r"\\sqrt"),
    (re.compile(r"\*\*"), "^"),
    # 10\,000 and 10,\!000; 10{,}000; 1 000
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|,\\!)(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<=\d)\{,\}(?=\d{3}(?!\d))"), ","),
    (re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d.]*\d)"), lambda found: found[0].replace(" ", "")),
    # 3 1/2; 1e5; 2. and 2;
    (re.compile(r"(?<![\w.])(\d+) (\d+)/(\d+)(?![\d/])"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]\+?(-?\d+)(?![\w.])"), r"\1 \\times 10^{\2}"),
    (re.compile(r"(?<=\d)(?:[.,;]|\\\\)(?=}?$)"), ""),
)


def _in_latex(text: str) -> str:
    """Return a text with symbols and numbers, as models write them, in the form that math-verify reads."""
    text = _unwrapped(text).translate(_SYMBOLS)
    for pattern, written in _REWRITES:
        text = pattern.sub(written, text)
    return text.strip()


def _plain(text: str) -> str:
    text = _in_latex(text)
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
            return _unwrapped(inner.strip())
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


_POOL = WorkerPool(
    # two at least, so that one slow answer does not block the others; they start when they are needed
    workers=min(8, max(2, os.cpu_count() or 1)),
    timeout_s=TIMEOUT_S,
    preload=["verifiers.rubrics.math_worker"],
    name="maths",
)


async def _by_worker(answer: str, response: str, timeout_s: float) -> MathVerdict:
    for _ in range(2):
        try:
            with waiting_turn() as begun:
                is_equal = await _POOL.call(_EQUAL, answer, response, timeout_s=timeout_s, begun=begun)
            return MathVerdict.RIGHT if is_equal else MathVerdict.WRONG
        except WorkerTimeoutError:
            return MathVerdict.TIMED_OUT
        except WorkerCallError as error:
            if error.kind != "MemoryError":
                raise
            return MathVerdict.DIED
        except WorkerError:
            # the first time it may be the machine's fault, which a right answer must not pay for
            continue
    try:
        await _POOL.call(_EQUAL, "\\frac{1}{2}", "0.5", timeout_s=60.0)
    except WorkerError as error:
        # they answer no other question either, so nothing is known about this one
        raise GradingError(f"Math answers cannot be compared: the workers fail even at 1/2 = 0.5: {error}") from error
    return MathVerdict.DIED
