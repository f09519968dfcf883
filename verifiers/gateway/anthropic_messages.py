"""Anthropic's Messages API, as the gateway reads and answers it. Needs the package `anthropic` for its types."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from anthropic.types import MessageParam
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming as Params
from pydantic import TypeAdapter

from verifiers.gateway.calls import (
    SAMPLING_ARGUMENTS,
    AgentCall,
    RefusedCallError,
    joined_contents,
    joined_text,
    named_event,
    note_left_out,
    one_system_message,
    reasoning_of,
    refuse_unsupported,
    text_pieces,
    validated,
    validated_body,
)
from verifiers.gateway.session import Session, WireFormat, read_arguments
from verifiers.inference.endpoint import CHAT
from verifiers.types import ToolCall

_BODY: TypeAdapter[Any] = TypeAdapter(Params)
_COUNT: TypeAdapter[Any] = TypeAdapter(MessageCountTokensParams)
_MESSAGE: TypeAdapter[Any] = TypeAdapter(MessageParam)
_READ = frozenset(
    {"model", "messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream", "metadata",
     "thinking", "service_tier", "cache_control", "betas", "output_config", "inference_geo", "context_management"}
)  # fmt: skip
_BILLING = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    409: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error",
    501: "api_error",
}  # fmt: skip


class MessagesWire(WireFormat):
    """`POST /v1/messages`; with `counts_only`, `POST /v1/messages/count_tokens`."""

    keep_alive = named_event({"type": "ping"})

    def __init__(self, *, counts_only: bool = False) -> None:
        self._counts_only = counts_only

    def read(self, body: Any, session: Session) -> AgentCall:
        checked = validated_body(_COUNT if self._counts_only else _BODY, body, messages=[])
        if body.get("thread") is not None:
            # the SDK goes on without threads where the error has this code
            raise RefusedCallError("thread is not supported here; leave it out.", code="thread_unsupported_request")
        refuse_unsupported(body, _READ | SAMPLING_ARGUMENTS, {"mcp_servers": ([],)})
        given = body.get("messages")
        if not isinstance(given, list):
            raise RefusedCallError("messages: give a list.")
        messages: list[dict[str, Any]] = []
        system = joined_text(_without_billing(body.get("system")), ("text",))
        if system:
            messages.append({"role": "system", "content": system})
        for place, message in enumerate(given):
            validated(_MESSAGE, message, f"messages.{place}")
            messages += _messages(message, place, session)
        if messages and messages[-1]["role"] == "assistant" and not self._counts_only:
            text = "the last message is the assistant's, and answers are not continued here; end with the user's."
            raise RefusedCallError(text, code="unsupported_value")
        arguments: dict[str, Any] = {"messages": _alternating(one_system_message(messages))}
        if body.get("tools"):
            arguments["tools"] = [_tool(tool) for tool in body["tools"] if _is_own(tool)]
        if arguments.get("tools"):
            choice = body.get("tool_choice") or {"type": "auto"}
            arguments["tool_choice"] = _CHOICES.get(choice["type"]) or {
                "type": "function",
                "function": {"name": choice["name"]},
            }
            if choice.get("disable_parallel_tool_use"):
                arguments["parallel_tool_calls"] = False
        _check_context(body.get("context_management") or {})
        if body.get("stop_sequences"):
            arguments["stop"] = body["stop_sequences"]
        wanted = body.get("output_config") or {}
        if wanted.get("effort"):
            arguments["reasoning_effort"] = wanted["effort"]
        if wanted.get("format"):
            schema = {"name": "answer", "schema": wanted["format"]["schema"], "strict": True}
            arguments["response_format"] = {"type": "json_schema", "json_schema": schema}
        return AgentCall(
            CHAT,
            checked["model"],
            arguments,
            {name: body[name] for name in body.keys() & SAMPLING_ARGUMENTS},
            checked.get("max_tokens"),
            bool(body.get("stream")),
        )

    def answer(self, completion: Mapping[str, Any], call: AgentCall, session: Session) -> dict[str, Any]:
        choice = completion["choices"][0]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        if reasoning_of(message):
            content.append({"type": "thinking", "thinking": reasoning_of(message), "signature": ""})
        refused = message.get("refusal") or choice["finish_reason"] == "content_filter"
        if said := message.get("content") or message.get("refusal"):
            content.append({"type": "text", "text": said, "citations": None})
        content += [
            {
                "type": "tool_use",
                "id": made["id"],
                "name": made["function"]["name"],
                "input": read_arguments(made["function"]["arguments"]),
            }
            for made in message.get("tool_calls") or ()
        ]
        matched = choice.get("stop_reason")
        reason = "end_turn"
        if choice["finish_reason"] == "length":
            reason = "max_tokens"
        elif refused:
            reason = "refusal"
        elif message.get("tool_calls"):
            reason = "tool_use"
        elif isinstance(matched, str) and matched in (call.arguments.get("stop") or ()):
            reason = "stop_sequence"
        usage = completion.get("usage") or {}
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": call.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": matched if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": usage.get("prompt_tokens") or 0,
                "output_tokens": usage.get("completion_tokens") or 0,
            },
        }

    def events(self, answer: Mapping[str, Any], call: AgentCall) -> Iterator[bytes]:
        for event in _events(answer):
            yield named_event(event)

    def error(self, refusal: RefusedCallError) -> dict[str, Any]:
        kind = _ERRORS.get(refusal.status, "api_error")
        text = str(refusal)
        if refusal.code == "context_length_exceeded":
            # clients recognize the error by these words
            text = f"prompt is too long: {text}"
        details = {"details": {"error_code": refusal.code}} if refusal.code == "thread_unsupported_request" else {}
        return {"type": "error", "error": {"type": kind, "message": text, **details}, "request_id": None}

    def error_event(self, refusal: RefusedCallError) -> bytes:
        return named_event(self.error(refusal))


def _events(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    usage = answer["usage"]
    begun = {
        **answer,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(answer["content"]):
        kind = block["type"]
        empty: dict[str, Any] = {"input": {}} if kind == "tool_use" else {kind: ""}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        text = json.dumps(block["input"], ensure_ascii=False) if kind == "tool_use" else block[kind]
        delta, name = {
            "tool_use": ("input_json_delta", "partial_json"),
            "thinking": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
        }[kind]
        for piece in text_pieces(text):
            yield {"type": "content_block_delta", "index": index, "delta": {"type": delta, name: piece}}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}


def _messages(message: Mapping[str, Any], place: int, session: Session) -> list[dict[str, Any]]:
    """Return one message as chat messages: results of tools are messages of their own, before what the user says."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thinking = ""
    for block in content:
        kind = block["type"]
        if kind == "thinking":
            thinking += block["thinking"]
        elif kind == "tool_use":
            arguments = session.arguments_text(block["id"], json.dumps(block["input"], ensure_ascii=False))
            calls.append(ToolCall(block["id"], block["name"], arguments))
        elif kind == "tool_result":
            output = joined_text(block.get("content") or "", ("text",))
            if block.get("is_error") and isinstance(output, str) and "error" not in output[:40].lower():
                output = f"Error: {output}"
            if not isinstance(output, str):
                output = [_part(part, place) for part in output]
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": output})
        else:
            parts.append(_part(block, place))
    said: dict[str, Any] = {"role": role, "content": joined_text(parts, ("text",))}
    if thinking:
        said["reasoning_content"] = thinking
    if calls:
        said["tool_calls"] = calls
    return [*results, *([said] if parts or calls or thinking or not results else [])]


