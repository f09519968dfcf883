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
from dataclasses import dataclass
from typing import Any, Protocol

from verifiers.errors import Error, InvalidModelResponseError, ModelError, ProviderError
from verifiers.inference.endpoint import DERENDER, GENERATE, TOKENIZE, Backend
from verifiers.inference.retry import RetryPolicy, retry

__all__ = [
    "CannotRenderTurnError",
    "IncrementalRenderer",
    "Render",
    "TokenRoutes",
    "TurnRenderer",
    "derender_body",
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
    """A renderer of the first prompt of a conversation, and then of one turn at a time."""

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
    """A `TurnRenderer` over anything that renders whole conversations, such as a server's /tokenize."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._end: dict[str, int] = {}
        self._tools_checked: dict[str, str | None] = {}
        # rollouts that begin together ask once
        self._checking = asyncio.Lock()

    async def check(self) -> None:
        """Check conversations without tools, as `TurnRenderer.check`; tools are checked when they are first met."""
        await self._end_of_turn({})

    async def first(self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]) -> list[int]:
        """Render a conversation, as `TurnRenderer.first`."""
        return await self._render(messages, tools, options)

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
                raise CannotRenderTurnError("the template ends turns with and without tool calls differently")
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
        tool_call = {"tool_calls": [{"id": "call00000", "function": {"name": name, "arguments": "{}"}}]}
        told = {"role": "tool", "tool_call_id": "call00000", "content": "b"}
        turns: tuple[tuple[Message, Message], ...] = (({}, {"role": "user", "content": "b"}), (tool_call, told))
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


_ABSENT = {
    TOKENIZE: "it has no /tokenize that takes messages",
    GENERATE: "it has no /inference/v1/generate (vLLM has it with --enable-scale-out)",
    DERENDER: "it has no /v1/chat/completions/derender (vLLM has it with --enable-scale-out)",
}


@dataclass(frozen=True, slots=True)
class TokenRoutes:
    """vLLM's routes for token ids on a model's servers."""

    backend: Backend
    model: str
    retry: RetryPolicy

    async def why_not(self, renderer: TurnRenderer) -> str | None:
        """Return the reason why turns cannot be sent as token ids, or None where they can.

        Raises:
            ProviderError: the server could not be asked, or answered with errors of its own.
        """
        path = TOKENIZE
        try:
            await renderer.check()
            ids = await renderer.first([{"role": "user", "content": "a"}], None, {})
            path = GENERATE
            sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0}
            answer = await self._ask(GENERATE, {"model": self.model, "token_ids": ids, "sampling_params": sampling})
            choice = answer["choices"][0]
            if not choice.get("token_ids") or not choice.get("logprobs"):
                return f"{GENERATE} answered without token_ids or logprobs"
            path = DERENDER
            await self._ask(DERENDER, derender_body(self.model, ids, choice, {}))
        except CannotRenderTurnError as error:
            return str(error)
        except (ModelError, KeyError, IndexError, TypeError) as error:
            status = getattr(error, "status", None)
            if isinstance(error, (ProviderError, InvalidModelResponseError)) and (status is None or status >= 500):
                raise
            return _ABSENT[path] if status in (403, 404, 405, 501) else f"{path} cannot be used: {error}"
        return None

    async def render(self, messages: Sequence[Message], tools: Tools, options: Mapping[str, Any]) -> list[int]:
        """Render a conversation by /tokenize, as `Render`.

        Raises:
            CannotRenderTurnError: the template refuses it.
        """
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
        ids = answer.get("tokens")
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise ProviderError(f"{TOKENIZE} answered with tokens={ids!r:.200}, which are no token ids")
        return ids

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        return await retry(lambda: self.backend.call(path, body), self.retry)


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
