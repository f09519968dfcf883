"""Messages of any kind: read whether they are dicts or objects, and turned into the one kind that states hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.types import AssistantMessage, MessageRecord, SystemMessage, ToolMessage, UserMessage

__all__ = ["as_message", "as_messages", "content_text", "joined", "message_field", "message_text"]

_KINDS: dict[Any, type[MessageRecord]] = {
    "assistant": AssistantMessage,
    "system": SystemMessage,
    "tool": ToolMessage,
    "user": UserMessage,
}


def message_field(message: Any, name: str, default: Any = None) -> Any:
    """A field of a message that is a dict (classic) or an object with attributes (openai's and pydantic's)."""
    if isinstance(message, Mapping):
        return message.get(name, default)
    return getattr(message, name, default)


def content_text(content: Any) -> str:
    """The text of a message's content: a string, None, or a list of OpenAI content parts.

    Parts that are not text (images, audio) count as empty.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, (list, tuple)):
        return "".join(part if isinstance(part, str) else message_field(part, "text") or "" for part in content)
    return str(content)


def message_text(message: Any) -> str:
    """The text of a message; a string is its own text."""
    return message if isinstance(message, str) else content_text(message_field(message, "content"))


def as_message(message: Any) -> MessageRecord:
    """The message as states hold it: a dict that answers to attributes too.

    Args:
        message: a dict, a pydantic object (its `model_dump` is taken, without what is None), another object with
            `role` and `content`, or a string, which a user says.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(message, MessageRecord):
        return message
    if isinstance(message, dict):
        return _KINDS.get(message.get("role"), MessageRecord)(message)
    if isinstance(message, str):
        return UserMessage(role="user", content=message)
    if isinstance(message, Mapping):
        return as_message(dict(message))
    dump = getattr(message, "model_dump", None)
    if callable(dump):
        fields = dump(exclude_none=True)
        if isinstance(fields, dict):
            # the key is expected also beside tool calls
            fields.setdefault("content", None)
            return as_message(fields)
    if hasattr(message, "role") and hasattr(message, "content"):
        return as_message({name: value for name, value in vars(message).items() if value is not None})
    raise TypeError(f"{message!r:.200} is no chat message; give a dict with 'role' and 'content'.")


def as_messages(messages: Any) -> Any:
    """A conversation as states hold it: a list of `as_message`, always a new one; a string is left as it is.

    One message by itself counts as a list of it, None as an empty one.
    """
    if isinstance(messages, str):
        return messages
    if messages is None:
        return []
    if isinstance(messages, (list, tuple)):
        return [as_message(message) for message in messages]
    return [as_message(messages)]


def joined(before: Any, after: Any) -> Any:
    """A conversation that goes on: messages after messages, or text after text in completion mode."""
    if isinstance(before, str):
        return before + (after if isinstance(after, str) else "".join(map(message_text, as_messages(after))))
    return before + as_messages([after] if isinstance(after, str) else after)
