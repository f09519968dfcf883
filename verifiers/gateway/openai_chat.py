"""OpenAI's chat and text completions, as the gateway reads and answers them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextParams
from pydantic import Field, TypeAdapter

from verifiers.gateway.calls import (
    SAMPLING_ARGUMENTS,
    AgentCall,
    RefusedCallError,
    data_event,
    joined_text,
    reasoning_of,
    refuse_unsupported,
    text_pieces,
    validated,
    validated_body,
    without_none,
)
from verifiers.gateway.session import Session, WireFormat
from verifiers.inference.endpoint import CHAT, COMPLETIONS

_BODY: dict[str, TypeAdapter[Any]] = {CHAT: TypeAdapter(ChatParams), COMPLETIONS: TypeAdapter(TextParams)}
# by role, so that each message is checked against one type
_MESSAGES: TypeAdapter[Any] = TypeAdapter(list[Annotated[ChatCompletionMessageParam, Field(discriminator="role")]])

_CARRIED = frozenset(
    {"messages", "prompt", "tools", "tool_choice", "parallel_tool_calls", "stop", "reasoning_effort",
     "response_format", "chat_template_kwargs"}
)  # fmt: skip
# read here, or without a bearing on the answer
_READ = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "user", "metadata", "store",
     "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "verbosity"}
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
}
# what clients keep beside the message that they were answered, and send back with it
_KEPT_BY_CLIENTS = frozenset({"annotations", "provider_specific_fields", "thinking_blocks"})
_LIMITS = ("max_completion_tokens", "max_tokens")
_TRACE = frozenset(
    {"token_ids", "prompt_token_ids", "sampling_mask", "weight_versions", "stop_reason", "prompt_logprobs"}
)


class OpenAIWire(WireFormat):
    """`POST /v1/chat/completions` and `POST /v1/completions`."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, body: Any, session: Session) -> AgentCall:
        # messages apart: the SDK's type of them is tried role by role
        checked = validated_body(_BODY[self._path], body, **({"messages": []} if self._path == CHAT else {}))
        refuse_unsupported(body, _CARRIED | _READ | SAMPLING_ARGUMENTS, _NEUTRAL)
        arguments = {name: body[name] for name in body.keys() & _CARRIED if body[name] is not None}
        if not isinstance(arguments.get("chat_template_kwargs", {}), dict):
            raise RefusedCallError("chat_template_kwargs: give an object.")
        if self._path == CHAT:
            given = body.get("messages")
            if not isinstance(given, list):
                raise RefusedCallError("messages: give a list.")
            messages = [without_none(each) if isinstance(each, dict) else each for each in given]
            validated(_MESSAGES, messages, "messages")
            arguments["messages"] = [_plain_message(message, session) for message in messages]
        elif not isinstance(body["prompt"], str):
            raise RefusedCallError("prompt: give one text; batches and token ids are not recorded as one rollout.")
        return AgentCall(
            self._path,
            checked["model"],
            arguments,
            {name: body[name] for name in body.keys() & SAMPLING_ARGUMENTS},
            next((checked[name] for name in _LIMITS if checked.get(name) is not None), None),
            bool(body.get("stream")),
            {
                "include_usage": bool((body.get("stream_options") or {}).get("include_usage")),
                "logprobs": bool(body.get("logprobs")),
            },
        )

    def answer(self, completion: Mapping[str, Any], call: AgentCall, session: Session) -> dict[str, Any]:
        choice = {name: value for name, value in completion["choices"][0].items() if name not in _TRACE}
        if not call.echo["logprobs"]:
            choice["logprobs"] = None
        return {
            **{name: value for name, value in completion.items() if name not in _TRACE},
            "id": completion.get("id") or f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion" if self._path == CHAT else "text_completion",
            "created": completion.get("created") or int(time.time()),
            "model": call.model,
            "choices": [choice],
        }

    def events(self, answer: Mapping[str, Any], call: AgentCall) -> Iterator[bytes]:
        chat = self._path == CHAT
        head = {
            "id": answer["id"],
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": answer["created"],
            "model": answer["model"],
        }
        choice = answer["choices"][0]
        if call.echo["include_usage"]:
            # as OpenAI has it: null in every event but the last
            head["usage"] = None

        def chunk(reason: str | None = None, **content: Any) -> bytes:
            return data_event(
                {**head, "choices": [{"index": 0, "logprobs": None, "finish_reason": reason, **content}]}
            )

        if chat:
            message = choice["message"]
            yield chunk(delta={"role": "assistant", "content": ""})
            told = {"reasoning_content": reasoning_of(message), **{n: message.get(n) for n in ("content", "refusal")}}
            for name, text in told.items():
                for piece in text_pieces(text or ""):
                    yield chunk(delta={name: piece})
            for index, made in enumerate(message.get("tool_calls") or ()):
                yield chunk(delta={"tool_calls": [{"index": index, **made}]})
            yield chunk(choice["finish_reason"], delta={}, logprobs=choice.get("logprobs"))
        else:
            for piece in text_pieces(choice["text"]):
                yield chunk(text=piece)
            yield chunk(choice["finish_reason"], text="", logprobs=choice.get("logprobs"))
        if call.echo["include_usage"]:
            yield data_event({**head, "choices": [], "usage": answer.get("usage")})
        yield b"data: [DONE]\n\n"


def _plain_message(message: Mapping[str, Any], session: Session) -> dict[str, Any]:
    plain = {name: value for name, value in message.items() if name not in _KEPT_BY_CLIENTS}
    plain["content"] = joined_text(message.get("content"), ("text",))
    if plain["role"] == "developer":
        plain["role"] = "system"
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_as_sampled(made, session) for made in plain["tool_calls"]]
    return plain


def _as_sampled(made: Mapping[str, Any], session: Session) -> dict[str, Any]:
    function = made.get("function")
    if function is None:
        return dict(made)
    return {**made, "function": {**function, "arguments": session.arguments_text(made["id"], function["arguments"])}}
