"""Checking the messages and tools of a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers_embedded.errors import ApiError
from verifiers_embedded.fields import short, typed
from verifiers_embedded.prompts import RESERVED_TEMPLATE_ARGUMENTS

_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content"}
)
_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(value: Any) -> list[dict[str, Any]]:
    """The messages, with contents as strings. Text parts are joined by newlines, as vLLM does."""
    if not isinstance(value, list) or not value:
        raise ApiError(
            f"field 'messages' must be a list of at least one message, not {short(value)}", param="messages"
        )
    return [_message(item, f"messages[{place}]") for place, item in enumerate(value)]


def read_tools(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools to show to the model: none with `tool_choice` "none"."""
    tools = typed(fields, "tools", list, [])
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                f"tools[{place}] must be {{'type': 'function', 'function': {{'name': ...}}}}, "
                f"not {short(tool)}",
                param="tools",
            )
    return [] if fields.get("tool_choice") == "none" else tools


def read_template_kwargs(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template."""
    value: dict[str, Any] = typed(fields, "chat_template_kwargs", dict, {})
    taken = sorted(RESERVED_TEMPLATE_ARGUMENTS & set(value)) + (["messages"] if "messages" in value else [])
    if taken:
        raise ApiError(
            f"chat_template_kwargs may not set {', '.join(taken)}; the server does",
            param="chat_template_kwargs",
        )
    return value


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(
            f"{where} must be an object with 'role' and 'content', not {short(value)}", param=where
        )
    message = {name: item for name, item in value.items() if item is not None and item != []}
    for name in message:
        if name not in _MESSAGE_FIELDS:
            raise ApiError(f"{where} has field {name!r}, which this server does not support", param=where)
        if name not in ("content", "tool_calls") and not isinstance(message[name], str):
            raise ApiError(f"{where}.{name} must be a string, not {short(message[name])}", param=where)
    if message.get("role") not in _ROLES:
        raise ApiError(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {short(message.get('role'))}", param=where
        )
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message, where)
        if message.setdefault("content", "") == "":
            return message
    # Looked up in the original: an empty list of parts is dropped above, but is content all the same.
    message["content"] = _content(value.get("content"), where)
    return message


def _tool_calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if message["role"] != "assistant":
        raise ApiError(
            f"{where}.tool_calls belongs to the role 'assistant', not {message['role']!r}", param=where
        )
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise ApiError(f"{where}.tool_calls must be a list, not {short(calls)}", param=where)
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not all(
            isinstance(function.get(name), str) for name in ("name", "arguments")
        ):
            raise ApiError(
                f"{where}.tool_calls[{place}] must have a 'function' with 'name' and 'arguments', both "
                f"strings, not {short(call)}",
                param=where,
            )
    return calls


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(
            f"{where}.content must be a string or a list of text parts, not {short(value)}", param=where
        )
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ApiError(
                f'{where}.content may hold parts {{"type": "text", "text": ...}} only, not {short(part)}',
                param=where,
            )
        texts.append(text)
    return "\n".join(texts)
