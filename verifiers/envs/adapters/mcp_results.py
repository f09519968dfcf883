"""Between MCP and chat: tool definitions and tool results in the forms that policies are given."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp import types as mcp_types

__all__ = ["chat_names", "parameters_of", "result_text"]

_LONGEST_NAME = 64  # of a function in OpenAI's API


def chat_names(tools: Sequence[tuple[str, str]], taken: Collection[str] = ()) -> dict[tuple[str, str], str]:
    """Names for the policy, by (server, tool): the tool's own, or `server__tool` where it is not the only one.

    Args:
        tools: (server, tool) pairs.
        taken: names that other tools have already.
    """
    own = {pair: _allowed(pair[1]) for pair in tools}
    names = [*own.values(), *taken]
    return {pair: name if names.count(name) == 1 else _allowed(f"{pair[0]}__{pair[1]}") for pair, name in own.items()}


def _allowed(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_LONGEST_NAME]


def parameters_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's input schema as an OpenAI definition's parameters."""
    lean = {key: value for key, value in schema.items() if key not in ("$schema", "title")}
    return {**lean, "type": "object", "properties": schema.get("properties") or {}}


def result_text(result: mcp_types.CallToolResult, max_chars: int) -> str:
    """A result as text: its text parts, a line each for what is no text, or else its structured content as JSON."""
    parts = [_part_text(part) for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    text = "\n".join(parts)
    left_out = len(text) - max_chars
    return text if left_out <= 0 else f"{text[:max_chars]}\n[{left_out} characters left out]"


def _part_text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        text = getattr(part.resource, "text", None)
        return str(text) if text is not None else f"[resource {part.resource.uri}, not text]"
    if part.type == "resource_link":
        return f"[resource {part.uri}: {part.description or part.name}]"
    return f"[{part.type} of type {getattr(part, 'mime_type', 'unknown')}, not shown]"
