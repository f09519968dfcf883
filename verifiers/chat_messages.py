"""Chat messages as dicts in OpenAI's format, with attributes; the text in them; and how pages show them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from typing import Any

ChatMessage = dict[str, Any]
"""One message in OpenAI's format: role, content, and for assistants perhaps tool_calls, reasoning_content."""

Message = ChatMessage | str
"""One message, or a piece of text in completion mode."""

Messages = list[ChatMessage] | str
"""A conversation, or a plain string in completion mode."""


class Record(dict[str, Any]):
    """A dict whose keys are attributes too: both generations of the classic API read results in their own way."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {sorted(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


_MESSAGE_FIELDS = frozenset({
    "audio", "content", "function_call", "name", "reasoning_content", "refusal", "role", "tool_call_id", "tool_calls",
})  # fmt: skip


class MessageRecord(Record):
    """A chat message: a plain dict for JSON, tables and comparisons, whose fields are attributes too.

    `message.role`, `message.tool_calls[0].function.name`. Fields of OpenAI's messages that are absent read as None.
    Packages of the classic API from 0.1.11 on take messages for objects, those from before for dicts.
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return _readable(self, name)
        if name in _MESSAGE_FIELDS:
            return None
        raise AttributeError(f"a message has no field {name!r}; this one has {sorted(self)}")

    def __deepcopy__(self, memo: dict[int, Any]) -> MessageRecord:
        return type(self)({name: copy.deepcopy(value, memo) for name, value in self.items()})

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Return the message as plain nested data."""
        return {name: _dumped(value) for name, value in self.items() if not (exclude_none and value is None)}


class _Part(Record):
    """A dict inside a message. The name and arguments of a tool call are found where the second generation looks."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return _readable(self, name)
        function = self.get("function")
        if isinstance(function, Mapping) and name in function:
            return function[name]
        raise AttributeError(f"this part of a message has no field {name!r}; it has {sorted(self)}")


class ToolCall(_Part):
    """A tool call of an assistant message, in OpenAI's form; `ToolCall(id="...", name="...", arguments="{}")`."""

    def __init__(self, id: str = "", name: str = "", arguments: str = "{}") -> None:  # noqa: A002
        super().__init__(id=id, type="function", function={"name": name, "arguments": arguments})


def _readable(owner: dict[str, Any], name: str) -> Any:
    """Return a field whose dicts answer to attributes; they are put back, so that what is written to them stays."""
    value = owner[name]
    if type(value) is dict:
        value = owner[name] = _Part(value)
    elif type(value) is list:
        value[:] = [_part(item) if type(item) is dict else item for item in value]
    return value


def _part(fields: dict[str, Any]) -> _Part:
    kind = ToolCall if "function" in fields else _Part
    part = kind.__new__(kind)
    part.update(fields)
    return part


def _dumped(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _dumped(item) for name, item in value.items()}
    return [_dumped(item) for item in value] if isinstance(value, list) else value


class _MessageOfRole(MessageRecord):
    _role = ""

    def __init__(self, fields: Mapping[str, Any] | None = None, **more: Any) -> None:
        dict.__init__(self, fields or {}, **more)
        self.setdefault("role", self._role)


class SystemMessage(_MessageOfRole):
    """A message of role "system"; `SystemMessage(content="...")`."""

    _role = "system"


class UserMessage(_MessageOfRole):
    """A message of role "user"; `UserMessage(content="...")`."""

    _role = "user"


class AssistantMessage(_MessageOfRole):
    """A message of role "assistant"; `AssistantMessage(content="...")`."""

    _role = "assistant"


class ToolMessage(_MessageOfRole):
    """A message of role "tool"; `ToolMessage(content="...", tool_call_id="...")`."""

    _role = "tool"


_KINDS: dict[Any, type[MessageRecord]] = {
    "assistant": AssistantMessage,
    "system": SystemMessage,
    "tool": ToolMessage,
    "user": UserMessage,
}


def message_field(message: Any, name: str, default: Any = None) -> Any:
    """Return a field of a message that is a dict (classic) or an object with attributes (openai's and pydantic's)."""
    if isinstance(message, Mapping):
        return message.get(name, default)
    return getattr(message, name, default)


def content_text(content: Any) -> str:
    """Return the text of a message's content: a string, None, or a list of OpenAI content parts.

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
    """Return the text of a message; a string is its own text."""
    return message if isinstance(message, str) else content_text(message_field(message, "content"))


def as_message(message: Any) -> MessageRecord:
    """Return the message as states hold it: a dict that answers to attributes too.

    Args:
        message: a dict, a pydantic object (its `model_dump` is taken, without what is None), another object with
            `role` and `content`, or a string, which becomes a user message.

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
    raise TypeError(f"{message!r:.200} is not a chat message; give a dict with 'role' and 'content'.")


