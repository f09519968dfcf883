"""Between an OpenEnv server's dicts and a policy's text: observations to messages, answers to actions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from verifiers.errors import ToolParseError

__all__ = ["action_from_text", "action_hint", "observation_text", "only_text_field"]

_FENCED = re.compile(r"```(?:json|JSON)?[ \t]*\n(.*?)```", re.DOTALL)
_BASE_FIELDS = frozenset({"metadata"})  # openenv-core gives it to every action
_HIDDEN_FIELDS = frozenset({"done", "reward", "metadata"})


def observation_text(observation: Any) -> str:
    """An observation as a policy reads it.

    A string is itself; a dict of one field is that field's value; other dicts are one `name: value` line a field.
    Absent and empty values are left out, nested ones are JSON.
    """
    if not isinstance(observation, Mapping):
        return _value_text(observation)
    shown = {
        name: value
        for name, value in observation.items()
        if name not in _HIDDEN_FIELDS and value is not None and value != "" and value != [] and value != {}
    }
    if len(shown) == 1:
        return _value_text(next(iter(shown.values())))
    lines = []
    for name, value in shown.items():
        text = _value_text(value)
        lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return "\n".join(lines)


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def only_text_field(schema: Mapping[str, Any]) -> str | None:
    """The field that an action's text goes into: the only (required) one, where that is a string."""
    properties = _properties(schema)
    required = [name for name in schema.get("required") or () if name in properties]
    names = required or list(properties)
    if len(names) == 1 and properties[names[0]].get("type") == "string":
        return names[0]
    return None


def action_from_text(text: str, schema: Mapping[str, Any], text_field: str | None) -> dict[str, Any]:
    """The action in a policy's answer: its JSON object, or else the whole text in `text_field`.

    What comes before a last `</think>` is not looked at. The object may stand alone or in a fenced block. Where there
    is a text field, an object counts only if the schema knows all its names, so that code which happens to be JSON
    stays text.

    Raises:
        ToolParseError: no object, and no field for text.
    """
    said = text.rpartition("</think>")[2].strip()
    for candidate in (said, *(match.strip() for match in reversed(_FENCED.findall(said)))):
        try:
            action = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(action, dict) and (text_field is None or action.keys() <= schema.get("properties", {}).keys()):
            return action
    if text_field is not None:
        return {text_field: said}
    raise ToolParseError("the answer holds no JSON object")


def action_hint(schema: Mapping[str, Any], text_field: str | None) -> str:
    """What to tell a policy about the form of its actions; "" where the server does not tell."""
    if text_field is not None:
        description = _properties(schema).get(text_field, {}).get("description")
        return f"Answer with your next action as plain text{f' ({description})' if description else ''}."
    properties = _properties(schema)
    if not properties:
        return ""
    lean = {
        "properties": properties,
        "required": [name for name in schema.get("required") or () if name in properties],
    }
    if definitions := schema.get("$defs"):
        lean["$defs"] = definitions
    form = json.dumps(lean, ensure_ascii=False)
    return f"Answer with your next action: one JSON object that fits this schema:\n{form}"


def _properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {
        name: value for name, value in properties.items() if name not in _BASE_FIELDS and isinstance(value, Mapping)
    }
