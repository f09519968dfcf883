"""The reward of R1-Zero-style training: a fixed format of thought and answer, and the answer's truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers.parsers.boxed import extract_boxed_answer
from verifiers.parsers.messages import message_text
from verifiers.parsers.parser import Parser
from verifiers.rubrics.math_equality import (
    MAX_ANSWER_CHARS,
    TIMEOUT_S,
    MathVerdict,
    math_verdict,
    math_verdict_blocking,
)
from verifiers.rubrics.rubric import Rubric

__all__ = ["r1_zero_reward", "r1_zero_rubric"]

_ANSWER_BEGINS = "</think> <answer>"
_ANSWER_ENDS = "</answer>"


def r1_zero_reward(
    response: str,
    ground_truth: Any,
    *,
    timeout_s: float = TIMEOUT_S,
    max_answer_chars: int = MAX_ANSWER_CHARS,
) -> dict[str, float]:
    r"""Score one response, outside of a rubric and without an event loop.

    The format asks for `</think> <answer>` (with exactly one space) and a `</answer>` after it. The answer is what
    stands between them, of the last such pair, or the last `\boxed{}` in it; it is compared as `MathRubric` does.

    Args:
        response: what the policy wrote.
        ground_truth: the right answer, or a list of answers each of which is right.
        timeout_s: how long one comparison may take, in seconds; what takes longer is wrong.
        max_answer_chars: a longer answer is right only where it is the right one character by character.

    Returns:
        {"format", "answer", "reward"}, each 0.0 or 1.0: unformatted 0, 0, 0; formatted but wrong 1, 0, 0; right
        1, 1, 1.

    Raises:
        GradingError: the workers that compare answers do not run.
    """
    given = _answer_in(response)
    right = given is not None and any(
        math_verdict_blocking(one, given, timeout_s=timeout_s, max_chars=max_answer_chars) is MathVerdict.RIGHT
        for one in _alternatives(ground_truth)
    )
    return {"format": float(given is not None), "answer": float(right), "reward": float(right)}


def r1_zero_rubric(
    *, timeout_s: float = TIMEOUT_S, max_answer_chars: int = MAX_ANSWER_CHARS, **kwargs: Any
) -> Rubric:
    """A rubric that scores rollouts by `r1_zero_reward`: its answer is the reward, its format a metric.

    Args:
        timeout_s, max_answer_chars: as for `r1_zero_reward`.
        **kwargs: as for `Rubric`, without funcs and weights.
    """

    async def r1_zero_answer(completion: Any, answer: Any, parser: Parser) -> float:
        given = _answer_in(_text_of(completion, parser))
        if given is None:
            return 0.0
        for one in _alternatives(answer):
            verdict = await math_verdict(one, given, timeout_s=timeout_s, max_chars=max_answer_chars)
            if verdict is MathVerdict.RIGHT:
                return 1.0
        return 0.0

    def r1_zero_format(completion: Any, parser: Parser) -> float:
        return float(_answer_in(_text_of(completion, parser)) is not None)

    return Rubric(funcs=[r1_zero_answer, r1_zero_format], weights=[1.0, 0.0], **kwargs)


def _answer_in(response: str) -> str | None:
    """The answer of a response that keeps the format, else None."""
    end = response.rfind(_ANSWER_ENDS)
    start = response.rfind(_ANSWER_BEGINS, 0, max(end, 0))
    if start < 0:
        return None
    return extract_boxed_answer(response[start + len(_ANSWER_BEGINS) : end]).strip()


def _text_of(completion: Any, parser: Parser) -> str:
    messages = parser.get_assistant_messages(completion)
    return message_text(messages[-1]) if messages else ""


def _alternatives(ground_truth: Any) -> Sequence[Any]:
    return ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
