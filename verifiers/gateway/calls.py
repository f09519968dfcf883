"""One call of an agent, apart from the wire format it came in, and the refusal that may answer it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SAMPLING_ARGUMENTS", "AgentCall", "RefusedCallError"]

SAMPLING_ARGUMENTS = frozenset(
    {
        "bad_words", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs", "min_p", "min_tokens",
        "presence_penalty", "prompt_logprobs", "repetition_penalty", "return_token_ids", "seed", "stop_token_ids",
        "temperature", "top_k", "top_logprobs", "top_p", "typical_p",
    }
)  # fmt: skip
"""Arguments that decide what is sampled and what is told of it. Of a trained call, the run's are sent instead."""


class RefusedCallError(Exception):
    """A call that is not answered.

    Attributes:
        status: of the HTTP answer.
        code: OpenAI's name for the cause, such as "context_length_exceeded".
    """

    def __init__(self, text: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code

    @property
    def ends_rollout(self) -> bool:
        """True where an agent that stops at it was cut off, and did not fail."""
        return self.code in ("budget_exceeded", "context_length_exceeded")


@dataclass(frozen=True, slots=True)
class AgentCall:
    """A call, in the terms of chat or text completions.

    Attributes:
        path: `CHAT` or `COMPLETIONS`.
        model: that the agent asked for.
        arguments: of `create`, without the model and the sampling.
        sampling: the sampling arguments that the agent asked for.
        max_tokens: that the agent asked for.
        stream: the answer is wanted as server-sent events.
        echo: what the wire format repeats in its answer.
    """

    path: str
    model: str
    arguments: Mapping[str, Any]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stream: bool = False
    echo: Mapping[str, Any] = field(default_factory=dict)
