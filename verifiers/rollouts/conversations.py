"""Which conversation a chat call goes on with, and what of the call has a counterpart in generation from ids."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.rollouts.wire import request_body

__all__ = ["ChatCall", "Conversations", "HeldAnswer", "read_chat_call"]

# fields that a chat call and vLLM's sampling parameters share
_SAMPLING = frozenset(
    {
        "bad_words", "frequency_penalty", "ignore_eos", "min_p", "min_tokens", "presence_penalty",
        "repetition_penalty", "seed", "stop", "stop_token_ids", "temperature", "top_k", "top_p",
    }
)  # fmt: skip
_REQUEST = frozenset({"cache_salt", "priority"})
# nothing in the answer depends on them
_LEFT_OUT = frozenset({"metadata", "return_token_ids", "store", "user", "logprobs"})
# values that ask for what is done anyway
_PLAIN: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "tool_choice": ("auto",),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning", "reasoning_content"}
)


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat call, taken apart.

    Attributes:
        keys: each message as a value that cannot change, for comparison; without its reasoning, which environments
            leave out when they repeat what the policy said.
        sampling: vLLM's sampling parameters.
        template_options: arguments of the chat template.
        chat_options: what reading the answer depends on.
        request_options: further fields of the request.
        context: what must be equal for one call to go on with another.
    """

    model: str
    messages: list[Mapping[str, Any]]
    keys: list[tuple[Any, ...]]
    tools: list[Mapping[str, Any]] | None
    sampling: dict[str, Any]
    template_options: dict[str, Any]
    chat_options: dict[str, Any]
    request_options: dict[str, Any]
    context: str


def read_chat_call(arguments: Mapping[str, Any]) -> ChatCall | str:
    """A chat call as it can be made by token ids, or a word for what in it cannot."""
    body = request_body(arguments)
    messages = body.pop("messages", None)
    model = body.pop("model", "")
    tools = body.pop("tools", None) or None
    template_options = body.pop("chat_template_kwargs", None) or {}
    sampling: dict[str, Any] = {"logprobs": 0}
    chat: dict[str, Any] = {}
    request: dict[str, Any] = {}
    limits = [body.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    limit = next((value for value in limits if value is not None), None)
    if limit is not None:
        sampling["max_tokens"] = limit
    for name, value in body.items():
        if name in _LEFT_OUT or value is None:
            continue
        if name in _SAMPLING:
            sampling[name] = value
        elif name in _REQUEST:
            request[name] = value
        elif name == "parallel_tool_calls":
            chat[name] = value
        elif value not in _PLAIN.get(name, ()):
            return f"{name}={value!r:.40}"
    if not isinstance(messages, list):
        return "messages that are no list"
    keys = [message_key(message) for message in messages]
    known = [key for key in keys if key is not None]
    if len(known) < len(keys):
        return "messages that are not text alone"
    for name, item in (("tools", tools), ("stop", sampling.get("stop")), ("chat_template_kwargs", template_options)):
        if item:
            chat[name] = item
    rendered_with = [tools, template_options] if tools or template_options else None
    context = model if rendered_with is None else model + json.dumps(rendered_with, sort_keys=True, default=str)
    return ChatCall(model, messages, known, tools, sampling, template_options, chat, request, context)


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """An answer of the policy and everything before it.

    Attributes:
        length: number of messages, the answer included.
    """

    keys: list[tuple[Any, ...]]
    context: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    answer: Mapping[str, Any]

    @property
    def length(self) -> int:
        return len(self.keys)


@dataclass(slots=True)
class Conversations:
    """Everything one rollout holds; more than one conversation where it branches or speaks in several."""

    _held: list[HeldAnswer] = field(default_factory=list)

    def hold(
        self, call: ChatCall, answer: Mapping[str, Any], prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> None:
        """Remember an answer to a call; one that cannot be compared is not held."""
        key = message_key(answer)
        if key is not None:
            held = HeldAnswer([*call.keys, key], call.context, prompt_ids, completion_ids, answer)
            self._held.append(held)

    def find(self, call: ChatCall) -> HeldAnswer | None:
        """The newest answer that the call repeats, with everything before it, and says something new after."""
        for held in reversed(self._held):
            length = held.length
            if length < len(call.keys) and held.context == call.context and call.keys[:length] == held.keys:
                return held
        return None


def message_key(message: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """A message as a value to compare by, or None where it holds more than text and tool calls."""
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        return None
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS and value:
            return None
    calls = message.get("tool_calls")
    if not calls:
        return message.get("role"), content or "", message.get("tool_call_id"), message.get("name")
    made = tuple(_call_key(call) for call in calls)
    return message.get("role"), content or "", message.get("tool_call_id"), message.get("name"), made


def _call_key(call: Any) -> tuple[Any, ...]:
    function = call["function"]
    return call["id"], function["name"], function["arguments"]
