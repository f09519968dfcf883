"""A penalty for completions that come near the token limit, and their length as a metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifiers.errors import ConfigError, GradingError
from verifiers.parsers.messages import message_field
from verifiers.types import State

__all__ = ["completion_tokens", "overlong_penalty"]


def overlong_penalty(*, max_tokens: int, buffer_tokens: int) -> Callable[..., float]:
    """A reward function that punishes length softly before the limit cuts it off: from 0 down to -1.

    0 up to `max_tokens - buffer_tokens` tokens, then linearly down to -1 at `max_tokens`, and -1 beyond. It is the
    soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.4, equation 13), where the two are
    called L_max and L_cache. Tokens are counted as `completion_tokens` does.

    Args:
        max_tokens: where the penalty is whole, in tokens of all the policy's answers in a rollout; for one turn the
            sampling argument of that name.
        buffer_tokens: how far before it the penalty begins, in tokens.

    Raises:
        ConfigError: not 0 < buffer_tokens <= max_tokens.
    """
    if not 0 < buffer_tokens <= max_tokens:
        raise ConfigError(
            f"An overlong penalty needs 0 < buffer_tokens <= max_tokens, but buffer_tokens={buffer_tokens!r} and "
            f"max_tokens={max_tokens!r}."
        )

    def overlong_penalty(state: State, **_: Any) -> float:
        over = completion_tokens(state) - (max_tokens - buffer_tokens)
        return -min(1.0, max(0.0, over / buffer_tokens))

    return overlong_penalty


def completion_tokens(state: State, **_: Any) -> float:
    """The tokens that the policy sampled in a rollout, over all its answers; a metric, or part of a reward.

    Counted from an answer's token ids where the server sent them, else from its log-probs, else from its `usage`.

    Raises:
        GradingError: the state has no answers, or one that says nothing about its length.
    """
    responses = state.get("responses") or [message_field(step, "response") for step in state.get("trajectory") or ()]
    if not responses:
        raise GradingError("the state has no responses, so the completion's length in tokens is unknown")
    steps = list(state.get("trajectory") or ())
    aligned = steps if len(steps) == len(responses) else [None] * len(responses)
    return float(sum(_tokens_of(response, step) for response, step in zip(responses, aligned, strict=True)))


def _tokens_of(response: Any, step: Any) -> int:
    choices = message_field(response, "choices") or [None]
    choice = choices[0]
    tokens = message_field(step, "tokens")
    logprobs = message_field(choice, "logprobs")
    counted = (
        _length(message_field(choice, "token_ids")),
        _length(message_field(tokens, "completion_ids")),
        _length(message_field(logprobs, "content")),
        _length(message_field(logprobs, "token_logprobs")),
    )
    for length in counted:
        if length is not None:
            return length
    reported = message_field(message_field(response, "usage"), "completion_tokens")
    # usage counts all choices of a response together
    if isinstance(reported, int) and len(choices) == 1:
        return reported
    raise GradingError(
        "a response has neither token ids, log-probs nor usage.completion_tokens, so its length is unknown"
    )


def _length(values: Any) -> int | None:
    return len(values) if isinstance(values, Sequence) and not isinstance(values, str) else None
