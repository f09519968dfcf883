"""Reading chat-completion requests. What would change the result is obeyed or refused, never ignored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verifiers_embedded.errors import ApiError
from verifiers_embedded.prompts import RESERVED_TEMPLATE_ARGUMENTS

_READ = frozenset(
    {
        "model",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "seed",
        "logprobs",
        "return_token_ids",
        "ignore_eos",
        "chat_template_kwargs",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
    }
)
_HARMLESS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "safety_identifier",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "priority",
        "request_id",
        "cache_salt",
    }
)
# A field of this table is taken where it asks for what is done anyway; any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "return_tokens_as_token_ids": (False,),
    "modalities": (["text"],),
}
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content"}
)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_STOP = 4
_MAX_TOP_K = 2**24
_MAX_TEMPERATURE = 1000.0


@dataclass(frozen=True)
class ChatRequest:
    """A chat-completion request as the server understands it; `max_tokens` None means the room left."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: tuple[str, ...]
    seed: int | None
    logprobs: bool
    return_token_ids: bool
    ignore_eos: bool
    chat_template_kwargs: dict[str, Any]
    tools: list[dict[str, Any]]
    parallel_tool_calls: bool

    @property
    def text_length(self) -> int:
        """Characters that the chat template will print, roughly."""
        said = sum(
            len(message["content"]) + len(repr(message.get("tool_calls", ""))) for message in self.messages
        )
        return said + len(repr(self.tools))


def parse_chat_request(body: Any) -> ChatRequest:
    """Checks a request body and reads it.

    A field that is null counts as absent. Seeds are taken modulo 2**64. Text parts of a message are joined by
    newlines, as vLLM does.

    Raises:
        ApiError: status 400; the message names the field, the value and what is expected.
    """
    if not isinstance(body, dict):
        raise ApiError(f"the request body must be a JSON object, not {_kind(body)}")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        _refuse_unsupported(name, value)
    if "model" not in fields:
        raise ApiError("field 'model' is missing; GET /v1/models lists the name to give", param="model")
    tokens_field = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
    top_k = _integer(fields, "top_k", 0, least=-1)
    return ChatRequest(
        model=_typed(fields, "model", str, ""),
        messages=_messages(fields.get("messages")),
        max_tokens=_integer(fields, tokens_field, 1, least=1) if tokens_field in fields else None,
        temperature=_number(
            fields, "temperature", 1.0, "in [0, 1000]", lambda value: 0 <= value <= _MAX_TEMPERATURE
        ),
        top_p=_number(fields, "top_p", 1.0, "in (0, 1]", lambda value: 0 < value <= 1),
        top_k=min(max(top_k, 0), _MAX_TOP_K),
        min_p=_number(fields, "min_p", 0.0, "in [0, 1]", lambda value: 0 <= value <= 1),
        stop=_stop(fields.get("stop", [])),
        seed=_integer(fields, "seed", 0) % 2**64 if "seed" in fields else None,
        logprobs=_typed(fields, "logprobs", bool, False),
        return_token_ids=_typed(fields, "return_token_ids", bool, False),
        ignore_eos=_typed(fields, "ignore_eos", bool, False),
        chat_template_kwargs=_template_kwargs(fields),
        tools=_tools(fields),
        parallel_tool_calls=_typed(fields, "parallel_tool_calls", bool, True),
    )


