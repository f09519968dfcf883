"""Multi-turn rollouts by token ids: each turn sends exactly the ids so far, and the newly rendered turn behind them.

With messages, a server renders and tokenizes the whole conversation for every turn. A chat template that strips the
reasoning of earlier turns, or a tokenizer that merges otherwise than the policy sampled, then gives a prompt that is
no longer what was sampled: a fork. Sent as ids, the prompt always extends the ids so far.

Three routes are used, under vLLM's names: /tokenize renders new turns, /inference/v1/generate takes and gives ids,
and /v1/chat/completions/derender reads the answer, with the server's own parsers of tool calls and reasoning, as the
chat route would have. What cannot go this way (several answers, a grammar, contents that are not text) goes as
messages.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.endpoint import DERENDER, GENERATE, Backend
from verifiers.inference.rendering import (
    CannotRenderTurnError,
    IncrementalRenderer,
    TokenRoutes,
    TurnRenderer,
    derender_body,
)
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.wire import WireObject

__all__ = [
    "CachedPrefix",
    "ChatCall",
    "Generation",
    "TokenIn",
    "TokenTurns",
    "read_chat_call",
    "token_in_for",
]

logger = logging.getLogger("verifiers.rollouts")

Generation = Literal["auto", "messages", "tokens"]
"""Form in which turns are sent: "auto" by token ids from the second turn on where the server can, "tokens" always."""

Send = Callable[[str, Mapping[str, Any]], Awaitable[Any]]

# how long turns go as messages where a route of token ids keeps failing
_FORGET_FAILURE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Offer:
    """The reason why turns cannot go by token ids, or None where they can; valid until a time."""

    reason: str | None
    until: float = math.inf


class TokenIn:
    """Knowledge of whether a model's servers take token ids; shared by all rollouts on them.

    Args:
        backend: where the model is served.
        model: its name there.
        mode: "auto" or "tokens".
        renderer: renders turns; the server's /tokenize when left out.
        retry: for the calls that ask the server what it can do.

    Belongs to the event loop it is first used in.
    """

    def __init__(
        self,
        backend: Backend,
        model: str,
        mode: Generation = "auto",
        *,
        renderer: TurnRenderer | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.mode = mode
        self.model = model
        self._routes = TokenRoutes(backend, model, retry or RetryPolicy())
        self._given_renderer = renderer
        self._known: _Offer | None = None
        self._asking = asyncio.Lock()
        self._failure: ProviderError | None = None
        self._failures = 0
        self._logged: set[str] = set()

    @functools.cached_property
    def renderer(self) -> TurnRenderer:
        """Renderer of turns; a conversation of one turn needs none."""
        return self._given_renderer or IncrementalRenderer(self._routes.render)

    async def offered(self) -> bool:
        """Return whether the server takes token ids and turns can be rendered by themselves; asked once.

        Raises:
            ConfigError: it does not, and the mode is "tokens".
            ProviderError: it could not be asked; or it answered with errors of its own, and the mode is "tokens".
        """
        offer = self._offer
        if offer is None:
            failures = self._failures
            async with self._asking:
                offer = self._offer
                if offer is None and self._failure is not None and self._failures > failures:
                    # it was asked while this one waited: asking again for each that waits would take too long
                    raise ProviderError(str(self._failure), status=self._failure.status) from self._failure
                if offer is None:
                    offer = await self._asked()
        reason = offer.reason
        if reason is None:
            return True
        text = f"turns cannot be sent to {self._routes.backend.base_url or 'this client'} as token ids: {reason}"
        if self.mode == "tokens":
            raise ConfigError(f"{text}; set generation='messages', or use a server that can, such as vf-serve.")
        if offer.until == math.inf:
            self.warn_once(f"{text}; they go as messages, and a template that rewrites earlier turns makes forks.")
        return False

    @property
    def _offer(self) -> _Offer | None:
        known = self._known
        return known if known is not None and time.monotonic() < known.until else None

    async def _asked(self) -> _Offer:
        try:
            self._known = _Offer(await self._routes.why_not(self.renderer))
        except ProviderError as error:
            if not self.refuse_for_now(error):
                self._failure, self._failures = error, self._failures + 1
                raise
        assert self._known is not None
        return self._known

    def refuse_for_now(self, error: ProviderError) -> bool:
        """Send turns as messages for a while, where that will do and the server answers with errors of its own."""
        if self.mode == "tokens" or (error.status or 0) < 500:
            return False
        until = time.monotonic() + _FORGET_FAILURE_S
        self._known = _Offer(f"a route of theirs fails, and is asked again in {_FORGET_FAILURE_S:g} s", until)
        if "fails" not in self._logged:
            self._logged.add("fails")
            logger.warning(
                "turns go to %s as messages because a token-id route fails: %s; retrying in %g s.",
                self._routes.backend.base_url,
                error,
                _FORGET_FAILURE_S,
            )
        return True

    @property
    def is_refused(self) -> bool:
        """True when turns are known not to go by token ids, and messages are allowed."""
        offer = self._offer
        return offer is not None and offer.reason is not None and self.mode != "tokens"

    def warn_once(self, text: str) -> None:
        """Log why something goes as messages; each reason once."""
        if text not in self._logged:
            self._logged.add(text)
            logger.info("%s", text)


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
        context: what must be equal for one call to continue another.
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


def read_chat_call(body: Mapping[str, Any]) -> ChatCall | str:
    """Return a chat call, given as its JSON body, as it can be made by token ids; or the reason why it cannot."""
    body = dict(body)
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
        return "messages that are not a list"
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
class CachedPrefix:
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


def message_key(message: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return a message as a value to compare by, or None where it holds more than text and tool calls."""
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


