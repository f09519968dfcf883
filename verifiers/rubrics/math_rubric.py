"""MathRubric: answers compared with the row's by `math_equality`."""

from __future__ import annotations

import functools
from collections.abc import MutableMapping, Sequence
from typing import Any

from verifiers.errors import ConfigError
from verifiers.parsers.parser import Parser, ThinkParser, extract_boxed_answer
from verifiers.rubrics.math_equality import MAX_ANSWER_CHARS, TIMEOUT_S, MathVerdict, answer_text, math_verdict
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.scoring import SingleFlight
from verifiers.types import RewardFunc


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

    correct_answer.reward_bounds = (0.0, 1.0)  # type: ignore[attr-defined]

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
