"""Tools as environments call them: what the model is told of them, and a call that ends.

A tool may be a function, a bound method, a `functools.partial` or a callable object, sync or async; or a `Tool`,
which brings its own schema. Calls raise `ToolError`s for what the model did wrong; environments turn them into tool
messages.

A function's definition is what the `openai-agents` package's `function_tool` gives in strict mode: every parameter is
required, `additionalProperties` false, titles by pydantic, descriptions out of the docstring. Strict mode cannot say
"any object" (`dict[str, int]`, `**kwargs`): a tool that takes one gets an ordinary schema with `"strict": false`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from verifiers.concurrency import OverdueError, is_async_function, threads_for, without_partials
from verifiers.errors import ConfigError, InfraError, ModelError, ToolCallError, ToolParseError
from verifiers.images import image_part, is_image
from verifiers.inference.wire import whole_characters
from verifiers.keywords import warn_once
from verifiers.types import ChatMessage, message_field

if TYPE_CHECKING:
    from pydantic import BaseModel

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
        return self.call(*args, **kwargs)

    async def run(self, arguments: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        """Return the tool's result for arguments by name. A sync tool runs in a thread.

        Raises:
            ToolParseError: arguments that are missing, unknown or of a wrong type.
            ToolCallError: it did not end in time, or tried to end the interpreter.
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

    What a partial binds is not shown to the model, nor are the `hidden` parameters, which the environment fills in.
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
    return _function_tool(func, hidden)


def convert_func_to_oai_tool(func: Callable[..., Any]) -> dict[str, Any]:
    """Return a function's definition as an OpenAI tool, strict, out of its signature and docstring; as `as_tool`."""
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
    """One tool call as the model asked for it: `arguments` are JSON text, or an object where a server parsed it."""

    name: str
    arguments: Any
    id: str


def requested_calls(message: ChatMessage) -> list[RequestedCall]:
    """Return the tool calls of an assistant message, each with an id of its own.

    Calls may be dicts, JSON text of dicts, or objects, with or without OpenAI's `function` level. Where an id is
    missing or repeated, a new one is written into the message too, so that answers can refer to it.
    """
    calls = [read_call(call) for call in message.get("tool_calls") or ()]
    given = {call.id for call in calls}
    unique: dict[str, RequestedCall] = {}
    for number, call in enumerate(calls):
        name = call.id
        while not name or name in unique or (name != call.id and name in given):
            name = f"{call.id or 'call'}_{number}"
            number += 1
        unique[name] = call
    if list(unique) == [call.id for call in calls]:
        return calls
    calls = [RequestedCall(call.name, call.arguments, name) for name, call in unique.items()]
    message["tool_calls"] = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
    return calls


def parse_arguments(call: RequestedCall) -> dict[str, Any]:
    """Return the arguments of a call as an object; nothing at all counts as no arguments."""
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
    """Return a tool's answer as a message: content parts and images as parts, with texts beside them; else `str`."""
    listed = result if isinstance(result, list | tuple) else [result]
    items = [image_part(one) if is_image(one) else one for one in listed]
    parts = [{"type": "text", "text": one} if isinstance(one, str) else one for one in items]
    has_parts = any(map(_is_part, items)) and all(map(_is_part, parts))
    content = parts if has_parts else whole_characters(str(result))
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _is_part(item: Any) -> bool:
    # rows of a tool's own may have a field "type", too
    kind = item.get("type") if isinstance(item, Mapping) else None
    return isinstance(kind, str) and isinstance(item.get(kind), _PARTS.get(kind, ()))