@dataclass(slots=True)
class TokenTurns:
    """The answers of one rollout, as messages and as ids; of several conversations where it branches."""

    _shared: TokenIn
    _prefixes: list[CachedPrefix] = field(default_factory=list)

    async def ask(self, send: Send, body: Mapping[str, Any]) -> tuple[Any, ChatCall | None]:
        """Answer one chat call by token ids.

        Args:
            send: makes a call to the server, with retries and recorded failures.
            body: of the chat call, as `request_body` gives it.

        Returns:
            The chat completion, with ids and log-probs, or None where the call is to go as messages; and what is to
            be given to `hold` afterwards.
        """
        if self._shared.is_refused:
            return None, None
        call = read_chat_call(body)
        if isinstance(call, str):
            self._shared.warn_once(f"a call with {call} goes as messages, not as token ids.")
            return None, None
        try:
            ids = await self._prompt_ids(call)
            return (None if ids is None else await self._generated(send, call, ids)), call
        except ProviderError as error:
            if not self._shared.refuse_for_now(error):
                raise
            return None, call

    def hold(
        self, call: ChatCall, message: Mapping[str, Any], prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> None:
        """Remember the answer to a call, as `ask` returned it; one that is not comparable is not kept."""
        key = message_key(message)
        if key is not None:
            self._prefixes.append(CachedPrefix([*call.keys, key], call.context, prompt_ids, completion_ids, message))

    def find(self, call: ChatCall) -> CachedPrefix | None:
        """Return the newest answer that the call repeats, with everything before it, and continues."""
        for prefix in reversed(self._prefixes):
            length = prefix.length
            if length < len(call.keys) and prefix.context == call.context and call.keys[:length] == prefix.keys:
                return prefix
        return None

    async def _prompt_ids(self, call: ChatCall) -> list[int] | None:
        prefix = self.find(call)
        shared = self._shared
        if prefix is None and shared.mode != "tokens":
            return None
        if not await shared.offered():
            return None
        try:
            if prefix is None:
                return await shared.renderer.first(call.messages, call.tools, call.template_options)
            ids = [*prefix.prompt_ids, *prefix.completion_ids]
            new = call.messages[prefix.length :]
            return ids + await shared.renderer.extend(ids, prefix.answer, new, call.tools, call.template_options)
        except CannotRenderTurnError as error:
            shared.warn_once(f"a turn goes as messages, not as token ids: {error}.")
            return None

    async def _generated(self, send: Send, call: ChatCall, ids: list[int]) -> WireObject:
        body = {**call.request_options, "model": call.model, "token_ids": ids, "sampling_params": call.sampling}
        answer = await send(GENERATE, body)
        choices = answer.get("choices") or [{}]
        choice = choices[0]
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        sampled = choice.get("token_ids")
        if sampled:
            read = await send(DERENDER, derender_body(call.model, ids, choice, call.chat_options))
            message = _cut_at_stop(read["choices"][0]["message"], call.sampling.get("stop"))
        reason = choice.get("finish_reason")
        if reason == "stop" and message.get("tool_calls"):
            reason = "tool_calls"
        count = len(sampled or ())
        return WireObject(
            {
                "id": answer.get("request_id"),
                "object": "chat.completion",
                "created": answer.get("created") or 0,
                "model": call.model,
                "choices": [{**choice, "index": 0, "message": message, "finish_reason": reason}],
                "usage": {
                    "prompt_tokens": len(ids),
                    "completion_tokens": count,
                    "total_tokens": len(ids) + count,
                },
                "prompt_token_ids": ids,
            }
        )


def token_in_for(
    generation: str, backend: Backend, model: str, *, require_tokens: bool, retry: RetryPolicy | None = None
) -> TokenIn | None:
    """Return the sender of turns as token ids for a run's rollouts; None for messages.

    "auto" is messages where no token ids are asked for, as the first turn then gives none.

    Raises:
        ConfigError: no such way.
    """
    if generation not in ("auto", "messages", "tokens"):
        raise ConfigError(f"generation is {generation!r}; choose 'auto', 'messages' or 'tokens'.")
    if generation == "messages" or (generation == "auto" and not require_tokens):
        return None
    return TokenIn(backend, model, "tokens" if generation == "tokens" else "auto", retry=retry)


def _cut_at_stop(message: dict[str, Any], stop: Any) -> dict[str, Any]:
    """Cut a message at its stop string: vLLM reads it from all ids, and the chat route leaves those out."""
    content = message.get("content")
    stops = [stop] if isinstance(stop, str) else stop
    if not stops or not isinstance(content, str):
        return message
    ends = [place for place in (content.find(text) for text in stops) if place >= 0]
    return {**message, "content": content[: min(ends)]} if ends else message