def as_messages(messages: Any) -> Any:
    """Return a conversation as states hold it: a list of `as_message`, always a new one; a string is left as it is.

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
    """Join two parts of a conversation: messages after messages, or text after text in completion mode."""
    if isinstance(before, str):
        return before + (after if isinstance(after, str) else "".join(map(message_text, as_messages(after))))
    return before + as_messages([after] if isinstance(after, str) else after)


def drop_none(value: Any) -> Any:
    """Return nested data without the dict entries that are None; list items stay, so that positions do."""
    if isinstance(value, Mapping):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    return [drop_none(item) for item in value] if isinstance(value, list) else value


# -- as a page shows them -----------------------------------------------------------------------------------------
#
# What a model or an environment wrote is untrusted: a message may be a number, a call may have no name. Nothing here
# raises for such data; it is shown as the JSON that it is.

MOST_CHARACTERS = 200_000
"""Characters of one text that the page holds; of longer ones the middle is left out, and that is said."""

_IMAGE_TYPES = (
    "data:image/png;base64,",
    "data:image/jpeg;base64,",
    "data:image/gif;base64,",
    "data:image/webp;base64,",
)
_MOST_IMAGE_CHARACTERS = 2_000_000


def messages_of(messages: Any, role: str) -> list[dict[str, Any]]:
    """Return messages as the page draws them; fields without content are left out.

    Args:
        messages: a list of chat messages, or a string in completion mode.
        role: given to a string.

    Returns:
        One dict a message: "role"; "text"; "think", the reasoning that a server reported beside it; "images", data
        URLs; "calls", a list of {"id", "name", "arguments"}; "answers", the id of the call that a tool answers.
    """
    if messages is None or messages == "":
        return []
    if isinstance(messages, list):
        return [_shown_message(message) for message in messages]
    return [{"role": role, "text": as_text(messages)}]


def as_text(value: Any) -> str:
    """Return a string as it is, None as "", anything else as JSON; cut in the middle where it is huge."""
    if isinstance(value, str):
        text = value
    elif value is None:
        text = ""
    elif type(value) is int:
        # example ids, in every row
        text = str(value)
    else:
        try:
            text = json.dumps(finite(value), ensure_ascii=False, indent=1, default=str)
        except RecursionError:
            text = "[nested too deeply to be shown]"
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out here ...]\n{text[-half:]}"


def finite(value: Any) -> Any:
    """Return nested data without NaN and infinities, which JSON in a browser does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _shown_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        return {"role": "?", "text": as_text(message)}
    text, images = _shown_content(message.get("content"))
    shown: dict[str, Any] = {"role": str(message.get("role", "?"))[:40], "text": as_text(text)}
    think = message.get("reasoning_content") or message.get("reasoning")
    if think:
        shown["think"] = as_text(think)
    if images:
        shown["images"] = images
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        shown["calls"] = [_shown_call(call) for call in calls]
    if message.get("tool_call_id") is not None:
        shown["answers"] = str(message["tool_call_id"])
    return shown


def _shown_content(content: Any) -> tuple[str, list[str]]:
    if not isinstance(content, list):
        return as_text(content), []
    texts, images = [], []
    for part in content:
        kind = str(part.get("type", "text")) if isinstance(part, Mapping) else "text"
        if not isinstance(part, Mapping):
            texts.append(as_text(part))
        elif "image" in kind:
            url = _image_url(part)
            if url.startswith(_IMAGE_TYPES) and len(url) <= _MOST_IMAGE_CHARACTERS:
                images.append(url)
            else:
                # a page that loads nothing cannot show a picture from elsewhere, but can say where it is
                texts.append(f"[image {url[:200]}]" if url else "[image]")
        elif part.get("text") is not None:
            texts.append(as_text(part["text"]))
        elif "audio" in kind:
            texts.append("[audio]")
        else:
            texts.append(as_text(dict(part)))
    return "\n\n".join(texts), images


def _image_url(part: Mapping[str, Any]) -> str:
    url = part.get("image_url")
    if isinstance(url, Mapping):
        url = url.get("url")
    return url if isinstance(url, str) else ""


def _shown_call(call: Any) -> dict[str, str]:
    if not isinstance(call, Mapping):
        return {"id": "", "name": "?", "arguments": as_text(call)}
    function = call.get("function")
    named = function if isinstance(function, Mapping) else call
    return {
        "id": str(call.get("id") or ""),
        "name": str(named.get("name") or "?")[:200],
        "arguments": as_text(named.get("arguments")),
    }
