"""Shared parts of the gateway's wire formats: reading a body by the SDK's own types, and writing events."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from pydantic import BaseModel, TypeAdapter, ValidationError

from verifiers.gateway.calls import AgentCall, RefusedCallError, json_bytes
from verifiers.gateway.session import Session

__all__ = [
    "WireFormat",
    "data_event",
    "joined_text",
    "named_event",
    "reasoning_of",
    "refuse_unsupported",
    "text_pieces",
    "validated",
    "validated_body",
    "without_none",
]

PIECE = 48
"""Characters in one event of a streamed answer."""


class WireFormat(Protocol):
    """One route's dialect."""

    keep_alive: bytes
    """Sent while an answer that is to be streamed is generated."""

    def read(self, body: Any, session: Session) -> AgentCall:
        """Return a request's body as a call.

        Raises:
            RefusedCallError: it is malformed, or asks for what cannot be had.
        """
        ...

    def answer(self, completion: Mapping[str, Any], call: AgentCall, session: Session) -> dict[str, Any]:
        """Return a chat or text completion in the dialect."""
        ...

    def events(self, answer: Mapping[str, Any], call: AgentCall) -> Iterator[bytes]:
        """Return a whole answer as the events of a stream."""
        ...

    def error(self, refusal: RefusedCallError) -> dict[str, Any]:
        """Return the body of a refusal."""
        ...

    def error_event(self, refusal: RefusedCallError) -> bytes:
        """Return a refusal as an event, for a stream that has begun."""
        ...


def validated_body(adapter: TypeAdapter[Any], body: Mapping[str, Any], **replaced: Any) -> dict[str, Any]:
    """Return a body as the SDK's type of calls that do not stream reads it.

    Args:
        replaced: fields that are checked apart, with a value that passes.

    Raises:
        RefusedCallError: with the first thing that is wrong, and where.
    """
    if not isinstance(body.get("stream"), (bool, type(None))):
        raise RefusedCallError("stream: give true or false.")
    given = {name: value for name, value in body.items() if value is not None}
    checked: dict[str, Any] = validated(adapter, {**given, "stream": False, **replaced})
    return checked


def validated(adapter: TypeAdapter[Any], value: Any, name: str = "") -> Any:
    """Return a value as the SDK's types read it, lists of it included.

    Raises:
        RefusedCallError: with the first thing that is wrong, and where.
    """
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

    Args:
        known: fields that are read, or that change nothing.
        neutral: further fields, with the values that ask for what is done anyway.

    Raises:
        RefusedCallError: with the field and its value.
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


def text_pieces(text: str) -> Iterator[str]:
    """Return a text in the pieces in which it is streamed."""
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]


def data_event(data: Any) -> bytes:
    """Return a server-sent event without a name."""
    return b"data: " + json_bytes(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event named by its data's type."""
    return f"event: {data['type']}\n".encode() + data_event(data)
