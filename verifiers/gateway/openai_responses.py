"""OpenAI's Responses API, as the gateway reads and answers it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as Params
from pydantic import TypeAdapter

from verifiers.gateway.calls import (
    SAMPLING_ARGUMENTS,
    AgentCall,
    RefusedCallError,
    joined_text,
    named_event,
    note_left_out,
    one_system_message,
    reasoning_of,
    refuse_unsupported,
    text_pieces,
    validated_body,
    without_none,
)
from verifiers.gateway.session import Session, WireFormat, read_arguments
from verifiers.inference.endpoint import CHAT
from verifiers.types import ToolCall

_BODY: TypeAdapter[Any] = TypeAdapter(Params)
_READ = frozenset(
    {"model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text",
     "reasoning", "previous_response_id", "stream", "stream_options", "include", "metadata", "store", "user",
     "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "max_tool_calls",
     "client_metadata"}
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {"background": (False,), "truncation": ("disabled",)}
_TEXT = ("input_text", "output_text", "text")
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""Parameters of the function that a `custom` tool is to a chat model: its one free text."""


class ResponsesWire(WireFormat):
    """`POST /v1/responses`."""

    def read(self, body: Any, session: Session) -> AgentCall:
        # items and tools apart: the SDK's types ask for fields that the API lets one leave out
        checked = validated_body(_BODY, body, input="", tools=[])
        refuse_unsupported(body, _READ | SAMPLING_ARGUMENTS, _NEUTRAL)
        said: list[dict[str, Any]] = []
        if checked.get("previous_response_id"):
            said = list(session.conversation(checked["previous_response_id"]))
        given = body.get("input") or ""
        if not isinstance(given, (str, list)):
            raise RefusedCallError("input: give a text or a list of items.")
        if isinstance(given, list):
            said += _messages(given, session)
        elif given or not said:
            said.append({"role": "user", "content": given})
        # instructions are of one call: what is continued by its id is `said`
        instructions = checked.get("instructions")
        messages = [{"role": "system", "content": instructions}, *said] if instructions else said
        arguments: dict[str, Any] = {"messages": one_system_message(messages)}
        tools = [_function(tool, space) for tool, space in _members(body.get("tools") or ())]
        if tools:
            arguments["tools"] = tools
            choice = body.get("tool_choice")
            if choice is not None:
                arguments["tool_choice"] = _tool_choice(choice)
            if body.get("parallel_tool_calls") is not None:
                arguments["parallel_tool_calls"] = body["parallel_tool_calls"]
        effort = (body.get("reasoning") or {}).get("effort")
        if effort:
            arguments["reasoning_effort"] = effort
        wanted = (body.get("text") or {}).get("format") or {"type": "text"}
        if wanted["type"] != "text":
            fields = {name: value for name, value in wanted.items() if name != "type"}
            arguments["response_format"] = {"type": wanted["type"], **({"json_schema": fields} if fields else {})}
        return AgentCall(
            CHAT,
            checked.get("model") or session.model,
            arguments,
            {name: body[name] for name in body.keys() & SAMPLING_ARGUMENTS},
            checked.get("max_output_tokens"),
            bool(body.get("stream")),
            {
                name: body.get(name)
                for name in ("instructions", "tools", "tool_choice", "metadata", "previous_response_id")
            }
            | {"said": said},
        )

    def answer(self, completion: Mapping[str, Any], call: AgentCall, session: Session) -> dict[str, Any]:
        choice = completion["choices"][0]
        message = choice["message"]
        output: list[dict[str, Any]] = []
        if reasoning_of(message):
            text = {"type": "reasoning_text", "text": reasoning_of(message)}
            output.append({"id": _new("rs"), "type": "reasoning", "summary": [], "content": [text]})
        is_cut = choice["finish_reason"] == "length"
        status = "incomplete" if is_cut else "completed"
        if message.get("content") or not message.get("tool_calls"):
            part: dict[str, Any] = {"type": "output_text", "text": message.get("content") or "", "annotations": []}
            if message.get("refusal"):
                part = {"type": "refusal", "refusal": message["refusal"]}
            output.append(
                {"id": _new("msg"), "type": "message", "role": "assistant", "status": status, "content": [part]}
            )
        output += [_call_item(made, call.echo["tools"] or ()) for made in message.get("tool_calls") or ()]
        usage = completion.get("usage") or {}
        read, sampled = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        response_id = _new("resp")
        session.remember_conversation(response_id, [*call.echo["said"], dict(message)])
        return {
            "id": response_id,
            "object": "response",
            "created_at": completion.get("created") or int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": call.model,
            "output": output,
            "instructions": call.echo["instructions"],
            "metadata": call.echo["metadata"] or {},
            "parallel_tool_calls": bool(call.arguments.get("parallel_tool_calls", True)),
            "previous_response_id": call.echo["previous_response_id"],
            "tool_choice": call.echo["tool_choice"] or "auto",
            "tools": call.echo["tools"] or [],
            "temperature": None,
            "top_p": None,
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + sampled,
            },
        }

    def events(self, answer: Mapping[str, Any], call: AgentCall) -> Iterator[bytes]:
        for number, event in enumerate(_events(answer)):
            yield named_event({**event, "sequence_number": number})

    def error_event(self, refusal: RefusedCallError) -> bytes:
        fields = {"code": refusal.code, "message": str(refusal), "param": None, "sequence_number": 0}
        return named_event({"type": "error", **fields})


