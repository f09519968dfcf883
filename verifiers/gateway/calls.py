"""One call of an agent, apart from the wire format it came in, its JSON body, and the refusal that may answer it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import web

__all__ = [
    "MAX_VALUES",
    "SAMPLING_ARGUMENTS",
    "AgentCall",
    "RefusedCallError",
    "json_bytes",
    "json_object",
    "json_response",
    "openai_error",
]

SAMPLING_ARGUMENTS = frozenset(
    {
        "bad_words", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs", "min_p", "min_tokens",
        "presence_penalty", "prompt_logprobs", "repetition_penalty", "return_token_ids", "seed", "stop_token_ids",
        "temperature", "top_k", "top_logprobs", "top_p", "typical_p",
    }
)  # fmt: skip
"""Arguments that decide what is sampled and what is told of it. Of a trained call, the run's are sent instead."""


MAX_VALUES = 200_000
"""Most values in the body of one call, those of all its objects and lists together."""

# a run of strings is one match, and so is one without an end: what is in them counts nothing
_STRUCTURE = re.compile(r'(?:"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)[^"\[{,]*+)++|[\[{,]', re.DOTALL)


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


def json_object(raw: bytes) -> dict[str, Any]:
    """Return a body as an object.

    Raises:
        RefusedCallError: it is not a JSON object, or has more than `MAX_VALUES`, which would hold up other sessions.
    """
    try:
        text = raw.decode("utf-8-sig", "surrogatepass")
        _refuse_many_values(text)
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedCallError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedCallError("the body is not a JSON object.")
    return body


def _refuse_many_values(text: str) -> None:
    # each value follows a comma or the bracket of what it is in
    if sum(map(text.count, "[{,")) <= MAX_VALUES:
        return
    outside_strings = (match for match in _STRUCTURE.finditer(text) if text[match.start()] != '"')
    if next(itertools.islice(outside_strings, MAX_VALUES, None), None) is not None:
        said = f"the body has more than {MAX_VALUES:,} values; send fewer messages."
        raise RefusedCallError(said, status=413, code="request_too_large")


def json_bytes(data: Any) -> bytes:
    """Return data as JSON in UTF-8; half of a surrogate pair, which models do write, is escaped."""
    try:
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return data as the body of an answer."""
    from aiohttp import web

    return web.Response(body=json_bytes(data), status=status, headers=headers, content_type="application/json")


def openai_error(refusal: RefusedCallError) -> dict[str, Any]:
    """Return a refusal as OpenAI's error object."""
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    return {"error": {"message": str(refusal), "type": kind, "param": None, "code": refusal.code}}