def _refuse_unsupported(name: str, value: Any) -> None:
    if name in _READ or name in _HARMLESS:
        return
    if name not in _NEUTRAL:
        raise ApiError(
            f"field {name!r} is unknown here, and ignoring it could change the result; leave it out",
            param=name,
            code="unsupported_parameter",
        )
    allowed = _NEUTRAL[name]
    if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed):
        remedy = f"leave it out or give {' or '.join(map(repr, allowed))}" if allowed else "leave it out"
        raise ApiError(
            f"field {name!r} with value {_short(value)} is not supported by this server; {remedy}",
            param=name,
            code="unsupported_parameter",
        )


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ApiError(
            f"field 'messages' must be a list of at least one message, not {_short(value)}", param="messages"
        )
    return [_message(item, f"messages[{place}]") for place, item in enumerate(value)]


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(
            f"{where} must be an object with 'role' and 'content', not {_short(value)}", param=where
        )
    message = {name: item for name, item in value.items() if item is not None and item != []}
    for name in message:
        if name not in _MESSAGE_FIELDS:
            raise ApiError(f"{where} has field {name!r}, which this server does not support", param=where)
        if name not in ("content", "tool_calls") and not isinstance(message[name], str):
            raise ApiError(f"{where}.{name} must be a string, not {_short(message[name])}", param=where)
    if message.get("role") not in _ROLES:
        raise ApiError(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {_short(message.get('role'))}", param=where
        )
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message, where)
        message.setdefault("content", "")
        if message["content"] == "":
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
        raise ApiError(f"{where}.tool_calls must be a list, not {_short(calls)}", param=where)
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not all(
            isinstance(function.get(name), str) for name in ("name", "arguments")
        ):
            raise ApiError(
                f"{where}.tool_calls[{place}] must have a 'function' with 'name' and 'arguments', both "
                f"strings, not {_short(call)}",
                param=where,
            )
    return calls


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools to show to the model: none with `tool_choice` "none"."""
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        raise ApiError(f"field 'tools' must be a list, not {_short(tools)}", param="tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(
                f"tools[{place}] must be {{'type': 'function', 'function': {{'name': ...}}}}, "
                f"not {_short(tool)}",
                param="tools",
            )
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise ApiError(
            f"field 'tool_choice' with value {_short(choice)} is not supported by this server, which does "
            "not constrain what is sampled; give 'auto' or 'none'",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return tools if choice == "auto" else []


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(
            f"{where}.content must be a string or a list of text parts, not {_short(value)}", param=where
        )
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise ApiError(
                f'{where}.content may hold parts {{"type": "text", "text": ...}} only, not {_short(part)}',
                param=where,
            )
        texts.append(text)
    return "\n".join(texts)


def _stop(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise ApiError(
            f"field 'stop' must be a non-empty string or a list of them, not {_short(value)}", param="stop"
        )
    if len(items) > _MAX_STOP:
        raise ApiError(f"field 'stop' holds {len(items)} strings; give at most {_MAX_STOP}", param="stop")
    return tuple(items)


def _template_kwargs(fields: dict[str, Any]) -> dict[str, Any]:
    value: dict[str, Any] = _typed(fields, "chat_template_kwargs", dict, {})
    taken = sorted(RESERVED_TEMPLATE_ARGUMENTS & set(value)) + (["messages"] if "messages" in value else [])
    if taken:
        raise ApiError(
            f"chat_template_kwargs may not set {', '.join(taken)}; the server does",
            param="chat_template_kwargs",
        )
    return value


def _typed(fields: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = fields.get(name, default)
    if not isinstance(value, kind):
        expected = {bool: "true or false", str: "a string", dict: "an object"}[kind]
        raise ApiError(f"field {name!r} must be {expected}, not {_short(value)}", param=name)
    return value


def _integer(fields: dict[str, Any], name: str, default: int, least: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ApiError(f"field {name!r} must be a whole number{bound}, not {_short(value)}", param=name)
    return value


def _number(
    fields: dict[str, Any], name: str, default: float, expected: str, fits: Callable[[float], bool]
) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(f"field {name!r} must be a number {expected}, not {_short(value)}", param=name)
    # The range comes first: a whole number can be too large for a float.
    if not fits(value) or not math.isfinite(value):
        raise ApiError(f"field {name!r} must be a number {expected}, not {_short(value)}", param=name)
    return float(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", bool: "a boolean"}.get(type(value), type(value).__name__)
