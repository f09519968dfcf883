"""MathRubric, and the comparison it scores by: answers are compared by their text, else by math-verify in a worker.

math-verify may run without end, or take gigabytes, on what a policy writes, so it never runs in this process. One
pool of workers serves all threads and event loops of the process.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import MutableMapping, Sequence
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from typing import Any

from verifiers.errors import ConfigError, GradingError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.parsers.parser import Parser, ThinkParser, extract_boxed_answer
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.scoring import SingleFlight
from verifiers.sandbox.worker_pool import WorkerPool
from verifiers.types import RewardFunc

__all__ = ["MathRubric", "MathVerdict", "answer_text", "exact_match", "math_verdict"]

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


class MathRubric(Rubric):
    """A reward of 1.0 where the parsed answer equals the row's `answer` by math-verify, and else 0.0.

    Most answers are decided by their text (the same text, the same number, two integers that differ); the others by
    math-verify in a pool of worker processes that every MathRubric shares. It may be used from any thread and any
    event loop.

    Its functions are `correct_answer` (weight 1) and the metrics `math_timeout` and `math_worker_died` (weight 0):
    an answer that cannot be compared in time, or that ends its worker, as one does which takes all its memory,
    was looked at and is worth 0.0; it is not a failed grade. Workers that do not run at all are one.

    Args:
        funcs: further reward functions, before its own.
        weights: one for each of `funcs`.
        parser: finds the answer in a completion; default `ThinkParser(extract_boxed_answer)`, to which a completion
            without `</think>` has no answer.
        timeout_s: how long one comparison may take, in seconds.
        max_answer_chars: a longer answer is right only where it is the row's, character by character.
        **kwargs: as for `Rubric`.

    Raises:
        ConfigError: `timeout_s` or `max_answer_chars` is not above 0.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        max_answer_chars: int = MAX_ANSWER_CHARS,
        **kwargs: Any,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("max_answer_chars", max_answer_chars)):
            if value <= 0:
                raise ConfigError(f"A MathRubric's {name} must be above 0, but is {value!r}.")
        parser = parser if parser is not None else ThinkParser(extract_fn=extract_boxed_answer)
        super().__init__(funcs=funcs, weights=weights, parser=parser, **kwargs)
        self.timeout_s = timeout_s
        self.max_answer_chars = max_answer_chars
        self._comparisons = SingleFlight()
        self.add_reward_func(self.correct_answer)
        self.add_metric(self.math_timeout)
        self.add_metric(self.math_worker_died)

    async def correct_answer(
        self, parser: Parser, completion: Any, answer: Any, state: Any = None, **_: Any
    ) -> float:
        """Reward an answer that equals the row's with 1.0, any other with 0.0."""
        return float(await self._verdict(parser, completion, answer, state) is MathVerdict.RIGHT)

    async def math_timeout(self, parser: Parser, completion: Any, answer: Any, state: Any = None, **_: Any) -> float:
        """Return 1.0 for an answer that could not be compared within `timeout_s`."""
        return float(await self._verdict(parser, completion, answer, state) is MathVerdict.TIMED_OUT)

    async def math_worker_died(
        self, parser: Parser, completion: Any, answer: Any, state: Any = None, **_: Any
    ) -> float:
        """Return 1.0 for an answer whose comparison ended its worker, e.g. by taking all its memory."""
        return float(await self._verdict(parser, completion, answer, state) is MathVerdict.DIED)

    async def _verdict(self, parser: Parser, completion: Any, answer: Any, state: Any) -> MathVerdict:
        """Return the verdict on a completion, found once for all functions and kept in `state["math_verdict"]`."""
        expected, response = answer_text(answer), answer_text(parser.parse_answer(completion))
        noted = state.get("math_verdict") if isinstance(state, MutableMapping) else None
        if isinstance(noted, dict) and (noted.get("answer"), noted.get("response")) == (expected, response):
            return MathVerdict(noted["verdict"])
        compare = functools.partial(
            math_verdict, expected, response, timeout_s=self.timeout_s, max_chars=self.max_answer_chars
        )
        verdict = await self._comparisons.result((id(state), expected, response), compare)
        if isinstance(state, MutableMapping):
            state["math_verdict"] = {"answer": expected, "response": response, "verdict": verdict.value}
        return verdict


# -- comparison ------------------------------------------------------------------------------------------------------


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
    return verdict or await _by_worker(expected, given, timeout_s)


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


_starting = threading.Lock()


def _pool() -> WorkerPool:
    with _starting:
        return _new_pool()


@functools.cache
def _new_pool() -> WorkerPool:
    # two at least, so that one slow answer does not block the others; they start when they are needed
    workers = min(8, max(2, os.cpu_count() or 1))
    return WorkerPool(workers=workers, timeout_s=TIMEOUT_S, preload=["verifiers.rubrics.math_worker"], name="maths")


async def _by_worker(answer: str, response: str, timeout_s: float) -> MathVerdict:
    for _ in range(2):
        try:
            is_equal = await _pool().call(_EQUAL, answer, response, timeout_s=timeout_s)
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
        await _pool().call(_EQUAL, "\\frac{1}{2}", "0.5", timeout_s=60.0)
    except WorkerError as error:
        # they answer no other question either, so nothing is known about this one
        raise GradingError(f"Math answers cannot be compared: the workers fail even at 1/2 = 0.5: {error}") from error
    return MathVerdict.DIED
