"""Multi-turn rollouts by token ids: each turn sends exactly the ids so far, and the newly rendered turn behind them.

With messages, a server renders and tokenizes the whole conversation for every turn. A chat template that strips the
reasoning of earlier turns, or a tokenizer that merges otherwise than the policy sampled, then gives a prompt that is
no longer what was sampled: a fork. Sent as ids, the prompt always extends the ids so far.

Three routes are used, under vLLM's names: /tokenize renders new turns, /inference/v1/generate takes and gives ids,
and /v1/chat/completions/derender reads the answer, with the server's own parsers of tool calls and reasoning, as the
chat route would have. What cannot go this way (several answers, a grammar, contents that are not text) goes as
messages.

A template renders whole conversations. What it adds for the newest turns is found by rendering them behind a short
stand-in conversation, twice, with two different answers: the ids that the two renderings end with alike are what
stands behind an answer, whatever it was: the end of the answer's turn, the new turns, and the generation prompt. The
work is that of the new turns, and nothing that was sampled is rendered again. Templates for which this does not hold
(the end of a turn depends on the history, tools move to the newest turn) are rejected before they are relied on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from verifiers.errors import ConfigError, Error, InvalidModelResponseError, ModelError, ProviderError
from verifiers.inference.endpoint import DERENDER, GENERATE, TOKENIZE, Backend
from verifiers.inference.retry import RetryPolicy, retry
from verifiers.inference.wire import WireObject

logger = logging.getLogger("verifiers.rollouts")

Generation = Literal["auto", "messages", "tokens"]
"""Form in which turns are sent: "auto" by token ids from the second turn on where the server can, "tokens" always."""

T = TypeVar("T")
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
Send = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
Render = Callable[[Sequence[Message], Tools, Mapping[str, Any]], Awaitable[list[int]]]
"""(messages, tools, arguments of the template) -> ids of the conversation, with the generation prompt."""

# how long turns go as messages where a route of token ids keeps failing
_FORGET_FAILURE_S = 60.0
_ASKED: Message = {"role": "user", "content": "a"}
_TWO_ANSWERS = ("a", "b")
_TWO_ARGUMENTS = ("{}", '{"a":1}')
_CALLING: Message = {"tool_calls": [{"id": "call00000", "function": {"name": "f"}}]}
_TOLD: Message = {"role": "tool", "tool_call_id": "call00000"}
# what an answer ends with must not change what stands behind it, as it does where a tokenizer merges the two
_OTHER_ANSWERS = ("a.", "1)", "{}", "b\n")
_DEPENDS = "what the template puts behind an answer depends on what is said in it or before it"
_SHOWN_AGAIN = "the template shows the tools again with each new turn"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_ABSENT = {
    TOKENIZE: "it has no /tokenize that takes messages",
    GENERATE: "it has no /inference/v1/generate (vLLM has it with --enable-scale-out)",
    DERENDER: "it has no /v1/chat/completions/derender (vLLM has it with --enable-scale-out)",
}


class CannotRenderTurnError(Error):
    """A chat template does not let a turn be rendered by itself; the message says why. Never leaves this package."""


class TokenIn:
    """Knowledge of whether a model's servers take token ids; shared by all rollouts on them.

    Belongs to the event loop it is first used in.

    Args:
        retry: for the calls that ask the server what it can do.
    """

    def __init__(
        self, backend: Backend, model: str, mode: Generation = "auto", *, retry: RetryPolicy | None = None
    ) -> None:
        self.mode = mode
        self._backend, self._model, self._retry = backend, model, retry or RetryPolicy()
        self.renderer = TurnRenderer(self._render)
        # the reason why turns cannot go by token ids, or None where they can, and until when it holds
        self._answer: tuple[str | None, float] | None = None
        self._asking: asyncio.Task[str | None] | None = None
        self._logged: set[str] = set()

    async def offered(self) -> bool:
        """Return whether the server takes token ids and turns can be rendered by themselves; asked once.

        Raises:
            ConfigError: it does not, and the mode is "tokens".
            ProviderError: it could not be asked; or it answered with errors of its own, and the mode is "tokens".
        """
        if self._known is None:
            # rollouts that begin together share one question, and its failure
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._why_not())
            try:
                reason = await asyncio.shield(self._asking)
            except ProviderError as error:
                if not self.refuse_for_now(error):
                    raise
            else:
                self._answer = reason, math.inf
        assert self._answer is not None
        reason, until = self._answer
        if reason is None:
            return True
        text = f"turns cannot be sent to {self._backend.base_url or 'this client'} as token ids: {reason}"
        if self.mode == "tokens":
            raise ConfigError(f"{text}; set generation='messages', or use a server that can, such as vf-serve.")
        if until == math.inf:
            self.warn_once(f"{text}; they go as messages, and a template that rewrites earlier turns makes forks.")
        return False

    @property
    def _known(self) -> tuple[str | None, float] | None:
        return self._answer if self._answer is not None and time.monotonic() < self._answer[1] else None

    @property
    def is_refused(self) -> bool:
        """True when turns are known not to go by token ids, and messages are allowed."""
        return self._known is not None and self._known[0] is not None and self.mode != "tokens"

    def refuse_for_now(self, error: ProviderError) -> bool:
        """Send turns as messages for a while, where that will do and the server answers with errors of its own."""
        if self.mode == "tokens" or (error.status or 0) < 500:
            return False
        self._answer = "one of its routes fails", time.monotonic() + _FORGET_FAILURE_S
        if "fails" not in self._logged:
            self._logged.add("fails")
            logger.warning(
                "turns go to %s as messages because a token-id route fails: %s; retrying in %g s.",
                self._backend.base_url,
                error,
                _FORGET_FAILURE_S,
            )
        return True

    def warn_once(self, text: str) -> None:
        """Log why something goes as messages; each reason once."""
        if text not in self._logged:
            self._logged.add(text)
            logger.info("%s", text)

    async def _why_not(self) -> str | None:
        path = TOKENIZE
        try:
            await self.renderer.check()
            ids = await self._render([_ASKED], None, {})
            path = GENERATE
            sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0}
            answer = await self._ask(path, {"model": self._model, "token_ids": ids, "sampling_params": sampling})
            choice = answer["choices"][0]
            if not choice.get("token_ids") or not choice.get("logprobs"):
                return f"{GENERATE} answered without token_ids or logprobs"
            path = DERENDER
            await self._ask(path, _derender_body(self._model, ids, choice, {}))
        except CannotRenderTurnError as error:
            return str(error)
        except (ModelError, KeyError, IndexError, TypeError) as error:
            status = getattr(error, "status", None)
            if isinstance(error, (ProviderError, InvalidModelResponseError)) and (status is None or status >= 500):
                raise
            return _ABSENT[path] if status in (403, 404, 405, 501) else f"{path} cannot be used: {error}"
        return None

    async def _render(self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]) -> list[int]:
        body: dict[str, Any] = {"model": self._model, "messages": list(messages)}
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
        ids = answer.get("tokens")
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise ProviderError(f"{TOKENIZE} answered with tokens={ids!r:.200}, which are no token ids")
        return ids

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        return await retry(lambda: self._backend.call(path, body), self._retry)


# -- new turns as ids ---------------------------------------------------------------------------------------------


class TurnRenderer:
    """A renderer of one turn at a time, over what renders whole conversations, such as a server's /tokenize."""

    def __init__(self, render: Render) -> None:
        self.render = render
        self._found: dict[str, Any] = {}
        # rollouts that begin together ask once
        self._checking = asyncio.Lock()

    async def check(self) -> None:
        """Check that turns can be rendered by themselves; with tools that is checked when they are first met."""
        await self._end_of_turn({})

    async def _once(self, what: str, of: Any, find: Callable[[], Awaitable[T]]) -> T:
        """Return what was found before for the same template options and tools, or find it."""
        key = f"{what} {json.dumps(of, sort_keys=True, default=str)}"
        if key not in self._found:
            async with self._checking:
                if key not in self._found:
                    self._found[key] = await find()
        found: T = self._found[key]
        return found

    async def extend(
        self,
        held: Sequence[int],
        answer: Message,
        new: Sequence[Message],
        tools: Tools,
        options: Mapping[str, Any],
    ) -> list[int]:
        """Return ids to put behind `held`: the rest of the answer's turn, the new messages, the generation prompt.

        Args:
            held: everything that the policy saw and sampled; it ends with the ids of `answer`.
            answer: the message that was read from these.

        Raises:
            CannotRenderTurnError: the template does not let these messages be rendered by themselves.
        """
        end = await self._end_of_turn(options)
        if tools:
            await self._check_tools(tools, options, end)
        last = held[-1] if held else None
        if answer.get("tool_calls"):
            ids = await self._alike(answer, new, None, options)
            between = await self._between_call_and_result(options)
            # models may end such turns by a token of their own, which the policy has sampled
            closing = end if end in between else last
            if closing is None or closing not in between:
                raise CannotRenderTurnError("the template ends turns with and without tool calls differently")
            end, ids = closing, ids[ids.index(closing) :]
        else:
            ids = await self._behind(new, None, options, end)
        # the policy ended its turn itself: what it sampled stays as it is
        return ids[1:] if last == end else ids

    async def _alike(
        self, answer: Message, new: Sequence[Message], tools: Tools, options: Mapping[str, Any]
    ) -> list[int]:
        """Return the ids that two conversations end with alike, whose answers, and their calls' arguments, differ."""
        calls = [_stand_in_calls(answer, arguments) for arguments in _TWO_ARGUMENTS]
        said = [{"content": content} for content in _TWO_ANSWERS]
        stand_ins = [{"content": "", **call} for call in calls] if any(calls) else said
        one, two = [
            await self.render([_ASKED, {"role": "assistant", **each}, *new], tools, options) for each in stand_ins
        ]
        if one == two:
            raise CannotRenderTurnError(
                "the template leaves out the policy's newest answer, so nothing can follow it"
            )
        alike = sum(1 for _ in _equal_pairs(reversed(one), reversed(two)))
        return one[len(one) - alike :]

    async def _behind(
        self, new: Sequence[Message], tools: Tools, options: Mapping[str, Any], end: int | None
    ) -> list[int]:
        ids = await self._alike({}, new, tools, options)
        if not ids or (end is not None and ids[0] != end):
            raise CannotRenderTurnError(_DEPENDS)
        return ids

    async def _between_call_and_result(self, options: Mapping[str, Any]) -> list[int]:
        """Return the ids from the end of a call's arguments to its result; the end of the turn is among them."""

        async def find() -> list[int]:
            one, two = [
                await self._alike(_CALLING, [{**_TOLD, "content": content}], None, options)
                for content in _TWO_ANSWERS
            ]
            return [first for first, _ in _equal_pairs(one, two)]

        return await self._once("between", options, find)

    async def _end_of_turn(self, options: Mapping[str, Any]) -> int:
        return await self._once("end", options, lambda: self._find_end_of_turn(options))

    async def _find_end_of_turn(self, options: Mapping[str, Any]) -> int:
        new = [{"role": "user", "content": "b"}]
        behind = await self._behind(new, None, options, None)
        longer = [_ASKED, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d e"}]
        conversations = [([_ASKED], content) for content in _OTHER_ANSWERS] + [(longer, _TWO_ANSWERS[0])]
        for before, content in conversations:
            ids = await self.render([*before, {"role": "assistant", "content": content}, *new], None, options)
            if ids[-len(behind) :] != behind:
                raise CannotRenderTurnError(_DEPENDS)
        return behind[0]

    async def _check_tools(self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any], end: int) -> None:
        """Check that turns render alike with and without the tools, which were shown once, in the first prompt."""
        of = [list(tools), options]
        reason = await self._once("tools", of, lambda: self._compare_with_tools(tools, options, end))
        if reason is not None:
            raise CannotRenderTurnError(reason)

    async def _compare_with_tools(
        self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any], end: int
    ) -> str | None:
        """Return the reason why turns cannot be rendered without the tools, or None where they can."""
        said = [{"role": "user", "content": "b"}]
        try:
            if await self._behind(said, tools, options, end) == await self._behind(said, None, options, end):
                told = [{**_TOLD, "content": "b"}]
                shown = await self._alike(_CALLING, told, tools, options)
                return None if shown == await self._alike(_CALLING, told, None, options) else _SHOWN_AGAIN
        except CannotRenderTurnError as error:
            return str(error)
        return _SHOWN_AGAIN


