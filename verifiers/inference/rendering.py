"""New turns as token ids, behind what a rollout already holds: a chat template, used one turn at a time.

A template renders whole conversations. What it adds for the newest turns is found by rendering them behind a short
stand-in conversation, twice, with two different answers: the ids that the two renderings end with alike are what
stands behind an answer, whatever it was: the end of the answer's turn, the new turns, and the generation prompt. The
work is that of the new turns, and nothing that was sampled is rendered again.

Templates for which this does not hold (the end of a turn depends on the history, tools move to the newest turn) are
rejected by `IncrementalRenderer.check` before they are relied on.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verifiers.errors import Error
from verifiers.inference.wire import request_body

__all__ = [
    "CachedPrefix",
    "CannotRenderTurnError",
    "ChatCall",
    "Conversations",
    "IncrementalRenderer",
    "Render",
    "TurnRenderer",
    "read_chat_call",
]

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

Render = Callable[[Sequence[Message], Tools, Mapping[str, Any]], Awaitable[list[int]]]
"""(messages, tools, arguments of the template) -> ids of the conversation, with the generation prompt."""

_ASKED: Message = {"role": "user", "content": "a"}
_TWO_ANSWERS = ("a", "b")
# what an answer ends with must not change what stands behind it, as it does where a tokenizer merges the two
_OTHER_ANSWERS = ("a.", "1)", "{}", "b\n")
_DEPENDS = "what the template puts behind an answer depends on what is said in it or before it"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


class CannotRenderTurnError(Error):
    """A chat template does not let a turn be rendered by itself; the message says why. Never leaves this package."""


class TurnRenderer(Protocol):
    """Renders the first prompt of a conversation, and then one turn at a time."""

    async def check(self) -> None:
        """Check that turns can be rendered by themselves.

        Raises:
            CannotRenderTurnError: they cannot.
        """
        ...

    async def first(self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]) -> list[int]:
        """Return ids of a whole conversation, with the generation prompt; `options` go to the template."""
        ...

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
            new: messages since.
            tools: that the conversation was begun with.
            options: arguments of the template.

        Raises:
            CannotRenderTurnError: the template does not let these messages be rendered by themselves.
        """
        ...


