"""The body of /tokenize, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verifiers_embedded.errors import ApiError
from verifiers_embedded.fields import read_fields, typed
from verifiers_embedded.requests import ChatRequest, parse_chat_request

_FIELDS = frozenset(
    {
        "model",
        "prompt",
        "messages",
        "add_special_tokens",
        "return_token_strs",
        "tools",
        "chat_template_kwargs",
    }
)


@dataclass(frozen=True)
class TokenizeRequest:
    """A text, or a conversation to be rendered."""

    model: str | None
    source: str | ChatRequest
    add_special_tokens: bool
    return_token_strs: bool


def parse_tokenize_request(body: Any) -> TokenizeRequest:
    """Checks a body and reads it.

    Raises:
        ApiError: neither or both of `prompt` and `messages`, or a field that cannot be obeyed.
    """
    fields = read_fields(body, _FIELDS)
    if ("prompt" in fields) == ("messages" in fields):
        raise ApiError("give either 'prompt', a text, or 'messages'", param="prompt")
    source: str | ChatRequest
    if "prompt" in fields:
        source = typed(fields, "prompt", str, "")
    else:
        chat = {
            name: fields[name] for name in ("messages", "tools", "chat_template_kwargs") if name in fields
        }
        source = parse_chat_request({"model": "", **chat})
    return TokenizeRequest(
        model=typed(fields, "model", str, "") if "model" in fields else None,
        source=source,
        add_special_tokens=typed(fields, "add_special_tokens", bool, True),
        return_token_strs=typed(fields, "return_token_strs", bool, False),
    )
