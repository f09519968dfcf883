"""Answers sent while they are made: server-sent events, as OpenAI's and vLLM's clients read them.

What is sent of a completion adds up to what the whole answer would have held: text is sent when no later
token can change it, tool calls when they are complete.
"""

from __future__ import annotations

import abc
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any

from verifiers_embedded.engine.generation import Generation
from verifiers_embedded.engine.generation import Sequence as Growing
from verifiers_embedded.engine.stopping import SendableText, cut_at_stop, first_stop
from verifiers_embedded.routes.answers import (
    chat_end,
    chat_logprobs,
    chat_message,
    finish_fields,
    head,
    shown_length,
    text_logprobs,
    token_generation,
    usage,
)
from verifiers_embedded.routes.requests import ChatRequest, Delivery, TextRequest, TokenRequest
from verifiers_embedded.text.prompts import ChatText, split_reasoning

DONE = b"data: [DONE]\n\n"


class Progress:
    """A signal to a coroutine that any of several completions has grown. Made on the event loop that it wakes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._called = False

    def wake(self) -> None:
        """Wake the coroutine once, however many tokens come before it runs; from any thread."""
        if not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._event.set)
            except RuntimeError:
                # the loop is closed: nobody reads any more
                pass

    async def wait(self) -> None:
        """Wait until something has happened since the last call."""
        await self._event.wait()
        self._event.clear()
        self._called = False


class Watched:
    def __init__(self, index: int, progress: Progress) -> None:
        self.index = index
        self._progress = progress
        self._sequence: Growing | None = None
        self.future: Future[Generation] | None = None
        self.sent = 0

    def advance(self, sequence: Growing) -> None:
        """Note the new token; called by the engine after each."""
        self._sequence = sequence
        self._progress.wake()

    def follow(self, future: Future[Generation]) -> None:
        self.future = future
        future.add_done_callback(lambda _: self._progress.wake())

    def result(self) -> Generation:
        assert self.future is not None
        return self.future.result()

    def cancel(self) -> None:
        """Free the slot of a completion that nobody waits for; do nothing where it has ended."""
        if self.future is not None:
            self.future.cancel()

    def news(self) -> tuple[list[int], list[float], list[list[tuple[int, float]]]]:
        """Return the ids, log-probabilities and alternatives sampled since the last call."""
        if self._sequence is None:
            return [], [], []
        # read before the ids: the engine's thread adds to this list last
        size = len(self._sequence.log_probs)
        start, self.sent = self.sent, size
        prompt = len(self._sequence.request.prompt_ids)
        ids = self._sequence.tokens[prompt + start : prompt + size]
        return ids, self._sequence.log_probs[start:size], self._sequence.likeliest[start:size]


class Writer(abc.ABC):
    """A writer of the events of one kind of answer.

    Args:
        head: what every event begins with.
        prompts: token ids of the prompts.
    """

    def __init__(self, head: dict[str, Any], prompts: Sequence[Sequence[int]]) -> None:
        self._head, self._prompts = head, prompts

    def first(self, index: int) -> dict[str, Any] | None:
        """Return an event before the first token of a choice, if there is one."""
        return None

    @abc.abstractmethod
    def more(self, index: int, ids: list[int], log_probs: list[float], likeliest: list[Any]) -> dict[str, Any]:
        """Return the event for new tokens."""

    @abc.abstractmethod
    def last(self, index: int, generation: Generation) -> list[dict[str, Any]]:
        """Return what is left of a choice, and why it ended."""

    def counts(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """Return the event with the numbers of tokens."""
        return {**self._head, "choices": [], "usage": usage(self._prompts, generations)}

    def event(self, index: int, **fields: Any) -> dict[str, Any]:
        """Return an event of one choice."""
        return {**self._head, "choices": [{"index": index, "logprobs": None, "finish_reason": None, **fields}]}


async def events(
    watched: Sequence[Watched], progress: Progress, writer: Writer, delivery: Delivery
) -> AsyncIterator[bytes]:
    """Return the stream of one answer, to be written as it is. Raises what the engine answered a completion with."""
    for item in watched:
        first = writer.first(item.index)
        if first is not None:
            yield encoded(first)
    open_items, finished = list(watched), dict[int, Generation]()
    while open_items:
        await progress.wait()
        for item in list(open_items):
            assert item.future is not None
            # asked first: what is sampled after it belongs to the next round
            done = item.future.done()
            ids, log_probs, likeliest = item.news()
            if ids:
                yield encoded(writer.more(item.index, ids, log_probs, likeliest))
            if done:
                finished[item.index] = item.result()
                open_items.remove(item)
                for event in writer.last(item.index, finished[item.index]):
                    yield encoded(event)
    if delivery.include_usage:
        yield encoded(writer.counts([finished[item.index] for item in watched]))
    yield DONE


def encoded(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


class ChatWriter(Writer):
    """Events of a chat completion."""

    def __init__(self, request: ChatRequest, prompt_ids: list[int], text: ChatText) -> None:
        super().__init__(head("chatcmpl", "chat.completion.chunk", request), [prompt_ids])
        self._request, self._prompt_ids, self._text = request, prompt_ids, text
        self._begun = text.splits_reasoning and text.begins_reasoning(prompt_ids)
        marks = text.call_marks if request.shown_tools else ()
        self._waits_for_all = "" in marks or text.reads_whole
        ends = (*request.stop_strings, *(mark for mark in marks if mark))
        held = text.think_tags if text.splits_reasoning else ()
        decode = text.decode_with_marks if request.shown_tools else text.decode
        self._sendable = [SendableText(decode, ends, held, text.is_byte) for _ in range(request.n)]
        self._sent = [("", "") for _ in range(request.n)]

    def first(self, index: int) -> dict[str, Any]:
        event = self.event(index, delta={"role": "assistant", "content": ""})
        if self._request.return_token_ids:
            event["prompt_token_ids"] = self._prompt_ids
        return event

    def more(self, index: int, ids: list[int], log_probs: list[float], likeliest: list[Any]) -> dict[str, Any]:
        for token in ids:
            self._sendable[index].push(token)
        said = "" if self._waits_for_all else self._sendable[index].text
        reasoning, content = split_reasoning(said, self._begun) if self._text.splits_reasoning else (None, said)
        if self._text.splits_reasoning and not content.strip():
            # a tag that makes it reasoning may follow
            content = ""
        event = self.event(index, delta=self._delta(index, reasoning or "", content))
        if self._request.wants_logprobs:
            event["choices"][0]["logprobs"] = chat_logprobs(self._text, ids, log_probs, likeliest)
        if self._request.return_token_ids:
            event["choices"][0]["token_ids"] = ids
        return event

    def last(self, index: int, generation: Generation) -> list[dict[str, Any]]:
        message = chat_message(self._request, self._prompt_ids, generation, self._text)
        delta = self._delta(index, message.get("reasoning_content") or "", message["content"] or "")
        calls = message.get("tool_calls") or []
        if calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        end = self.event(index, delta={}, **chat_end(self._request, generation, message, self._text))
        return [self.event(index, delta=delta), end] if delta else [end]

    def _delta(self, index: int, reasoning: str, content: str) -> dict[str, Any]:
        sent_reasoning, sent_content = self._sent[index]
        self._sent[index] = (reasoning, content)
        delta: dict[str, Any] = {}
        if len(reasoning) > len(sent_reasoning):
            delta["reasoning_content"] = reasoning[len(sent_reasoning) :]
        if len(content) > len(sent_content):
            delta["content"] = content[len(sent_content) :]
        return delta


class TextWriter(Writer):
    """Events of a completion. The index counts the choices of all prompts, as in the whole answer."""

    def __init__(self, request: TextRequest, prompts: Sequence[tuple[str, list[int]]], text: ChatText) -> None:
        super().__init__(head("cmpl", "text_completion", request), [ids for _, ids in prompts])
        self._request, self._texts, self._text = request, [said for said, _ in prompts], text
        choices = len(prompts) * request.n
        self._sendable = [SendableText(text.decode, request.stop_strings, (), text.is_byte) for _ in range(choices)]
        self._sent = [0] * choices
        self._offsets = [0] * choices

    def first(self, index: int) -> dict[str, Any] | None:
        if not (self._request.echo or self._request.return_token_ids):
            return None
        place = index // self._request.n
        event = self.event(index, text=self._texts[place] if self._request.echo else "")
        if self._request.return_token_ids:
            event["choices"][0]["prompt_token_ids"] = self._prompts[place]
        return event

    def more(self, index: int, ids: list[int], log_probs: list[float], likeliest: list[Any]) -> dict[str, Any]:
        for token in ids:
            self._sendable[index].push(token)
        event = self.event(index, text=self._unsent(index, self._sendable[index].text))
        if self._request.wants_logprobs:
            offset = self._offsets[index]
            event["choices"][0]["logprobs"] = text_logprobs(self._text, ids, log_probs, likeliest, offset)
            for token in ids:
                self._offsets[index] += shown_length(self._text, token, self._offsets[index])
        if self._request.return_token_ids:
            event["choices"][0]["token_ids"] = ids
        return event

    def last(self, index: int, generation: Generation) -> list[dict[str, Any]]:
        whole, stop = self._text.decode(generation.token_ids), self._request.stop_strings
        end = {**finish_fields(generation), "stop_reason": first_stop(whole, stop)}
        return [self.event(index, text=self._unsent(index, cut_at_stop(whole, stop)), **end)]

    def _unsent(self, index: int, said: str) -> str:
        start, self._sent[index] = self._sent[index], max(self._sent[index], len(said))
        return said[start:]


class TokenWriter(Writer):
    """Events of /inference/v1/generate."""

    def __init__(self, request: TokenRequest, text: ChatText) -> None:
        super().__init__({"request_id": token_generation(request, [], text)["request_id"]}, [request.token_ids])
        self._request, self._text = request, text

    def more(self, index: int, ids: list[int], log_probs: list[float], likeliest: list[Any]) -> dict[str, Any]:
        event = self.event(index, token_ids=ids)
        if self._request.wants_logprobs:
            event["choices"][0]["logprobs"] = chat_logprobs(self._text, ids, log_probs, likeliest)
        return event

    def last(self, index: int, generation: Generation) -> list[dict[str, Any]]:
        return [self.event(index, token_ids=[], **finish_fields(generation))]