def _part(block: Mapping[str, Any], place: int) -> dict[str, Any]:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    if block["type"] == "image" and block["source"]["type"] in ("base64", "url"):
        source = block["source"]
        url = source.get("url") or f"data:{source['media_type']};base64,{source['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise RefusedCallError(
        f"messages.{place} has a block of type {block['type']!r}, which is not supported here; send text, images, "
        "tool calls and their results.",
        code="unsupported_value",
    )


def _is_own(tool: Mapping[str, Any]) -> bool:
    """Return whether the agent runs a tool; one that Anthropic's servers run is left out."""
    is_own = tool.get("type") in (None, "custom") and "input_schema" in tool
    if not is_own:
        note_left_out(f"tools of type {tool.get('type')!r:.40}")
    return is_own


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def _check_context(management: Any) -> None:
    """Refuse edits of the conversation that would change what the policy sees."""
    edits = management.get("edits") or [] if isinstance(management, dict) else management
    for edit in edits if isinstance(edits, list) else [edits]:
        named = edit if isinstance(edit, dict) else {}
        keeps_all = str(named.get("type")).startswith("clear_thinking") and named.get("keep") == "all"
        if not keeps_all:
            text = (
                f"context_management: the edit {edit!r:.100} is not supported here; edit the messages that you send."
            )
            raise RefusedCallError(text, code="unsupported_value")


def _without_billing(system: Any) -> Any:
    """Return the system prompt without Claude Code's billing header, which differs from call to call."""
    if isinstance(system, list):
        return [part for part in system if not str(part.get("text", "")).startswith(_BILLING)]
    return system


def _alternating(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with neighbours of one role as one, as Anthropic's API takes them."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last: dict[str, Any] = joined[-1] if joined else {"role": ""}
        if message["role"] != last["role"] or message["role"] == "tool":
            joined.append(message)
            continue
        last["content"] = joined_contents([one["content"] for one in (last, message) if one["content"]])
        for name in ("reasoning_content", "tool_calls"):
            if message.get(name):
                last[name] = last[name] + message[name] if last.get(name) else message[name]
    return joined
