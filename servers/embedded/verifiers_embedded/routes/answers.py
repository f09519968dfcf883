"""Writing OpenAI's JSON for finished completions, with vLLM's token ids and weight versions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from verifiers_embedded.engine.generation import Generation
from verifiers_embedded.engine.stopping import cut_at_stop
from verifiers_embedded.routes.requests import ChatRequest, Delivery, DerenderRequest, TextRequest, TokenRequest
from verifiers_embedded.text.prompts import ChatText, begun_by, split_reasoning
from verifiers_embedded.text.tool_calls import call_id

TopTokens = Sequence[Sequence[tuple[int, float]]]


def chat_completion(
    request: ChatRequest, prompt_ids: list[int], generations: Sequence[Generation], text: ChatText
) -> dict[str, Any]:
    """Return the body of a chat completion.

    With `return_token_ids` it carries ``prompt_token_ids`` and each choice ``token_ids``: every sampled
    token, also the end-of-text or stop-string token that ended it. With `logprobs` there is one entry for
    each of these ids.
    """
    choices = []
    for index, generation in enumerate(generations):
        message = chat_message(request, prompt_ids, generation, text)
        choice = {"index": index, "message": message, "logprobs": None}
        if request.wants_logprobs:
            choice["logprobs"] = chat_logprobs(text, generation.token_ids, generation.log_probs, generation.likeliest)
        choice |= finish_fields(generation, bool(message.get("tool_calls")))
        if request.return_token_ids:
            choice["token_ids"] = generation.token_ids
        choices.append(choice)
    body = head("chatcmpl", "chat.completion", request)
    body |= {"choices": choices, "usage": usage([prompt_ids], generations)}
    if request.return_token_ids:
        body["prompt_token_ids"] = prompt_ids
    return body


def text_completion(
    request: TextRequest,
    prompts: Sequence[tuple[str, list[int]]],
    generations: Sequence[Generation],
    text: ChatText,
) -> dict[str, Any]:
    """Return the body of a completion: `n` choices of the first prompt, then those of the second, and so on."""
    choices = []
    for index, generation in enumerate(generations):
        prompt_text, prompt_ids = prompts[index // request.n]
        said = cut_at_stop(text.decode(generation.token_ids), request.stop_strings)
        choice = {"index": index, "text": prompt_text + said if request.echo else said, "logprobs": None}
        if request.wants_logprobs:
            choice["logprobs"] = text_logprobs(text, generation.token_ids, generation.log_probs, generation.likeliest)
        choice |= finish_fields(generation)
        if request.return_token_ids:
            choice |= {"prompt_token_ids": prompt_ids, "token_ids": generation.token_ids}
        choices.append(choice)
    body = head("cmpl", "text_completion", request)
    return body | {"choices": choices, "usage": usage([ids for _, ids in prompts], generations)}


def token_generation(request: TokenRequest, generations: Sequence[Generation], text: ChatText) -> dict[str, Any]:
    choices = []
    for index, generation in enumerate(generations):
        choice = {"index": index, "token_ids": generation.token_ids, "logprobs": None}
        if request.wants_logprobs:
            choice["logprobs"] = chat_logprobs(text, generation.token_ids, generation.log_probs, generation.likeliest)
        choices.append(choice | finish_fields(generation))
    return {"request_id": f"generate-{uuid.uuid4().hex}", "choices": choices, "prompt_logprobs": None}


def derendered(request: DerenderRequest, model_name: str, text: ChatText) -> dict[str, Any]:
    prompt_ids = request.prompt_token_ids or []
    generations = [
        Generation(each.token_ids, [], each.finish_reason, []) for each in request.generate_response.choices
    ]
    choices = []
    for index, generation in enumerate(generations):
        message = chat_message(request.chat_request, prompt_ids, generation, text)
        choice = {"index": index, "message": message, "logprobs": None}
        choices.append(choice | finish_fields(generation, bool(message.get("tool_calls"))))
    body = head("chatcmpl", "chat.completion", request.chat_request) | {"model": model_name}
    return body | {"choices": choices, "usage": usage([prompt_ids], generations)}


def chat_message(
    request: ChatRequest, prompt_ids: list[int], generation: Generation, text: ChatText
) -> dict[str, Any]:
    """Return the assistant's message: content, and apart from it reasoning and, with tools in the request, calls."""
    said = cut_at_stop(text.decode(generation.token_ids), request.stop_strings)
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if text.splits_reasoning:
        reasoning, said = split_reasoning(said, begun_by(text.decode_all(prompt_ids[-8:])))
        message["content"] = said
        if reasoning is not None:
            message["reasoning_content"] = reasoning
    if not request.shown_tools:
        return message
    answer = text.divide(generation.token_ids, said)
    calls = answer.calls if request.parallel_tool_calls else answer.calls[:1]
    if calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": call_id(prompt_ids, generation.token_ids, place),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(calls)
        ]
    return message


def head(prefix: str, kind: str, delivery: Delivery) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": delivery.model,
    }


def finish_fields(generation: Generation, calls_tools: bool = False) -> dict[str, Any]:
    reason: str = generation.finish_reason
    return {
        "finish_reason": "tool_calls" if calls_tools and reason == "stop" else reason,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in generation.spans
        ],
    }


def usage(prompts: Sequence[Sequence[int]], generations: Sequence[Generation]) -> dict[str, int]:
    """Count the tokens; a prompt with several completions counts once."""
    read = sum(len(ids) for ids in prompts)
    sampled = sum(len(generation.token_ids) for generation in generations)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def chat_logprobs(
    text: ChatText, ids: Sequence[int], log_probs: Sequence[float], likeliest: TopTokens
) -> dict[str, Any]:
    """Return log-probabilities in the form of chat completions, in nats."""
    content = []
    for token_id, log_prob, others in zip(ids, log_probs, likeliest, strict=True):
        entry = _token(text, token_id, log_prob)
        entry["top_logprobs"] = [_token(text, other, value) for other, value in others]
        content.append(entry)
    return {"content": content, "refusal": None}


def text_logprobs(
    text: ChatText, ids: Sequence[int], log_probs: Sequence[float], likeliest: TopTokens, offset: int = 0
) -> dict[str, Any]:
    """Return log-probabilities in the form of completions; `offset` is where the first token's text begins."""
    names, offsets, tops = [], [], []
    for token_id, others in zip(ids, likeliest, strict=True):
        name = text.token(token_id)[0]
        names.append(name)
        offsets.append(offset)
        offset += len(name)
        tops.append({text.token(other)[0]: value for other, value in others} or None)
    return {
        "tokens": names,
        "token_logprobs": list(log_probs),
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def _token(text: ChatText, token_id: int, log_prob: float) -> dict[str, Any]:
    name, encoded = text.token(token_id)
    return {"token": name, "logprob": log_prob, "bytes": encoded}
