"""Valid calls of tools, made up from their schemas alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Coin", "fake_value", "wanted_tool"]

Coin = Callable[[str], float]
"""A number of 0 .. 1 for what is to be decided, the same each time."""

_DEEPEST = 8
_FORMATS = {
    "date": "2026-01-02",
    "date-time": "2026-01-02T03:04:05Z",
    "email": "fake@example.org",
    "time": "03:04:05Z",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


def wanted_tool(body: Mapping[str, Any], called: int, coin: Coin) -> Mapping[str, Any] | None:
    """Return the function that an answer to a request calls; None for an answer in words.

    The first answer calls a tool, and later ones do now and then.

    Args:
        body: the request; `tools` and `tool_choice` are honoured.
        called: tool messages since the prompt.
    """
    functions = [tool["function"] for tool in body.get("tools") or () if isinstance(tool.get("function"), Mapping)]
    choice = body.get("tool_choice")
    if not functions or choice == "none":
        return None
    if isinstance(choice, Mapping):
        named = choice.get("function", choice).get("name")
        return next((function for function in functions if function["name"] == named), None)
    if choice != "required" and called and coin(f"stop {called}") < 0.5 + 0.1 * called:
        return None
    return functions[int(coin(f"tool {called}") * len(functions)) % len(functions)]


def fake_value(schema: Any, coin: Coin, root: Any = None, depth: int = 0) -> Any:
    """Return a value that a JSON schema accepts; of optional properties, none that are nested deeply.

    Args:
        schema: with the usual keywords of tools; `pattern` and the combination of `allOf` are not looked at.
        root: that `$ref` is looked up in; the schema itself by default.
    """
    if not isinstance(schema, Mapping):
        return "fake"
    root = schema if root is None else root
    if "$ref" in schema:
        return fake_value(_referred(root, schema["$ref"]), coin, root, depth + 1)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return _chosen(schema["enum"], coin, depth)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            # the last ones are the simplest as a rule: anyOf [thing, null]
            one = schema[key][-1] if depth > _DEEPEST else schema[key][0]
            return fake_value({**{k: v for k, v in schema.items() if k != key}, **one}, coin, root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, Sequence) and not isinstance(kind, str):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties") or {}
        needed = schema.get("required") or ()
        wanted = [name for name in properties if name in needed or depth < 2]
        return {name: fake_value(properties[name], coin, root, depth + 1) for name in wanted}
    if kind == "array":
        items = schema.get("items", {})
        size = max(schema.get("minItems", 0), min(1, schema.get("maxItems", 1)) if depth < _DEEPEST else 0)
        coins = [functools.partial(_item_coin, coin, number) for number in range(size)]
        return [fake_value(items, one, root, depth + 1) for one in coins]
    if kind in ("integer", "number"):
        return _number(schema, kind, coin, depth)
    if kind == "boolean":
        return coin(f"boolean {depth}") < 0.5
    return None if kind == "null" else _text(schema)


def _item_coin(coin: Coin, number: int, what: str) -> float:
    return coin(f"{number} {what}")


def _referred(root: Any, reference: str) -> Any:
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~"), {}) if isinstance(found, Mapping) else {}
    return found


def _chosen(values: Sequence[Any], coin: Coin, depth: int) -> Any:
    return values[int(coin(f"choice {depth}") * len(values)) % len(values)]


def _number(schema: Mapping[str, Any], kind: str, coin: Coin, depth: int) -> float:
    step = schema.get("multipleOf", 1)
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + (step if kind == "integer" else 1e-3)
    if high is None and "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - (step if kind == "integer" else 1e-3)
    if low is None:
        low = 1 if high is None else high - 9 * step
    if high is None:
        high = low + 9 * step
    if kind == "number" and "multipleOf" not in schema:
        return low + round((high - low) * coin(f"number {depth}"), 2) if high - low >= 1 else low
    first, last = -(-low // step), high // step
    value = (first + int((last - first + 1) * coin(f"number {depth}"))) * step
    return int(value) if kind == "integer" else value


def _text(schema: Mapping[str, Any]) -> str:
    text = _FORMATS.get(schema.get("format", ""), "fake")
    if "minLength" in schema and len(text) < schema["minLength"]:
        text = text.ljust(schema["minLength"], "x")
    return text[: schema.get("maxLength")]