class IncrementalRenderer:
    """A `TurnRenderer` over anything that renders whole conversations, such as a server's /tokenize.

    Attributes:
        rendered_tokens: ids that all renderings had together.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._end: dict[str, int] = {}
        self._tools_checked: dict[str, str | None] = {}
        # rollouts that begin together ask once
        self._checking = asyncio.Lock()
        self.rendered_tokens = 0

    async def check(self) -> None:
        """Check conversations without tools, as `TurnRenderer.check`; tools are checked when they are first met."""
        await self._end_of_turn({})

    async def first(self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]) -> list[int]:
        """Render a conversation, as `TurnRenderer.first`."""
        ids = await self._render(messages, tools, options)
        self.rendered_tokens += len(ids)
        return ids

    async def extend(
        self,
        held: Sequence[int],
        answer: Message,
        new: Sequence[Message],
        tools: Tools,
        options: Mapping[str, Any],
    ) -> list[int]:
        """Render a turn, as `TurnRenderer.extend`."""
        end = await self._end_of_turn(options)
        if tools:
            await self._check_tools(tools, options, end)
        ids = await self._behind(answer, new, None, options, end)
        # the policy ended its turn itself: what it sampled stays as it is
        return ids[1:] if held and held[-1] == end else ids

    # -- what stands behind an answer ---------------------------------------------------------------------------

    async def _behind(
        self,
        answer: Message,
        new: Sequence[Message],
        tools: Tools,
        options: Mapping[str, Any],
        end: int | None,
    ) -> list[int]:
        calls = _stand_in_calls(answer)
        one, two = [
            await self.first([_ASKED, {"role": "assistant", "content": content, **calls}, *new], tools, options)
            for content in _TWO_ANSWERS
        ]
        if one == two:
            raise CannotRenderTurnError(
                "the template leaves out the policy's newest answer, so nothing can follow it"
            )
        ids = one[len(one) - _alike_at_the_end(one, two) :]
        if calls and end is not None:
            # the calls were sampled, and stand between the content and the end of the turn
            if end not in ids:
                raise CannotRenderTurnError("the template ends a turn with tool calls otherwise than one without")
            ids = ids[ids.index(end) :]
        if not ids or (end is not None and ids[0] != end):
            raise CannotRenderTurnError(_DEPENDS)
        return ids

    async def _end_of_turn(self, options: Mapping[str, Any]) -> int:
        """Return the id that ends the policy's turns, where it is always the same one."""
        key = _key(options)
        if key not in self._end:
            async with self._checking:
                if key not in self._end:
                    self._end[key] = await self._find_end_of_turn(options)
        return self._end[key]

    async def _find_end_of_turn(self, options: Mapping[str, Any]) -> int:
        new = [{"role": "user", "content": "b"}]
        behind = await self._behind({}, new, None, options, None)
        longer = [_ASKED, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d e"}]
        conversations = [([_ASKED], content) for content in _OTHER_ANSWERS] + [(longer, _TWO_ANSWERS[0])]
        for before, content in conversations:
            ids = await self.first([*before, {"role": "assistant", "content": content}, *new], None, options)
            if ids[-len(behind) :] != behind:
                raise CannotRenderTurnError(_DEPENDS)
        return behind[0]

    async def _check_tools(self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any], end: int) -> None:
        """Check that turns render alike with and without the tools, which were shown once, in the first prompt."""
        key = _key([list(tools), options])
        if key not in self._tools_checked:
            async with self._checking:
                if key not in self._tools_checked:
                    self._tools_checked[key] = await self._compare_with_tools(tools, options, end)
        reason = self._tools_checked[key]
        if reason is not None:
            raise CannotRenderTurnError(reason)

    async def _compare_with_tools(
        self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any], end: int
    ) -> str | None:
        """Return the reason why turns cannot be rendered without the tools, or None where they can."""
        name = str(tools[0].get("function", {}).get("name", "f"))
        calling = {"tool_calls": [{"id": "call00000", "function": {"name": name, "arguments": "{}"}}]}
        told = {"role": "tool", "tool_call_id": "call00000", "content": "b"}
        turns: tuple[tuple[Message, Message], ...] = (({}, {"role": "user", "content": "b"}), (calling, told))
        for answer, new in turns:
            try:
                without = await self._behind(answer, [new], None, options, end)
                if await self._behind(answer, [new], tools, options, end) != without:
                    return "the template shows the tools again with each new turn"
            except CannotRenderTurnError as error:
                return str(error)
        return None


def _stand_in_calls(answer: Message) -> dict[str, Any]:
    """Return the answer's tool calls with empty arguments, as tools' answers may be matched with ids and names."""
    calls = answer.get("tool_calls")
    if not calls:
        return {}
    stand_ins = []
    for call in calls:
        name = str(call["function"]["name"])
        # what the policy wrote may be anything, the mark of the end of a turn too
        function = {"name": name if _PLAIN_NAME.match(name) else "f", "arguments": "{}"}
        stand_ins.append({"id": str(call["id"]), "type": "function", "function": function})
    return {"tool_calls": stand_ins}


def _alike_at_the_end(one: Sequence[int], two: Sequence[int]) -> int:
    count = 0
    for first, second in zip(reversed(one), reversed(two), strict=False):
        if first != second:
            break
        count += 1
    return count


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


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
    """Return a chat call as it can be made by token ids, or a word for what in it cannot."""
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


@dataclass(slots=True)
class Conversations:
    """The prefixes of one rollout, of several conversations where it branches or speaks in several."""

    _prefixes: list[CachedPrefix] = field(default_factory=list)

    def hold(
        self, call: ChatCall, answer: Mapping[str, Any], prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> None:
        """Remember an answer to a call; an answer that cannot be compared is not kept."""
        key = message_key(answer)
        if key is not None:
            self._prefixes.append(CachedPrefix([*call.keys, key], call.context, prompt_ids, completion_ids, answer))

    def find(self, call: ChatCall) -> CachedPrefix | None:
        """Return the newest answer that the call repeats, with everything before it, and continues."""
        for prefix in reversed(self._prefixes):
            length = prefix.length
            if length < len(call.keys) and prefix.context == call.context and call.keys[:length] == prefix.keys:
                return prefix
        return None


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
