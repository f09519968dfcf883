"""Tools as environments call them: what the model is told of them, and a call that ends.

A tool may be a function, a bound method, a `functools.partial` or a callable object, sync or async; or a `Tool`,
which brings its own schema. Calls raise `ToolError`s for what the model did wrong; environments turn them into tool
messages.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.concurrency import OverdueError, is_async_function, threads_for
from verifiers.envs.tool_schema import function_schema, tool_name
from verifiers.errors import ConfigError, InfraError, ModelError, ToolCallError, ToolParseError
from verifiers.inference.wire import whole_characters
from verifiers.types import ChatMessage

__all__ = [
    "NOT_FOR_THE_MODEL",
    "TOOL_FIELDS",
    "RequestedCall",
    "Tool",
    "as_tool",
    "convert_func_to_oai_tool",
    "openai_tools",
    "parse_arguments",
    "requested_calls",
    "tool_definition",
    "tool_message",
    "tool_name",
]

TOOL_FIELDS = ("name", "description", "parameters", "strict")

MAX_TOOL_THREADS = 64
"""Synchronous tools that run at once in a process."""

Bind = Callable[[Mapping[str, Any]], tuple[list[Any], dict[str, Any]]]

NOT_FOR_THE_MODEL = (InfraError, ModelError, ConfigError)
"""Errors that the model cannot have caused: each ends the rollout, and is never shown as a tool's answer."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool with its schema, for tools that do not come from a Python signature, such as an MCP server's.

    Args:
        name: what the model calls it.
        schema: its definition in OpenAI's form (see `tool_definition`).
        call: sync or async; called with the model's arguments as keywords.
        bind: checks and converts the model's arguments into positional and keyword ones; raises ToolParseError.
            None passes them on as they are.
        hidden: names of arguments that the environment supplies; the model may not.
        has_own_deadline: it ends by itself in bounded time, so the environment's `tool_timeout_s` does not apply.
    """

    name: str
    schema: dict[str, Any]
    call: Callable[..., Any]
    bind: Bind | None = None
    hidden: frozenset[str] = frozenset()
    has_own_deadline: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it directly, as the function it stands for."""
        return self.call(*args, **kwargs)

    async def run(self, arguments: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        """Return the tool's result. A sync tool runs in a thread, so that it does not block the event loop.

        Args:
            arguments: by name: the model's, and the hidden ones.
            timeout_s: seconds that the call may take; None for no bound.

        Raises:
            ToolParseError: arguments that are missing, unknown or of a wrong type.
            ToolCallError: it did not end in time, or tried to end the interpreter.
            Exception: whatever the tool raises.
        """
        positional, keywords = self.bind(arguments) if self.bind else ([], dict(arguments))
        work = functools.partial(self.call, *positional, **keywords)
        deadline = asyncio.timeout(timeout_s)
        try:
            result = (
                work()
                if is_async_function(self.call)
                else await threads_for("tool", MAX_TOOL_THREADS).run(work, timeout_s)
            )
            if not inspect.isawaitable(result):
                return result
            async with deadline:
                return await result
        except (Exception, SystemExit) as error:
            if deadline.expired() or isinstance(error, OverdueError):
                raise ToolCallError(f"The tool {self.name!r} did not finish within {timeout_s:g} s.") from None
            if isinstance(error, SystemExit):
                raise ToolCallError(f"The tool {self.name!r} tried to exit the interpreter.") from error
            raise


def as_tool(func: Any, hidden: Collection[str] = ()) -> Tool:
    """Return a function, or a `Tool` as it is, as a `Tool`.

    Raises:
        ConfigError: a function that cannot be a tool (see `verifiers.envs.tool_schema.function_schema`).
    """
    if isinstance(func, Tool):
        if hidden:
            raise ConfigError(
                f"The tool {func.name!r} brings its own schema, so args_to_skip={list(hidden)!r} cannot be taken out "
                "of it; leave them out of the schema and name them in Tool(hidden=...)."
            )
        return func
    if not callable(func):
        raise ConfigError(f"A tool is {func!r}; it must be a function, a callable object or a verifiers Tool.")
    schema = function_schema(func, hidden)
    return Tool(schema.name, schema.definition, func, schema.bind, schema.hidden)


def convert_func_to_oai_tool(func: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's definition as an OpenAI tool, strict, out of its signature and docstring.

    Raises:
        ConfigError: a function that cannot be a tool (see `verifiers.envs.tool_schema.function_schema`).
    """
    return as_tool(func).schema


def tool_definition(
    name: str, description: str, parameters: Mapping[str, Any], *, strict: bool = False
) -> dict[str, Any]:
    """Return an OpenAI tool definition around a JSON schema of the parameters."""
    function = {"name": name, "description": description, "parameters": dict(parameters), "strict": strict}
    return {"type": "function", "function": function}


def openai_tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """Return tools as OpenAI's dicts; each is one already, or has `TOOL_FIELDS` as keys or attributes."""
    definitions = []
    for tool in tools:
        given = tool if isinstance(tool, Mapping) else vars(tool)
        if "function" not in given:
            function = {name: given[name] for name in TOOL_FIELDS if given.get(name) is not None}
            given = {"type": "function", "function": function}
        definitions.append(dict(given))
    return definitions


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """One tool call as the model asked for it.

    Attributes:
        arguments: JSON text as a rule, or the object itself where a server parsed it; nothing is checked yet.
    """

    name: str
    arguments: Any
    id: str


def requested_calls(message: ChatMessage) -> list[RequestedCall]:
    """Return the tool calls of an assistant message, each with an id of its own.

    Calls may be dicts, JSON text of dicts, or objects, with or without OpenAI's `function` level. Where an id is
    missing or repeated, a new one is written into the message too, so that answers can refer to it.
    """
    calls = [_read_call(call) for call in message.get("tool_calls") or ()]
    given = {call.id for call in calls}
    ids: list[str] = []
    for number, call in enumerate(calls):
        unique = call.id
        while not unique or unique in ids or (unique != call.id and unique in given):
            unique = f"{call.id or 'call'}_{number}"
            number += 1
        ids.append(unique)
    if all(call.id == unique for call, unique in zip(calls, ids, strict=True)):
        return calls
    calls = [RequestedCall(call.name, call.arguments, unique) for call, unique in zip(calls, ids, strict=True)]
    message["tool_calls"] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return calls


def parse_arguments(call: RequestedCall) -> dict[str, Any]:
    """Return the arguments of a call as an object; nothing at all counts as no arguments.

    Raises:
        ToolParseError: text that is not JSON, or JSON that is not an object.
    """
    raw = call.arguments
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ToolParseError(f"The arguments of the tool {call.name!r} are not valid JSON: {error}.") from error
    if not isinstance(raw, Mapping):
        raise ToolParseError(
            f"The arguments of the tool {call.name!r} must be a JSON object, not {json.dumps(raw, default=str)[:80]}."
        )
    return dict(raw)


def tool_message(result: Any, call_id: str) -> ChatMessage:
    """Return a tool's answer as a message: lists of content parts as they are, all else as `str` of it."""
    is_parts = isinstance(result, list) and bool(result) and all(_is_part(item) for item in result)
    content = result if is_parts else whole_characters(str(result))
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _is_part(item: Any) -> bool:
    return isinstance(item, Mapping) and isinstance(item.get("type"), str)


def _read_call(call: Any) -> RequestedCall:
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except ValueError:
            call = {}
    function = _field(call, "function") or call
    name, call_id = _field(function, "name"), _field(call, "id")
    return RequestedCall(str(name or ""), _field(function, "arguments"), str(call_id or ""))


def _field(item: Any, name: str) -> Any:
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)
