"""New turns as token ids, behind what a rollout already holds: a chat template, used one turn at a time.

A template renders whole conversations. What it adds for the newest turns is found by rendering them behind a short
stand-in conversation, twice, with two different answers: the ids that the two renderings end with alike are what
stands behind an answer, whatever it was: the end of the answer's turn, the new turns, and the generation prompt. The
work is that of the new turns, and nothing that was sampled is rendered again.

Templates for which this does not hold (the end of a turn depends on the history, tools move to the newest turn) are
found out by `SplitRenderer.check` before they are relied on.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from verifiers.errors import Error

__all__ = ["CannotSplit", "Render", "SplitRenderer", "TurnRenderer"]

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


class CannotSplit(Error):
    """A chat template does not let a turn be rendered by itself; the message says why. Never leaves this package."""


class TurnRenderer(Protocol):
    """Renders the first prompt of a conversation, and then one turn at a time."""

    async def check(self) -> None:
        """Find out whether turns can be rendered by themselves.

        Raises:
            CannotSplit: they cannot.
        """
        ...

    async def first(self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]) -> list[int]:
        """Ids of a conversation from its beginning, with the generation prompt; `options` go to the template."""
        ...

    async def extend(
        self,
        held: Sequence[int],
        answer: Message,
        new: Sequence[Message],
        tools: Tools,
        options: Mapping[str, Any],
    ) -> list[int]:
        """Ids to put behind `held`: the rest of the answer's turn, the new messages, the generation prompt.

        Args:
            held: everything that the policy saw and sampled; it ends with the ids of `answer`.
            answer: the message that was read from these.
            new: what was said since.

        Raises:
            CannotSplit: the template does not let these messages be rendered by themselves.
        """
        ...


class SplitRenderer:
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
        """As `TurnRenderer.check`, for conversations without tools; those are checked when they are first met."""
        await self._end_of_turn({})

    async def first(self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]) -> list[int]:
        """As `TurnRenderer.first`."""
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
        """As `TurnRenderer.extend`."""
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
            raise CannotSplit("the template does not show the policy's newest answer, so nothing can follow it")
        ids = one[len(one) - _alike_at_the_end(one, two) :]
        if calls and end is not None:
            # the calls were sampled, and stand between the content and the end of the turn
            if end not in ids:
                raise CannotSplit("the template ends a turn with tool calls otherwise than one without")
            ids = ids[ids.index(end) :]
        if not ids or (end is not None and ids[0] != end):
            raise CannotSplit(_DEPENDS)
        return ids

    async def _end_of_turn(self, options: Mapping[str, Any]) -> int:
        """The id that ends the policy's turns, where it is always the same one."""
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
                raise CannotSplit(_DEPENDS)
        return behind[0]

    async def _check_tools(self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any], end: int) -> None:
        """Turns must render alike with and without the tools, which were shown once, in the first prompt."""
        key = _key([list(tools), options])
        if key not in self._tools_checked:
            async with self._checking:
                if key not in self._tools_checked:
                    self._tools_checked[key] = await self._compare_with_tools(tools, options, end)
        reason = self._tools_checked[key]
        if reason is not None:
            raise CannotSplit(reason)

    async def _compare_with_tools(
        self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any], end: int
    ) -> str | None:
        """Why turns cannot be rendered without the tools, or None where they can."""
        name = str(tools[0].get("function", {}).get("name", "f"))
        calling = {"tool_calls": [{"id": "call00000", "function": {"name": name, "arguments": "{}"}}]}
        told = {"role": "tool", "tool_call_id": "call00000", "content": "b"}
        turns: tuple[tuple[Message, Message], ...] = (({}, {"role": "user", "content": "b"}), (calling, told))
        for answer, new in turns:
            try:
                without = await self._behind(answer, [new], None, options, end)
                if await self._behind(answer, [new], tools, options, end) != without:
                    return "the template shows the tools again with each new turn"
            except CannotSplit as error:
                return str(error)
        return None


def _stand_in_calls(answer: Message) -> dict[str, Any]:
    """The answer's tool calls with empty arguments: the tools' answers may be matched with ids and names."""
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