def _events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for place, item in enumerate(answer["output"]):
        at = {"output_index": place, "item_id": item["id"]}
        empty: dict[str, Any] = {name: "" for name in ("arguments", "input") if name in item} or {"content": []}
        added = {**item, **empty, **({"status": "in_progress"} if "status" in item else {})}
        yield {"type": "response.output_item.added", "output_index": place, "item": added}
        if item["type"] == "function_call":
            named = {**at, "name": item["name"]}
            for piece in text_pieces(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **at, "delta": piece}
            yield {"type": "response.function_call_arguments.done", **named, "arguments": item["arguments"]}
        elif item["type"] == "custom_tool_call":
            for piece in text_pieces(item["input"]):
                yield {"type": "response.custom_tool_call_input.delta", **at, "delta": piece}
            yield {"type": "response.custom_tool_call_input.done", **at, "input": item["input"]}
        else:
            yield from _content_events(item["content"], at)
        yield {"type": "response.output_item.done", "output_index": place, "item": item}
    kind = "response.completed" if answer["status"] == "completed" else "response.incomplete"
    yield {"type": kind, "response": answer}


def _content_events(parts: Iterable[Mapping[str, Any]], item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for index, part in enumerate(parts):
        at = {**item, "content_index": index}
        name = part["type"]
        shown: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        field = "refusal" if name == "refusal" else "text"
        yield {"type": "response.content_part.added", **at, "part": {**part, field: ""}}
        for piece in text_pieces(part[field]):
            yield {"type": f"response.{name}.delta", **at, "delta": piece, **shown}
        yield {"type": f"response.{name}.done", **at, field: part[field], **shown}
        yield {"type": "response.content_part.done", **at, "part": part}


def _messages(items: Iterable[Any], session: Session) -> list[dict[str, Any]]:
    """Return input items as chat messages: what the policy said in one answer is one message again."""
    messages: list[dict[str, Any]] = []
    for place, given in enumerate(items):
        if not isinstance(given, dict):
            raise RefusedCallError(f"input.{place}: give an object.")
        item = without_none(given)
        kind = item.get("type", "message")
        if kind == "message":
            role, content = _text(item, "role", place), _content(item.get("content"), f"{place}.content")
            if role not in ("user", "assistant", "system", "developer"):
                raise RefusedCallError(f"input.{place}.role: {role!r:.40} is none of the API's roles.")
            if role == "assistant" and _is_open(messages):
                messages[-1]["content"] = content
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": content})
        elif kind == "reasoning":
            text = _content(item.get("content") or "", f"{place}.content")
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif kind in ("function_call", "custom_tool_call"):
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            call_id, name = _text(item, "call_id", place), _text(item, "name", place)
            if kind == "custom_tool_call":
                arguments = json.dumps({"input": _text(item, "input", place)}, ensure_ascii=False)
            else:
                arguments = _text(item, "arguments", place)
            written = session.arguments_text(call_id, arguments)
            made = ToolCall(call_id, _chat_name(name, item.get("namespace")), written)
            messages[-1].setdefault("tool_calls", []).append(made)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _content(item.get("output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": output})
        else:
            raise RefusedCallError(
                f"input.{place} is of type {kind!r}, which is not supported here; send messages, function calls and "
                "their outputs.",
                code="unsupported_value",
            )
    return messages


def _text(item: Mapping[str, Any], name: str, place: int | str) -> str:
    if not isinstance(item.get(name), str):
        raise RefusedCallError(f"input.{place}.{name}: give a text.")
    return str(item[name])


def _content(value: Any, place: str) -> Any:
    if not isinstance(value, list):
        return _text({"": value}, "", place)
    return joined_text([_part(part, place) for part in value], ("text",))


def _is_open(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message is the policy's reasoning, whose text is still to come."""
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def _part(part: Any, place: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in (*_TEXT, "reasoning_text"):
        return {"type": "text", "text": _text(part, "text", place)}
    if kind == "refusal":
        return {"type": "text", "text": _text(part, "refusal", place)}
    if kind == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": _text(part, "image_url", place)}}
    raise RefusedCallError(f"input.{place} has a part of type {kind!r:.40}, which is not supported here.")


def _members(tools: Any, namespace: str | None = None) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """Yield the tools that the policy can call, each with the namespace it stands in; the provider's are left out."""
    if not isinstance(tools, Sequence) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedCallError("tools: give a list of objects.")
    for tool in tools:
        kind = tool.get("type")
        if kind not in ("function", "namespace", "custom"):
            note_left_out(f"tools of type {kind!r:.40}")
        elif not isinstance(tool.get("name"), str):
            raise RefusedCallError(f"a tool of type {kind!r} has no name.")
        elif kind == "namespace":
            yield from _members(tool.get("tools") or (), tool["name"])
        else:
            yield tool, namespace


def _function(tool: Mapping[str, Any], namespace: str | None) -> dict[str, Any]:
    known = ("description", "strict") if tool["type"] == "custom" else ("description", "parameters", "strict")
    fields = {name: tool[name] for name in known if tool.get(name) is not None}
    if tool["type"] == "custom":
        fields["parameters"] = _CUSTOM
    return {"type": "function", "function": {"name": _chat_name(tool["name"], namespace), **fields}}


def _chat_name(name: str, namespace: str | None) -> str:
    """Return what a function of a namespace is called where there are none."""
    return name if namespace is None else f"{namespace}__{name}"


def _call_item(made: Mapping[str, Any], tools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a call as the agent named its tool: within its namespace, or as the free text of a custom tool."""
    name, arguments = made["function"]["name"], made["function"]["arguments"]
    item = {"call_id": made["id"], "status": "completed", "name": name}
    is_custom = False
    for tool, space in _members(tools):
        if _chat_name(tool["name"], space) == name:
            item |= {"name": tool["name"], **({} if space is None else {"namespace": space})}
            is_custom = tool.get("type") == "custom"
    if not is_custom:
        return {"id": _new("fc"), "type": "function_call", **item, "arguments": arguments}
    said = read_arguments(arguments)
    text = said.get("input", said.get("arguments"))
    given = text if isinstance(text, str) else arguments
    return {"id": _new("ctc"), "type": "custom_tool_call", **item, "input": given}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise RefusedCallError(f"tool_choice={choice!r:.100} is not supported here.", code="unsupported_value")
    return {"type": "function", "function": {"name": choice["name"]}}


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
