"""From token ids back to a chat message, under vLLM's names: the last step of a generation from token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from verifiers_embedded.answers import chat_message, ending, head, usage
from verifiers_embedded.errors import ApiError
from verifiers_embedded.fields import read_fields, short, typed
from verifiers_embedded.generation import FinishReason, Generation
from verifiers_embedded.prompts import ChatText
from verifiers_embedded.requests import ChatRequest, parse_chat_request, token_ids_of

_FIELDS = frozenset({"model", "generate_response", "prompt_tokens", "prompt_token_ids", "chat_request"})


@dataclass(frozen=True)
class DerenderRequest:
    """Finished generations, and the chat request that they are the answer to.

    Args:
        prompt_ids: what the generations continue: names of tool calls are made of them, and their end says
            whether a think tag is open.
    """

    model: str | None
    chat: ChatRequest
    prompt_ids: list[int]
    generations: list[Generation]


def parse_derender_request(body: Any) -> DerenderRequest:
    """Checks a body of /v1/chat/completions/derender and reads it.

    Of each choice of ``generate_response`` the ids and the finish reason are read; log-probs stay there.

    Raises:
        ApiError: status 400; the message names the field, the value and what is expected.
    """
    fields = read_fields(body, _FIELDS, {"stream": (False,)})
    response = typed(fields, "generate_response", dict, None)
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ApiError(
            f"generate_response.choices must be a list of at least one choice, not {short(choices)}",
            param="generate_response",
        )
    return DerenderRequest(
        model=typed(fields, "model", str, "") if "model" in fields else None,
        chat=parse_chat_request({"model": "", **typed(fields, "chat_request", dict, None)}),
        prompt_ids=token_ids_of(fields, "prompt_token_ids") if "prompt_token_ids" in fields else [],
        generations=[_generation(choice) for choice in choices],
    )


def derendered(request: DerenderRequest, model_name: str, text: ChatText) -> dict[str, Any]:
    """The body of a chat completion whose choices are the generations' messages."""
    choices = []
    for index, generation in enumerate(request.generations):
        message = chat_message(request.chat, request.prompt_ids, generation, text)
        choice = {"index": index, "message": message, "logprobs": None}
        choices.append(choice | ending(generation, bool(message.get("tool_calls"))))
    body = head("chatcmpl", "chat.completion", request.chat.delivery) | {"model": model_name}
    return body | {"choices": choices, "usage": usage([request.prompt_ids], request.generations)}


def _generation(choice: Any) -> Generation:
    if not isinstance(choice, dict):
        raise ApiError(
            f"generate_response.choices must hold objects, not {short(choice)}", param="generate_response"
        )
    reasons: Mapping[str, FinishReason] = {reason: reason for reason in get_args(FinishReason)}
    reason = choice.get("finish_reason", "stop")
    if not isinstance(reason, str) or reason not in reasons:
        raise ApiError(
            f"finish_reason must be one of {', '.join(reasons)}, not {short(reason)}",
            param="generate_response",
        )
    return Generation(token_ids_of(choice, "token_ids"), [], reasons[reason], [])
