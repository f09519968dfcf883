"""One call of an agent, apart from the wire format it came in; its body, its refusal, and what the formats share."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger("verifiers.gateway")

SAMPLING_ARGUMENTS = frozenset(
    {
        "bad_words", "frequency_penalty", "ignore_eos", "logit_bias", "logprobs", "min_p", "min_tokens",
        "presence_penalty", "prompt_logprobs", "repetition_penalty", "return_token_ids", "seed", "stop_token_ids",
        "temperature", "top_k", "top_logprobs", "top_p", "typical_p",
    }
)  # fmt: skip
"""Arguments that decide what is sampled and what is told of it. Of a trained call, the run's are sent instead."""


MAX_VALUES = 200_000
"""Most values in the body of one call; commas and brackets in its texts count, too."""

PIECE = 48
"""Characters in one event of a streamed answer."""


class RefusedCallError(Exception):
    """A call that is not answered.

    Attributes:
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
    """A call, in the terms of chat or text completions, as the agent asked for it."""

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
        # each value follows a comma or the bracket of what it is in
        if sum(map(text.count, "[{,")) > MAX_VALUES:
            said = f"the body has more than {MAX_VALUES:,} values; send fewer messages."
            raise RefusedCallError(said, status=413, code="request_too_large")
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedCallError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RefusedCallError("the body is not a JSON object.")
    return body


def _json_bytes(data: Any) -> bytes:
    """Return data as JSON in UTF-8; half of a surrogate pair, which models do write, is escaped, and NaN is null."""
    try:
        return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        readable = json.loads(json.dumps(data), parse_constant=lambda name: None)
        return json.dumps(readable, separators=(",", ":")).encode()


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    from aiohttp import web

    return web.Response(body=_json_bytes(data), status=status, headers=headers, content_type="application/json")


def validated_body(adapter: TypeAdapter[Any], body: Mapping[str, Any], **replaced: Any) -> dict[str, Any]:
    """Return a body as the SDK's type of calls that do not stream reads it.

    Fields that are checked apart are `replaced` by a value that passes.
    """
    if not isinstance(body.get("stream"), (bool, type(None))):
        raise RefusedCallError("stream: give true or false.")
    given = {name: value for name, value in body.items() if value is not None}
    checked: dict[str, Any] = validated(adapter, {**given, "stream": False, **replaced})
    return checked


def validated(adapter: TypeAdapter[Any], value: Any, name: str = "") -> Any:
    """Return a value as the SDK's types read it, lists of it included."""
    try:
        return _materialized(adapter.validate_python(value))
    except RecursionError:
        raise RefusedCallError(f"{name or 'the body'} is nested too deep.") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in ((name,) if name else ()) + first["loc"])
        raise RefusedCallError(f"{place or 'the body'}: {first['msg']}") from None


def _materialized(value: Any) -> Any:
    # SDKs type lists as iterables, which pydantic checks when they are read
    if isinstance(value, dict):
        return {name: _materialized(item) for name, item in value.items()}
    if isinstance(value, (str, bytes, int, float, BaseModel)) or value is None:
        return value
    if isinstance(value, Iterable):
        return [_materialized(item) for item in value]
    return value


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a chat message, under either of the names that servers give it."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without its null fields, which SDKs repeat from what they were answered."""
    return {name: item for name, item in value.items() if item is not None}


def refuse_unsupported(body: Mapping[str, Any], known: Iterable[str], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse fields that would change the answer and cannot be honoured.

    `neutral` has the values of further fields that ask for what is done anyway.
    """
    for name, value in body.items():
        if value is None or name in known or value in neutral.get(name, ()):
            continue
        raise RefusedCallError(
            f"{name}={value!r:.100} is not supported here; leave it out.", code="unsupported_value"
        )


def joined_text(parts: Any, kinds: Collection[str]) -> Any:
    """Return parts that are all text as one string, as a chat template joins them; anything else as it is."""
    if isinstance(parts, list) and all(isinstance(part, dict) and part.get("type") in kinds for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


@functools.lru_cache(maxsize=100)
def note_left_out(what: str) -> None:
    """Say once that an agent's calls go to the policy without something that its provider would run."""
    logger.warning("%s are left out: the provider's own servers run them, or its models alone know them", what)


def one_system_message(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with all system messages as one at the start, as vLLM does: many templates know no other."""
    given = [dict(message) for message in messages]
    system = [message["content"] for message in given if message["role"] == "system"]
    rest = [message for message in given if message["role"] != "system"]
    return [{"role": "system", "content": joined_contents(system)}, *rest] if system else rest


def joined_contents(contents: Sequence[Any]) -> Any:
    """Return the contents of several messages as that of one: texts apart by an empty line, or the parts of all."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts = [[{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents]
    return [part for content in parts for part in content]


def text_pieces(text: str) -> Iterator[str]:
    """Return a text in the pieces in which it is streamed."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]


def data_event(data: Any) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + _json_bytes(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event named by its data's type."""
    return f"event: {data['type']}\n".encode() + data_event(data)
