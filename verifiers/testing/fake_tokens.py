"""A tokenization that needs no model: the token id of a character is its Unicode code point.

Conversations are rendered so that they extend one another: the prompt of turn k + 1 begins with the prompt and
the sampled tokens of turn k, end token included, as with a chat template that leaves history alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["END_ID", "decode_ids", "encode_text", "fake_logprob", "message_text", "prompt_ids", "render_chat"]

# ASCII's own control characters for these jobs: start of heading, start of text, end of text, shift out and in.
_ROLE, _TEXT, _END, _CALL, _THOUGHT = "\x01", "\x02", "\x03", "\x0e", "\x0f"

END_ID = ord(_END)
"""Token id that ends each message (the end-of-sequence token)."""


def encode_text(text: str) -> list[int]:
    """The token ids of a text: its code points."""
    return [ord(character) for character in text]


def decode_ids(ids: Iterable[int]) -> str:
    """The text of token ids, control characters included."""
    return "".join(map(chr, ids))


def fake_logprob(token_id: int) -> float:
    """The log-probability that the fakes report for a token, in nats: -0.1 .. -0.7 by its id alone."""
    return -(1 + token_id % 7) / 10


def message_text(message: Mapping[str, Any]) -> str:
    """What a message holds, as the tokens of it would be sampled: reasoning, content, tool calls.

    Ids of tool calls are left out, as models do not sample them.
    """
    reasoning = message.get("reasoning_content") or ""
    text = f"{_THOUGHT}{reasoning}{_THOUGHT}" if reasoning else ""
    text += _content_text(message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text += f"{_CALL}{function['name']}{_TEXT}{function['arguments']}"
    return text


def render_chat(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    """A conversation as one text that ends where the assistant's answer begins."""
    parts = [f"{_ROLE}tools{_TEXT}{json.dumps(tools, sort_keys=True)}{_END}"] if tools else []
    parts += [f"{_ROLE}{message.get('role', 'user')}{_TEXT}{message_text(message)}{_END}" for message in messages]
    return "".join(parts) + f"{_ROLE}assistant{_TEXT}"


def prompt_ids(body: Mapping[str, Any]) -> list[list[int]]:
    """The token ids of each prompt in a request body: one for chats, one or more for completions."""
    if "messages" in body:
        return [encode_text(render_chat(body["messages"], body.get("tools")))]
    prompt = body.get("prompt", "")
    if isinstance(prompt, str):
        return [encode_text(prompt)]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    return [encode_text(entry) if isinstance(entry, str) else list(entry) for entry in prompt]


def _content_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(
        part["text"] if part.get("type") == "text" else json.dumps(part, sort_keys=True) for part in content
    )
