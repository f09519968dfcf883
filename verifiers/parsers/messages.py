"""Reading messages, whether they are dicts or objects with attributes, whatever their content is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["content_text", "message_field", "message_text"]


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