def read_call(call: Any) -> RequestedCall:
    """Return a call that is OpenAI's object, its dict, or the JSON text of one."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            call = {}
    function = message_field(call, "function") or call
    name, call_id = message_field(function, "name"), message_field(call, "id")
    return RequestedCall(str(name or ""), message_field(function, "arguments"), str(call_id or ""))


# -- a function as a tool ------------------------------------------------------------------------------------------

_PARTS: dict[str, Any] = {"text": str, "refusal": str, "image_url": Mapping, "input_audio": Mapping, "file": Mapping}
_PARTS |= {"audio_url": Mapping, "video_url": Mapping}
"""What a content part holds under the name of its type, in OpenAI's API and vLLM's."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_GOOGLE_PARAMETERS = re.compile(r"(?<=\S)\n(?=(?:args|arguments|params|parameters):[ \t]*\n[ \t])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Binding:
    """A check of the model's arguments, and their place in the call of a function."""

    name: str
    hidden: frozenset[str]
    parameters: Mapping[str, inspect.Parameter]
    fields: Mapping[str, str]
    model: type[BaseModel]

    def __call__(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and keyword arguments of the call, checked and converted to what the signature says.

        Hidden arguments are passed on as they are; the defaults stand in for what is left out.
        """
        from pydantic import ValidationError

        visible = {name: value for name, value in arguments.items() if name not in self.hidden}
        try:
            checked = self.model.model_validate(visible)
        except ValidationError as error:
            raise ToolParseError(self._complaint(error)) from error
        values = {name: getattr(checked, field) for name, field in self.fields.items()}
        values.update({name: self._hidden_value(name, arguments) for name in self.hidden})
        bound = inspect.BoundArguments(inspect.Signature(list(self.parameters.values())), values)
        return list(bound.args), {**bound.kwargs, **(checked.model_extra or {})}

    def _hidden_value(self, name: str, arguments: Mapping[str, Any]) -> Any:
        value = arguments.get(name, self.parameters[name].default)
        if value is inspect.Parameter.empty:
            raise ConfigError(
                f"The argument {name!r} of the tool {self.name!r} is hidden from the model and was not supplied; "
                "return it from update_tool_args."
            )
        return value

    def _complaint(self, error: Any) -> str:
        problems = []
        for item in error.errors(include_url=False):
            place = ".".join(str(part) for part in item["loc"]) or "arguments"
            if item["type"] == "missing":
                problems.append(f"{place} is missing")
            elif item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
                problems.append(f"{place} is not a parameter (they are: {', '.join(self.fields) or 'none'})")
            else:
                problems.append(f"{place}: {item['msg']}, not {item['input']!r:.80}")
        return f"Wrong arguments for the tool {self.name!r}: {'; '.join(problems)}."


def _function_tool(func: Callable[..., Any], hidden: Collection[str]) -> Tool:
    from pydantic import ConfigDict, create_model
    from pydantic.errors import PydanticUserError

    name = tool_name(func)
    parameters = _parameters(func)
    if unknown := sorted(set(hidden) - set(parameters)):
        raise ConfigError(f"The tool {name!r} has no parameter {unknown[0]!r} to hide; it has {list(parameters)}.")
    description, described = _documentation(func)
    takes_anything = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    parameters = {key: item for key, item in parameters.items() if item.kind is not inspect.Parameter.VAR_KEYWORD}
    shown = {key: item for key, item in parameters.items() if key not in hidden}
    hints = _hints(func, shown)
    _warn_of_gaps(name, description, [key for key in shown if key not in hints])
    # the fields have neutral names, so that parameters may be called what they like ("json", "_x", "self")
    fields = {key: f"argument_{number}" for number, key in enumerate(shown)}
    try:
        model = create_model(
            f"{name}_args",
            __config__=ConfigDict(extra="allow" if takes_anything else "forbid", arbitrary_types_allowed=False),
            **{fields[key]: _field(item, hints, described) for key, item in shown.items()},  # type: ignore[call-overload]
        )
        loose = model.model_json_schema()
    except (PydanticUserError, TypeError, NameError) as error:
        raise ConfigError(
            f"The parameters of the tool {name!r} cannot be written as JSON ({str(error).splitlines()[0]}); give "
            "them types that JSON can hold, or hide them by StatefulToolEnv.add_tool(tool, args_to_skip=[...])."
        ) from error
    strict = None if takes_anything else strict_schema(loose)
    definition = tool_definition(name, description or "", strict or loose, strict=strict is not None)
    hides = frozenset(hidden)
    return Tool(name, definition, func, _Binding(name, hides, parameters, fields, model), hides)


def _warn_of_gaps(name: str, description: str | None, untyped: Sequence[str]) -> None:
    gaps = [] if description else ["no docstring"]
    gaps += [f"no annotation of {', '.join(map(repr, untyped))}"] if untyped else []
    if gaps:
        warn_once(
            "verifiers.envs.tools",
            f"The tool {name!r} has {' and '.join(gaps)}, and a model knows of a tool only what these say.",
        )


def tool_name(func: Any) -> str:
    """Return a function's name as a tool; of a partial that of the function inside, of an object its `name`.

    A name that OpenAI's API refuses, such as a lambda's, is a ConfigError.
    """
    func = without_partials(func)
    name = getattr(func, "__name__", None) or getattr(func, "name", None) or type(func).__name__
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"A tool is named {name!r}; names have 1 to 64 letters, digits, '_' or '-'. Use a named function."
        )
    return name


def _parameters(func: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = dict(inspect.signature(func).parameters)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The tool {func!r} has no signature to read; wrap it in a function.") from error
    while isinstance(func, functools.partial):
        for name in func.keywords:
            parameters.pop(name, None)
        func = func.func
    return parameters


def _plain_function(func: Any) -> Any:
    """Return the function whose annotations and docstring describe `func`."""
    func = without_partials(func)
    return func if inspect.isroutine(func) else type(func).__call__


def _hints(func: Callable[..., Any], shown: Collection[str]) -> dict[str, Any]:
    plain = _plain_function(func)
    try:
        return get_type_hints(plain, include_extras=True)
    except (NameError, AttributeError) as error:
        raw = getattr(plain, "__annotations__", {})
        # a hidden parameter may have a type that is only imported for type checkers
        needed = {name: hint for name, hint in raw.items() if name in shown}
        scope = getattr(inspect.unwrap(plain), "__globals__", {})
        try:
            return get_type_hints(SimpleNamespace(__annotations__=needed), globalns=scope, include_extras=True)
        except (NameError, AttributeError):
            raise ConfigError(
                f"An annotation of the tool {tool_name(func)!r} cannot be resolved ({error}); define the type at the "
                "top of the module, or hide the parameter by StatefulToolEnv.add_tool(tool, args_to_skip=[...])."
            ) from error


def _field(item: inspect.Parameter, hints: Mapping[str, Any], described: Mapping[str, str]) -> tuple[Any, Any]:
    from pydantic import Field
    from pydantic.fields import FieldInfo

    hint = hints.get(item.name, Any)
    description = described.get(item.name) or _described_by_type(hint)
    extra: dict[str, Any] = {} if description is None else {"description": description}
    if item.kind is inspect.Parameter.VAR_POSITIONAL:
        return Annotated[list[hint], Field(alias=item.name, **extra)], Field(default_factory=list)  # type: ignore[valid-type]
    default = ... if item.default is inspect.Parameter.empty else item.default
    if isinstance(default, FieldInfo):
        return hint, FieldInfo.merge_field_infos(default, Field(alias=item.name, **extra))
    return hint, Field(default=default, alias=item.name, **extra)


def _described_by_type(hint: Any) -> str | None:
    """Return the text in `Annotated[int, "how many"]`."""
    if get_origin(hint) is not Annotated:
        return None
    return next((part for part in get_args(hint)[1:] if isinstance(part, str)), None)


def _documentation(func: Callable[..., Any]) -> tuple[str | None, dict[str, str]]:
    """Return the description and the parameters' descriptions in the docstring, whichever style it is written in."""
    plain = _plain_function(func)
    text = inspect.getdoc(plain)
    if not inspect.isroutine(without_partials(func)):
        text = plain.__doc__ and inspect.cleandoc(plain.__doc__)
        text = text or inspect.getdoc(type(without_partials(func)))
    if not text:
        return None, {}
    from griffe import Docstring, DocstringSectionKind, Parser

    # the parser passes over a section that has no blank line before it
    text = _GOOGLE_PARAMETERS.sub("\n\n", text)
    # the parser dedents by all lines but the first, which here may begin a section
    quiet = {style: {"warnings": False} for style in ("google", "numpy", "sphinx")}
    sections = Docstring("\n" + text, lineno=1).parse(
        Parser.auto, default=Parser.google, style_order=["sphinx", "numpy", "google"], per_style_options=quiet
    )
    description = next((item.value for item in sections if item.kind is DocstringSectionKind.text), None)
    described = {
        parameter.name.lstrip("*"): parameter.description
        for section in sections
        if section.kind is DocstringSectionKind.parameters
        for parameter in section.value
    }
    return description, described


class _NotStrictError(Exception):
    """The schema says what OpenAI's strict mode cannot."""


_REFUSED = frozenset(
    {"prefixItems", "uniqueItems", "not", "if", "contains", "patternProperties", "propertyNames", "dependentSchemas"}
)
_TYPED = frozenset({"type", "anyOf", "allOf", "enum", "const", "$ref", "properties"})
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})


