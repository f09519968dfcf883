"""Multi-turn rollouts by token ids: each turn sends exactly the ids so far, and the newly rendered turn behind them.

With messages, a server renders and tokenizes the whole conversation for every turn. A chat template that strips the
reasoning of earlier turns, or a tokenizer that merges otherwise than the policy sampled, then gives a prompt that is
no longer what was sampled: a fork. Sent as ids, the prompt always extends the ids so far.

Three routes are used, under vLLM's names: /tokenize renders new turns, /inference/v1/generate takes and gives ids,
and /v1/chat/completions/derender reads the answer, with the server's own parsers of tool calls and reasoning, as the
chat route would have. What cannot go this way (several answers, a grammar, contents that are no text) goes as
messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verifiers.errors import ConfigError, OverlongPromptError, ProviderError
from verifiers.inference.endpoint import DERENDER, GENERATE, TOKENIZE, Backend
from verifiers.inference.rendering import (
    CannotRenderTurnError,
    ChatCall,
    Conversations,
    IncrementalRenderer,
    TurnRenderer,
    read_chat_call,
)
from verifiers.inference.retries import RetryPolicy, call_with_retries
from verifiers.inference.wire import WireObject, sampled_tokens

__all__ = ["Generation", "TokenIn", "TokenTurns", "token_in_for"]

logger = logging.getLogger("verifiers.rollouts")

Generation = Literal["auto", "messages", "tokens"]
"""Form in which turns are sent: "auto" by token ids from the second turn on where the server can, "tokens" always."""

Send = Callable[[str, Mapping[str, Any]], Awaitable[Any]]

_ABSENT = {
    TOKENIZE: "it has no /tokenize that takes messages",
    GENERATE: "it has no /inference/v1/generate (vLLM has it with --enable-scale-out)",
    DERENDER: "it has no /v1/chat/completions/derender (vLLM has it with --enable-scale-out)",
}


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
        self._backend = backend
        self._retry = retry or RetryPolicy()
        self.renderer = renderer or IncrementalRenderer(self._rendered)
        self._known: _Offer | None = None
        self._asking = asyncio.Lock()
        self._failure: ProviderError | None = None
        self._failures = 0
        self._logged: set[str] = set()

    def for_rollout(self) -> TokenTurns:
        """Return an empty record of one rollout's conversations."""
        return TokenTurns(self)

    async def offered(self) -> bool:
        """Return True if the server takes token ids and turns can be rendered by themselves; asked once.

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
                    # it was asked while this one waited: asking once more for each that waits would take for ever
                    raise ProviderError(str(self._failure), status=self._failure.status) from self._failure
                if offer is None:
                    offer = await self._asked()
        reason = offer.reason
        if reason is None:
            return True
        text = f"turns cannot be sent to {self._backend.base_url or 'this client'} as token ids: {reason}"
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
            self._known = _Offer(await self._why_not())
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
                "turns go to %s as messages, for a route of token ids fails: %s; it is asked again in %g s.",
                self._backend.base_url,
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

    async def _why_not(self) -> str | None:
        path = TOKENIZE
        try:
            await self.renderer.check()
            ids = await self.renderer.first([{"role": "user", "content": "a"}], None, {})
            path = GENERATE
            sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0}
            body = {"model": self.model, "token_ids": ids, "sampling_params": sampling}
            answer = await self._ask(GENERATE, body)
            choice = answer["choices"][0]
            if not choice.get("token_ids") or not choice.get("logprobs"):
                return f"{GENERATE} answered without token_ids or logprobs"
            path = DERENDER
            await self._ask(DERENDER, derender_body(self.model, ids, choice, {}))
        except CannotRenderTurnError as error:
            return str(error)
        except (ProviderError, OverlongPromptError, KeyError, IndexError, TypeError) as error:
            status = getattr(error, "status", None)
            if isinstance(error, ProviderError) and (status is None or status >= 500):
                raise
            return _ABSENT[path] if status in (403, 404, 405, 501) else f"{path} cannot be used: {error}"
        return None

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        return await call_with_retries(lambda: self._backend.call(path, body), self._retry)

    async def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]
    ) -> list[int]:
        body: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        if tools:
            body["tools"] = list(tools)
        if options:
            body["chat_template_kwargs"] = dict(options)
        try:
            answer = await self._ask(TOKENIZE, body)
        except ProviderError as error:
            if error.status in (400, 422):
                # a template is a program, and may refuse the stand-ins
                raise CannotRenderTurnError(f"the template refuses to render a turn by itself: {error}") from error
            raise
        ids: list[int] = answer["tokens"]
        return ids


class TokenTurns:
    """The conversations of one rollout, as messages and as ids."""

    def __init__(self, shared: TokenIn) -> None:
        self._shared = shared
        self._conversations = Conversations()

    async def ask(self, send: Send, arguments: Mapping[str, Any]) -> tuple[Any, ChatCall | None]:
        """Answer one chat call by token ids.

        Args:
            send: makes a call to the server, with retries and recorded failures.
            arguments: of `chat.completions.create`.

        Returns:
            The chat completion, with ids and log-probs, or None where the call is to go as messages; and what is to
            be given to `hold` afterwards.
        """
        if self._shared.is_refused:
            return None, None
        call = read_chat_call(arguments)
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

    def hold(self, call: ChatCall, answer: Mapping[str, Any]) -> None:
        """Remember what was answered; the next call may go on from there.

        Args:
            call: as `ask` returned it.
            answer: a chat completion as plain data; kept only where it has the ids.
        """
        sampled = sampled_tokens(answer)
        if sampled.prompt_ids is not None and sampled.completion_ids is not None:
            message = answer["choices"][0].get("message") or {}
            self._conversations.hold(call, message, sampled.prompt_ids, sampled.completion_ids)

    async def _prompt_ids(self, call: ChatCall) -> list[int] | None:
        prefix = self._conversations.find(call)
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


def derender_body(
    model: str, prompt_ids: Sequence[int], choice: Mapping[str, Any], chat_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body that asks for a generated choice as a chat completion; its messages play no part."""
    generated = {"index": 0, "token_ids": choice["token_ids"], "finish_reason": choice.get("finish_reason") or "stop"}
    return {
        "model": model,
        "generate_response": {"choices": [generated]},
        "prompt_tokens": len(prompt_ids),
        "prompt_token_ids": list(prompt_ids),
        "chat_request": {"model": model, "messages": [{"role": "user", "content": "a"}], **chat_options},
    }


def _cut_at_stop(message: dict[str, Any], stop: Any) -> dict[str, Any]:
    """Cut a message at its stop string: vLLM reads it from all ids, and the chat route leaves those out."""
    content = message.get("content")
    stops = [stop] if isinstance(stop, str) else stop
    if not stops or not isinstance(content, str):
        return message
    ends = [place for place in (content.find(text) for text in stops) if place >= 0]
    return {**message, "content": content[: min(ends)]} if ends else message