def _equal_pairs(one: Iterable[int], other: Iterable[int]) -> Iterator[tuple[int, int]]:
    return itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))


def _stand_in_calls(answer: Message, arguments: str) -> dict[str, Any]:
    """Return the answer's tool calls with other arguments, as tools' answers may be matched with ids and names."""
    calls = answer.get("tool_calls")
    if not calls:
        return {}
    stand_ins = []
    for call in calls:
        name = str(call["function"]["name"])
        # what the policy wrote may be anything, the mark of the end of a turn too
        function = {"name": name if _PLAIN_NAME.match(name) else "f", "arguments": arguments}
        stand_ins.append({"id": str(call["id"]), "type": "function", "function": function})
    return {"tool_calls": stand_ins}


# -- a chat call, and the answers that it may continue -----------------------------------------------------------

# fields that a chat call and vLLM's sampling parameters share
_SAMPLING = frozenset(
    {
        "bad_words", "frequency_penalty", "ignore_eos", "min_p", "min_tokens", "presence_penalty",
        "repetition_penalty", "return_sampling_mask", "seed", "stop", "stop_token_ids", "temperature", "top_k",
        "top_p",
    }
)  # fmt: skip
_REQUEST = frozenset({"cache_salt", "priority"})
# nothing in the answer depends on them
_LEFT_OUT = frozenset({"metadata", "return_token_ids", "return_tokens_as_token_ids", "store", "user", "logprobs"})
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
        chat_options: what reading the answer depends on.
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

    def generate_body(self, ids: list[int]) -> dict[str, Any]:
        return {**self.request_options, "model": self.model, "token_ids": ids, "sampling_params": self.sampling}


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
        elif name == "top_logprobs" and body.get("return_tokens_as_token_ids"):
            sampling["logprobs"] = value
        elif name == "parallel_tool_calls":
            chat[name] = value
        elif name == "reasoning_effort":
            # servers hand it to the template, where a chat call names nothing else under this name
            template_options = {name: value, **template_options}
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