def strict_schema(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a JSON schema as OpenAI's strict mode requires it, or None where strict mode cannot say the same.

    Every property is required, no object is open, `oneOf` is `anyOf`, and a `$ref` stands alone: where it has
    company, such as a description, what it refers to is written out in its place.
    """
    try:
        return _strict(schema, schema)
    except _NotStrictError:
        return None


def _strict(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(schema)
    if "$ref" in result and len(result) > 1:
        target = _referred(result.pop("$ref"), root)
        return _strict({**target, **result}, root)
    if result.get("default", ...) is None:
        del result["default"]
    if "oneOf" in result:
        result["anyOf"] = [*result.get("anyOf", []), *result.pop("oneOf")]
    for key in ("$defs", "properties"):
        if key in result:
            result[key] = {name: _strict(item, root) for name, item in result[key].items()}
    if _REFUSED & result.keys() or not _TYPED & result.keys() or result.get("format", "date") not in _FORMATS:
        raise _NotStrictError
    for key in ("anyOf", "allOf"):
        if key in result:
            result[key] = [_strict(item, root) for item in result[key]]
    if isinstance(result.get("items"), Mapping):
        result["items"] = _strict(result["items"], root)
    if result.get("type") == "object" or "properties" in result:
        if result.get("additionalProperties", False) is not False:
            raise _NotStrictError
        result["additionalProperties"] = False
        result["required"] = list(result.get("properties", ()))
    return result


def _referred(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    target: Any = root
    for part in reference.removeprefix("#/").split("/"):
        target = target[part.replace("~1", "/").replace("~0", "~")]
    found: Mapping[str, Any] = target
    return found
