"""OpenAI's Responses API, as the gateway reads and answers it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from openai.types.responses import ResponseInputItemParam
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as Params
from pydantic import TypeAdapter

from verifiers.gateway.calls import (
    SAMPLING_ARGUMENTS,
    AgentCall,
    RefusedCallError,
    function_call,
    joined_text,
    named_event,
    openai_error,
    reasoning_of,
    refuse_unsupported,
    text_pieces,
    validated,
    validated_body,
    without_none,
)
from verifiers.gateway.session import Session
from verifiers.inference.endpoint import CHAT

_BODY: TypeAdapter[Any] = TypeAdapter(Params)
_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItemParam)
_READ = frozenset(
    {"model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "text",
     "reasoning", "previous_response_id", "stream", "stream_options", "include", "metadata", "store", "user",
     "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "max_tool_calls"}
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {"background": (False,), "truncation": ("disabled",)}
_TEXT = ("input_text", "output_text", "text")


class ResponsesWire:
    """`POST /v1/responses`."""

    keep_alive = b": generating\n\n"

    def read(self, body: Any, session: Session) -> AgentCall:
        checked = validated_body(_BODY, body, input="")
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
        arguments: dict[str, Any] = {"messages": messages}
        if body.get("tools"):
            arguments["tools"] = [_tool(tool) for tool in body["tools"]]
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
            },
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
            output.append(
                {"id": _new("msg"), "type": "message", "role": "assistant", "status": status, "content": [part]}
            )
        output += [
            {
                "id": _new("fc"),
                "type": "function_call",
                "call_id": made["id"],
                "name": made["function"]["name"],
                "arguments": made["function"]["arguments"],
                "status": "completed",
            }
            for made in message.get("tool_calls") or ()
        ]
        usage = completion.get("usage") or {}
        read, sampled = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        response_id = _new("resp")
        messages = list(call.arguments["messages"])[1 if call.echo["instructions"] else 0 :]
        session.remember_conversation(response_id, [*messages, dict(message)])
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

    def error(self, refusal: RefusedCallError) -> dict[str, Any]:
        return openai_error(refusal)

    def error_event(self, refusal: RefusedCallError) -> bytes:
        fields = {"code": refusal.code, "message": str(refusal), "param": None, "sequence_number": 0}
        return named_event({"type": "error", **fields})


def _events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for place, item in enumerate(answer["output"]):
        at = {"output_index": place, "item_id": item["id"]}
        empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
        added = {**item, **empty, **({"status": "in_progress"} if "status" in item else {})}
        yield {"type": "response.output_item.added", "output_index": place, "item": added}
        if item["type"] == "function_call":
            named = {**at, "name": item["name"]}
            for piece in text_pieces(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **at, "delta": piece}
            yield {"type": "response.function_call_arguments.done", **named, "arguments": item["arguments"]}
        else:
            yield from _content_events(item["content"], at)
        yield {"type": "response.output_item.done", "output_index": place, "item": item}
    kind = "response.completed" if answer["status"] == "completed" else "response.incomplete"
    yield {"type": kind, "response": answer}


def _content_events(parts: Iterable[Mapping[str, Any]], item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for index, part in enumerate(parts):
        at = {**item, "content_index": index}
        name = "reasoning_text" if part["type"] == "reasoning_text" else "output_text"
        shown: dict[str, Any] = {} if name == "reasoning_text" else {"logprobs": []}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        for piece in text_pieces(part["text"]):
            yield {"type": f"response.{name}.delta", **at, "delta": piece, **shown}
        yield {"type": f"response.{name}.done", **at, "text": part["text"], **shown}
        yield {"type": "response.content_part.done", **at, "part": part}


def _messages(items: Iterable[Any], session: Session) -> list[dict[str, Any]]:
    """Return input items as chat messages: what the policy said in one answer is one message again."""
    messages: list[dict[str, Any]] = []
    for place, given in enumerate(items):
        if not isinstance(given, dict):
            raise RefusedCallError(f"input.{place}: give an object.")
        given = without_none(given)
        item = given if "type" in given or "role" not in given else {"type": "message", **given}
        validated(_ITEM, item, f"input.{place}")
        kind = item.get("type")
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            content = joined_text(item["content"], _TEXT)
            if isinstance(content, list):
                content = [_part(part, place) for part in content]
            if role == "assistant" and _is_open(messages):
                messages[-1]["content"] = content
            else:
                messages.append({"role": role, "content": content})
        elif kind == "reasoning":
            text = "".join(part["text"] for part in item.get("content") or ())
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif kind == "function_call":
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            arguments = session.arguments_text(item["call_id"], item["arguments"])
            made = function_call(item["call_id"], item["name"], arguments)
            messages[-1].setdefault("tool_calls", []).append(made)
        elif kind == "function_call_output":
            output = joined_text(item["output"], _TEXT)
            if not isinstance(output, str):
                output = [_part(part, place) for part in output]
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        else:
            raise RefusedCallError(
                f"input.{place} is of type {kind!r}, which is not supported here; send messages, function calls and "
                "their outputs.",
                code="unsupported_value",
            )
    return messages


def _is_open(messages: list[dict[str, Any]]) -> bool:
    """Return whether the last message is the policy's reasoning, whose text is still to come."""
    last = messages[-1] if messages else {}
    return "reasoning_content" in last and not last["content"] and "tool_calls" not in last


def _part(part: Mapping[str, Any], place: int) -> dict[str, Any]:
    if part["type"] in _TEXT:
        return {"type": "text", "text": part["text"]}
    if part["type"] == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    raise RefusedCallError(f"input.{place} has a part of type {part['type']!r}, which is not supported here.")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RefusedCallError(
            f"a tool of type {tool.get('type')!r} runs on OpenAI's servers; give functions alone.",
            code="unsupported_value",
        )
    return {"type": "function", "function": {n: v for n, v in tool.items() if n != "type" and v is not None}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise RefusedCallError(f"tool_choice={choice!r:.100} is not supported here.", code="unsupported_value")
    return {"type": "function", "function": {"name": choice["name"]}}


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
