"""The form that the text of an answer must have, written as a grammar.

The grammar is in llguidance's dialect of Lark. Nothing here needs that library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers_embedded.errors import ApiError

MAX_SCHEMA_CHARACTERS = 2**18
MAX_DEPTH = 64
"""Most levels of objects and lists in a schema."""
MAX_REFERENCES = 300
"""Most different `$ref` in a schema. With `MAX_DEPTH` it bounds the stack that compiling needs."""

FORCED_FORMAT = "hermes"
"""The format of `tool_calls.FORMATS` in which calls can be forced."""

BLANKS = "[ \\n\\r\\t]{1,32}"
"""Whitespace between two parts of JSON. Bounded: a model that repeats itself would write it without end."""


@dataclass(frozen=True)
class Function:
    name: str
    parameters: str


@dataclass(frozen=True)
class Form:
    """The texts that are allowed: JSON that fits a schema, or calls of functions, or either.

    Args:
        schema: JSON text of a schema; None for calls alone.
        several: whether one answer may hold more than one call.
        param: the request's field that asked for it.
    """

    schema: str | None
    functions: tuple[Function, ...] = ()
    several: bool = True
    param: str = "response_format"


def form_of_chat(
    schema: str | None,
    forced: Sequence[str],
    tools: Sequence[Mapping[str, Any]],
    *,
    several: bool,
    tool_format: str | None,
) -> Form | None:
    """Return the form of a chat request's answer; None where it is free.

    Where the request has a schema and tools, they may be called instead. Raises ApiError where JSON and a call are
    asked for at once, or calls in a format that has no grammar here.
    """
    if schema is not None and forced:
        raise ApiError(
            "fields 'response_format' and 'tool_choice' ask for JSON and for a call; leave one of them out",
            param="tool_choice",
        )
    if schema is None and not forced:
        return None
    param = "tool_choice" if forced else "response_format"
    callable_names = forced or [tool["function"]["name"] for tool in tools if tool_format]
    if callable_names and tool_format != FORCED_FORMAT:
        raise ApiError(
            f"field {param!r} with tools can be obeyed in the format {FORCED_FORMAT!r} alone, and the served "
            f"model calls tools in {tool_format or 'no known format'}; leave out one of them",
            param=param,
            code="unsupported_parameter",
        )
    return Form(schema, functions_of(tools, callable_names), several and len(forced) != 1, param)


def functions_of(tools: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[Function, ...]:
    """Return the named functions, ready to be forced. Raises ApiError unless parameters are a schema of an object."""
    found = []
    for place, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] not in names:
            continue
        # OpenAI: a function without parameters takes none
        parameters = function.get("parameters") or {"properties": {}, "additionalProperties": False}
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise ApiError(
                f"tools[{place}].function.parameters must be a JSON schema of type 'object', not {parameters!r:.80}",
                param="tools",
            )
        found.append(Function(function["name"], schema_text({**parameters, "type": "object"}, "tools")))
    return tuple(found)


def schema_text(schema: Mapping[str, Any], param: str) -> str:
    """Return a schema as JSON text.

    Raises ApiError where it is too long, nested too deeply, or has too many references: each of them would cost stack
    or time that no library bounds.
    """
    if (depth := max(level for _, level in _nodes(schema))) > MAX_DEPTH:
        raise ApiError(
            f"the JSON schema in {param!r} is nested {depth} levels deep; at most {MAX_DEPTH} can be "
            "compiled, so give deep parts names under '$defs'",
            param=param,
        )
    objects = [item for item, _ in _nodes(schema) if isinstance(item, dict)]
    names = [item[key] for item in objects for key in ("$ref", "$dynamicRef") if key in item]
    if len(references := {name for name in names if isinstance(name, str)}) > MAX_REFERENCES:
        raise ApiError(
            f"the JSON schema in {param!r} has {len(references)} different '$ref'; at most {MAX_REFERENCES} "
            "can be compiled, so send a smaller schema",
            param=param,
        )
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise ApiError(
            f"the JSON schema in {param!r} is {len(text)} characters long; at most {MAX_SCHEMA_CHARACTERS} "
            "can be compiled, so send a smaller schema",
            param=param,
        )
    return text


def lark_grammar(form: Form, reasoning: str = "none") -> str:
    """Return the grammar of a form.

    Args:
        reasoning: "none"; "may" where the answer may begin with a text between think tags; "begun" where the
            prompt has opened the tag, so that the answer continues inside it.
    """
    lines = ['%llguidance {"no_forcing": true}', f"BLANKS: /{BLANKS}/"]
    starts = {"none": "", "may": '(BLANKS? "<think>" thought BLANKS?)? ', "begun": "thought BLANKS? "}
    bodies = (["calls"] if form.functions else []) + (["json"] if form.schema is not None else [])
    lines.append(f"start: {starts[reasoning]}({' | '.join(bodies)})")
    if reasoning != "none":
        lines.append(r"thought[lazy]: /(?s:.*)<\/think>/")
    if form.schema is not None:
        lines.append(f"json: {_json_rule(form.schema)}")
    if form.functions:
        more = " (BLANKS? call)*" if form.several else ""
        lines.append(f"calls: BLANKS? call{more} BLANKS?")
        lines.append(f"call: {' | '.join(f'call_{place}' for place in range(len(form.functions)))}")
    for place, function in enumerate(form.functions):
        # the name as a JSON string, which is then written as a string of the grammar
        parts = ["<tool_call>", "{", '"name"', ":", json.dumps(function.name), ",", '"arguments"', ":"]
        opening = " BLANKS? ".join(json.dumps(part) for part in parts)
        lines.append(f'call_{place}: {opening} BLANKS? arguments_{place} BLANKS? "}}" BLANKS? "</tool_call>"')
        lines.append(f"arguments_{place}: {_json_rule(function.parameters)}")
    return "\n".join(lines) + "\n"


def _json_rule(schema: str) -> str:
    options = json.dumps({"whitespace_pattern": BLANKS})
    # the first of two equal keys would be dropped by a JSON parser, so a schema's own options win
    rest = schema[1:] if schema != "{}" else "}"
    comma = "," if schema != "{}" else ""
    return f'%json {{"x-guidance":{options}{comma}{rest}'


def _nodes(value: Any) -> Iterator[tuple[dict[str, Any] | list[Any], int]]:
    """Yield all objects and lists with their level; not recursive, since a body can be deeper than Python's stack."""
    waiting = [(value, 1)]
    while waiting:
        item, level = waiting.pop()
        if isinstance(item, dict | list):
            yield item, level
            children = item.values() if isinstance(item, dict) else item
            waiting.extend((child, level + 1) for child in children)
