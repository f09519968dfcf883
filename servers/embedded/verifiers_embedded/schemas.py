"""The bodies that are read and answered, as JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers_embedded.fields import HARMLESS, NEUTRAL
from verifiers_embedded.prompts import RESERVED_TEMPLATE_ARGUMENTS
from verifiers_embedded.requests import MAX_CHOICES, MAX_STOP, MAX_TEMPERATURE, MAX_TOP_LOGPROBS

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
_ROLES = ["system", "developer", "user", "assistant", "tool"]
_ENDS = ["stop", "length", "abort"]


def ref(name: str) -> Schema:
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def listed(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    """A list of `least` to `most` items."""
    schema: Schema = {"type": "array", "items": items}
    if least:
        schema["minItems"] = least
    return schema if most is None else {**schema, "maxItems": most}


def or_null(schema: Schema) -> Schema:
    """A field that may be null, which counts as absent."""
    if isinstance(schema.get("type"), str) and "const" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def answered(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these fields and no others, as the server writes them."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def _body(required: Mapping[str, Schema], optional: Mapping[str, Schema]) -> Schema:
    """An object that the server reads: no unknown fields, unless they are null."""
    neutral = {name: {"enum": [*values, None]} for name, values in NEUTRAL.items()}
    return {
        "type": "object",
        "properties": {
            **{name: {} for name in sorted(HARMLESS)},
            **neutral,
            **{name: or_null(schema) for name, schema in optional.items()},
            **required,
        },
        "required": list(required),
        "additionalProperties": {"type": "null"},
    }


def _either(schema: Schema, *cases: Schema) -> Schema:
    """A schema of which one case must hold as well."""
    return {**schema, "anyOf": list(cases)}


def _has(name: str, schema: Schema) -> Schema:
    return {"properties": {name: schema}, "required": [name]}


def _lacks(name: str, *neutral: Any) -> Schema:
    return {"properties": {name: {"enum": [None, *neutral]}}}


# -- what is read --------------------------------------------------------------------------------------------


def request_schemas(model_name: str, token: Schema, max_model_len: int) -> dict[str, Schema]:
    model = {"const": model_name}
    prompt_ids = listed(token, 1, max_model_len - 1)
    any_id = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
    decoding = _decoding(any_id)
    delivery = {
        "stream": FLAG,
        "stream_options": {
            "type": "object",
            "properties": {"include_usage": FLAG, "include_obfuscation": {}},
            "additionalProperties": False,
        },
        "return_token_ids": FLAG,
    }
    streams = [_lacks("stream_options", {}), _has("stream", {"const": True})]
    templates = {
        "tools": listed(ref("Tool")),
        "chat_template_kwargs": {
            "type": "object",
            "propertyNames": {"not": {"enum": sorted({*RESERVED_TEMPLATE_ARGUMENTS, "messages"})}},
        },
    }
    chat = _body(
        {"model": model, "messages": listed(ref("Message"), 1)},
        {
            **decoding,
            **delivery,
            **templates,
            "max_completion_tokens": {"type": "integer", "minimum": 1},
            "logprobs": FLAG,
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
            "tool_choice": _tool_choice(),
            "response_format": _response_format(),
            "parallel_tool_calls": FLAG,
            "best_of": {"const": 1},
            "echo": {"const": False},
        },
    )
    tops = [_lacks("top_logprobs", 0), _has("logprobs", {"const": True})]
    top = {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}
    prompt = {"anyOf": [{**TEXT, "minLength": 1}, prompt_ids]}
    text = _body(
        {"model": model, "prompt": {"anyOf": [*prompt["anyOf"], listed(prompt, 1, MAX_CHOICES)]}},
        {
            **decoding,
            **delivery,
            "logprobs": top,
            "response_format": _response_format(),
            "echo": FLAG,
            "add_special_tokens": FLAG,
            "best_of": {"const": 1},
            "suffix": {"const": ""},
        },
    )
    sampling = _body({}, {**decoding, "logprobs": top, "detokenize": FLAG})
    tokens = _body(
        {"token_ids": prompt_ids},
        {"model": {"enum": [model_name, ""]}, **delivery, "sampling_params": sampling},
    )
    wide = {"add_special_tokens": FLAG, "return_token_strs": FLAG, "model": {}}
    return {
        "Tool": _tool(),
        "Message": _message(),
        "ChatRequest": {**chat, "allOf": [{"anyOf": streams}, {"anyOf": tops}]},
        "CompletionRequest": {
            **text,
            "allOf": [{"anyOf": streams}, {"anyOf": [_lacks("logprobs"), _lacks("echo", False)]}],
        },
        "GenerateRequest": _either(tokens, *streams),
        "DerenderRequest": _derender(ref("ChatRequest"), listed(any_id, 1), model),
        "TokenizeRequest": {
            "anyOf": [
                _body({"prompt": TEXT}, {**wide, **templates, "messages": {"type": "null"}}),
                _body(
                    {"messages": listed(ref("Message"), 1)},
                    {**wide, **templates, "prompt": {"type": "null"}},
                ),
            ]
        },
        "DetokenizeRequest": _body({"tokens": listed(any_id, 1)}, {"model": model}),
        "ReloadRequest": {
            "type": "object",
            "properties": {
                "method": {"const": "reload_weights"},
                "kwargs": answered({"weights_path": {**TEXT, "description": "a directory of safetensors"}}),
                "args": {"enum": [None, []]},
            },
            "required": ["method", "kwargs"],
        },
        "VersionRequest": {
            "type": "object",
            "properties": {"new_version": {**TEXT, "minLength": 1}},
            "required": ["new_version"],
        },
    }


def _derender(chat: Schema, ids: Schema, model: Schema) -> Schema:
    ends = {"finish_reason": {"enum": _ENDS}}
    choice = {"type": "object", "properties": {"token_ids": ids, **ends}, "required": ["token_ids"]}
    generated = {"type": "object", "properties": {"choices": listed(choice, 1)}, "required": ["choices"]}
    return _body(
        {"generate_response": generated, "chat_request": chat},
        {"model": model, "prompt_token_ids": ids, "prompt_tokens": {}, "stream": {"const": False}},
    )


def _decoding(token: Schema) -> dict[str, Schema]:
    stop = {**TEXT, "minLength": 1}
    return {
        "max_tokens": {"type": "integer", "minimum": 1},
        "temperature": {"type": "number", "minimum": 0, "maximum": MAX_TEMPERATURE},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1},
        "min_p": {"type": "number", "minimum": 0, "maximum": 1},
        "stop": {"anyOf": [stop, listed(stop, 0, MAX_STOP)]},
        "stop_token_ids": listed(token),
        "seed": {"type": "integer"},
        "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        "ignore_eos": FLAG,
    }


def _tool_choice() -> Schema:
    named = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
    form = {"type": {"const": "function"}, "function": named}
    return {
        "anyOf": [
            {"enum": ["auto", "none", "required"]},
            {"type": "object", "properties": form, "required": list(form)},
        ]
    }


def _response_format() -> Schema:
    named = answered({"schema": {"type": "object"}}, {"name": {}, "strict": {}, "description": {}})
    return {
        "anyOf": [
            answered({"type": {"enum": ["text", "json_object"]}}),
            answered({"type": {"const": "json_schema"}, "json_schema": named}),
        ]
    }


def _tool() -> Schema:
    function = {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}
    return {"type": "object", "properties": {"function": function}, "required": ["function"]}


def _message() -> Schema:
    """With calls the content may be left out, and only the assistant has calls. An empty list is as null."""
    absent: Schema = {"enum": [None, []]}
    part = {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": TEXT},
        "required": ["type", "text"],
    }
    content = {"anyOf": [TEXT, listed(part)]}
    called = {"type": "object", "properties": {"name": TEXT, "arguments": TEXT}}
    called["required"] = ["name", "arguments"]
    call = {"type": "object", "properties": {"function": called}, "required": ["function"]}
    names = ("name", "tool_call_id", "reasoning", "reasoning_content")
    fields = {name: {"anyOf": [TEXT, absent]} for name in names}
    plain = {"role": {"enum": _ROLES}, "content": content}
    calling = {"role": {"const": "assistant"}, "tool_calls": listed(call, 1)}
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {**fields, **needed, **others},
                "required": list(needed),
                "additionalProperties": absent,
            }
            for needed, others in (
                (plain, {"tool_calls": absent}),
                (calling, {"content": or_null(content)}),
            )
        ]
    }


# -- what is answered ----------------------------------------------------------------------------------------


def answer_schemas() -> dict[str, Schema]:
    ids = {"token_ids": listed(COUNT)}
    prompt_ids = {"prompt_token_ids": listed(COUNT)}
    index, versions = {"index": COUNT}, {"weight_versions": listed(ref("WeightSpan"))}
    ends, calls_end = {"enum": _ENDS}, {"enum": [*_ENDS, "tool_calls"]}
    chat_logs, text_logs = or_null(ref("ChatLogprobs")), or_null(ref("TextLogprobs"))
    message = answered(
        {"role": {"const": "assistant"}, "content": or_null(TEXT)},
        {"reasoning_content": TEXT, "tool_calls": listed(ref("ToolCall"), 1)},
    )
    delta = answered(
        {},
        {
            "role": {"const": "assistant"},
            "content": TEXT,
            "reasoning_content": TEXT,
            "tool_calls": listed(ref("ToolCallDelta"), 1),
        },
    )
    chat = {**index, "message": message, "logprobs": chat_logs, "finish_reason": calls_end, **versions}
    text = {**index, "text": TEXT, "logprobs": text_logs}
    tokens = {**index, **ids, "logprobs": chat_logs}
    return {
        **_shared_answers(),
        "ChatCompletion": _completion("chat.completion", answered(chat, ids), prompt_ids),
        "ChatChunk": _chunk(
            "chat.completion.chunk",
            {**index, "delta": delta, "logprobs": chat_logs, "finish_reason": or_null(calls_end)},
            {**versions, **ids},
            prompt_ids,
        ),
        "Completion": _completion(
            "text_completion", answered({**text, "finish_reason": ends, **versions}, {**prompt_ids, **ids})
        ),
        "CompletionChunk": _chunk(
            "text_completion",
            {**text, "finish_reason": or_null(ends)},
            {**versions, **prompt_ids, **ids},
        ),
        "Generation": answered(
            {
                "request_id": TEXT,
                "choices": listed(answered({**tokens, "finish_reason": ends, **versions})),
                "prompt_logprobs": {"type": "null"},
            }
        ),
        "GenerationChunk": answered(
            {
                "request_id": TEXT,
                "choices": listed(answered({**tokens, "finish_reason": or_null(ends)}, versions)),
            },
            {"usage": ref("Usage")},
        ),
    }


def _shared_answers() -> dict[str, Schema]:
    error = {"message": TEXT, "type": {"enum": ["invalid_request_error", "server_error"]}}
    named = {"token": TEXT, "logprob": {"type": "number"}, "bytes": listed({**COUNT, "maximum": 255})}
    called = answered({"name": TEXT, "arguments": TEXT})
    call = {"id": TEXT, "type": {"const": "function"}, "function": called}
    tops = {"type": "object", "additionalProperties": {"type": "number"}}
    return {
        "Error": answered({"error": answered({**error, "param": or_null(TEXT), "code": or_null(TEXT)})}),
        "Usage": answered(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT)),
        "WeightSpan": answered({"version": TEXT, "start": COUNT, "end": COUNT}),
        "ToolCall": answered(call),
        "ToolCallDelta": answered({"index": COUNT, **call}),
        "ChatLogprobs": answered(
            {
                "content": listed(answered({**named, "top_logprobs": listed(answered(named))})),
                "refusal": {"type": "null"},
            }
        ),
        "TextLogprobs": answered(
            {
                "tokens": listed(TEXT),
                "token_logprobs": listed({"type": "number"}),
                "top_logprobs": or_null(listed(or_null(tops))),
                "text_offset": listed(COUNT),
            }
        ),
        "Model": answered(
            {
                "id": TEXT,
                "object": {"const": "model"},
                "created": COUNT,
                "owned_by": TEXT,
                "max_model_len": COUNT,
            }
        ),
    }


def _completion(kind: str, choice: Schema, optional: Mapping[str, Schema] | None = None) -> Schema:
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT}
    return answered({**head, "choices": listed(choice, 1), "usage": ref("Usage")}, optional)


def _chunk(
    kind: str,
    choice: Mapping[str, Schema],
    sometimes: Mapping[str, Schema],
    optional: Mapping[str, Schema] | None = None,
) -> Schema:
    head = {"id": TEXT, "object": {"const": kind}, "created": COUNT, "model": TEXT}
    return answered(
        {**head, "choices": listed(answered(choice, sometimes))}, {**(optional or {}), "usage": ref("Usage")}
    )