@dataclass(frozen=True, slots=True)
class _Held:
    keys: list[tuple[Any, ...]]
    context: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    answer: Message


@dataclass(slots=True)
class TokenTurns:
    """The answers of one rollout, as messages and as ids; of several conversations where it branches."""

    shared: TokenIn
    _answers: list[_Held] = field(default_factory=list)

    async def read(self, body: Mapping[str, Any]) -> tuple[ChatCall | None, list[int] | None]:
        """Return a chat call, to be given to `hold` with its answer, and its prompt as ids.

        Each is None where the call has none: without ids it goes as messages.
        """
        shared = self.shared
        if shared.is_refused:
            return None, None
        call = read_chat_call(body)
        if isinstance(call, str):
            shared.warn_once(f"a call with {call} goes as messages, not as token ids.")
            return None, None
        held = self.find(call)
        if held is None and shared.mode != "tokens":
            return call, None
        try:
            return call, await self._prompt_ids(call, held) if await shared.offered() else None
        except ProviderError as error:
            if not shared.refuse_for_now(error):
                raise
            return call, None

    async def _prompt_ids(self, call: ChatCall, held: _Held | None) -> list[int] | None:
        renderer = self.shared.renderer
        try:
            if held is None:
                return await renderer.render(call.messages, call.tools, call.template_options)
            ids = [*held.prompt_ids, *held.completion_ids]
            new = call.messages[len(held.keys) :]
            return ids + await renderer.extend(ids, held.answer, new, call.tools, call.template_options)
        except CannotRenderTurnError as error:
            self.shared.warn_once(f"a turn goes as messages, not as token ids: {error}.")
            return None

    def hold(
        self, call: ChatCall, message: Message, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> None:
        """Remember the answer to a call; one that is not comparable is not kept."""
        key = message_key(message)
        if key is not None:
            self._answers.append(_Held([*call.keys, key], call.context, prompt_ids, completion_ids, message))

    def find(self, call: ChatCall) -> _Held | None:
        """Return the newest answer that the call repeats, with everything before it, and continues."""
        for held in reversed(self._answers):
            length = len(held.keys)
            if length < len(call.keys) and held.context == call.context and call.keys[:length] == held.keys:
                return held
        return None


async def completion_by_ids(call: ChatCall, ids: list[int], answer: Mapping[str, Any], send: Send) -> WireObject:
    """Return what was generated behind a prompt's ids as the chat completion that the call asked for."""
    choice = answer["choices"][0]
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    sampled = choice.get("token_ids") or ()
    if sampled:
        read = await send(DERENDER, _derender_body(call.model, ids, choice, call.chat_options))
        message = _cut_at_stop(read["choices"][0]["message"], call.sampling.get("stop"))
    reason = choice.get("finish_reason")
    if reason == "stop" and message.get("tool_calls"):
        reason = "tool_calls"
    counts = {"prompt_tokens": len(ids), "completion_tokens": len(sampled), "total_tokens": len(ids) + len(sampled)}
    return WireObject(
        {
            "id": answer.get("request_id"),
            "object": "chat.completion",
            "created": answer.get("created") or 0,
            "model": call.model,
            "choices": [{**choice, "index": 0, "message": message, "finish_reason": reason}],
            "usage": counts,
            "prompt_token_ids": ids,
        }
    )


def token_in_for(
    generation: str, backend: Backend, model: str, *, require_tokens: bool, retry: RetryPolicy | None = None
) -> TokenIn | None:
    """Return the sender of turns as token ids for a run's rollouts; None for messages.

    "auto" is messages where no token ids are asked for, as the first turn then gives none.
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


def _derender_body(
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
