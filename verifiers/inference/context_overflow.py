"""Whether a refusal says that a prompt does not fit the model's context, in the words of the servers there are."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["is_context_overflow"]

_CODES = r"context_length_exceeded|model_context_window_exceeded|exceed_context_size_error|ContextWindowExceeded"
_WORDINGS = re.compile(
    "|".join(
        (
            _CODES,
            # OpenAI, vLLM, SGLang, Mistral, OpenRouter; Azure
            r"maximum context length|exceeds? the context window|tokens exceed the configured limit",
            # vLLM: three generations
            r"maximum model length|model's context length is only",
            # SGLang and Together; OpenRouter's Poolside
            r"longer than the model's context length|exceeds? the maximum allowed (?:input )?length",
            # Anthropic-compatible, Fireworks; Bedrock
            r"prompt is too long|exceeds? context limit|input is too long for (?:the )?requested model",
            # llama.cpp
            r"exceeds? (?:the )?(?:available )?context size",
            # TGI
            r"`?inputs`? tokens \+ `?max_new_tokens`? must be|`?inputs`? must have less than \d+ tokens",
            # Groq, xAI, Gemini, Copilot, MiniMax
            r"reduce the length of the messages|maximum prompt length is \d+|context window exceeds limit",
            r"token count\b.{0,40}\bexceeds the (?:maximum number of tokens|limit of \d+)",
        )
    ),
    re.IGNORECASE,
)
# llama.cpp's first generation answered 500, and so do some gateways; there only what is unmistakable counts
_WITH_ANY_STATUS = re.compile(rf"{_CODES}|exceeds the available context size", re.IGNORECASE)

# Sentences that name the context, the prompt and the room asked for the answer, each in tokens.
_SUMS = tuple(
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        # vLLM
        r"context length is (?P<context>\d+) tokens.*?requested (?P<answer>\d+) output tokens and your prompt "
        r"contains (?:at least )?(?P<prompt>\d+) input tokens",
        r"too large: (?P<answer>\d+)\..*?context length is (?P<context>\d+) tokens and your request has "
        r"(?P<prompt>\d+) input tokens",
        # OpenAI, DeepSeek; OpenRouter
        r"context length is (?P<context>\d+) tokens.*?\((?P<prompt>\d+) (?:in the messages|in your prompt|"
        r"of text input).*?(?P<answer>\d+) (?:in|for) the (?:completion|output)\)",
        # SGLang
        r"context length of (?P<context>\d+) tokens.*?(?P<prompt>\d+) tokens from the input messages and "
        r"(?P<answer>\d+) tokens for the completion",
        # Anthropic
        r"exceed context limit: (?P<prompt>\d+) \+ (?P<answer>\d+) > (?P<context>\d+)",
        # TGI
        r"must be <= (?P<context>\d+)\. Given: (?P<prompt>\d+) `?inputs`? tokens and (?P<answer>\d+)",
    )
)


def is_context_overflow(status: int | None, text: str) -> bool:
    """Return whether a refusal says that the prompt, with the answer that was asked for, does not fit the context.

    False where the answer alone is too long for the context: that is a `max_tokens` no prompt could go with, a
    mistake in the settings and not the end of a conversation.

    Args:
        status: HTTP status of the refusal.
        text: its body, or the text of the exception that a client made of it.
    """
    if status is None or not (status in (400, 413, 422) or status >= 500):
        return False
    said = _said(text)
    wordings = _WORDINGS if status < 500 else _WITH_ANY_STATUS
    return wordings.search(said) is not None and not _answer_alone_is_too_long(said)


def _answer_alone_is_too_long(said: str) -> bool:
    for pattern in _SUMS:
        found = pattern.search(said)
        if found is not None:
            context, prompt, answer = (int(found[name]) for name in ("context", "prompt", "answer"))
            return answer >= context > prompt
    return False


def _said(text: str) -> str:
    """Return the server's own words; some bodies quote the request too, which may hold anything."""
    if not text.startswith("{"):
        return text
    try:
        error: Any = json.loads(text)
    except ValueError:
        return text
    inner = error.get("error", error)
    if not isinstance(inner, dict):
        return str(inner)
    detail = inner.get("detail")
    if isinstance(detail, list):
        detail = [item.get("msg") for item in detail if isinstance(item, dict)]
    return " ".join(
        str(part) for part in (inner.get("message"), detail, inner.get("code"), inner.get("type")) if part
    )
