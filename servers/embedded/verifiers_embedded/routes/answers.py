"""Writing OpenAI's JSON for finished completions, with vLLM's token ids and weight versions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from verifiers_embedded.engine.generation import Generation
from verifiers_embedded.engine.scoring import PromptScore
from verifiers_embedded.engine.stopping import cut_at_stop, first_stop
from verifiers_embedded.routes.requests import ChatRequest, Delivery, DerenderRequest, TextRequest, TokenRequest
from verifiers_embedded.text.prompts import ChatText
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
        choice |= chat_end(request, generation, message, text)
        if request.return_token_ids:
            choice["token_ids"] = generation.token_ids
        choices.append(choice | sampling_mask(request, generation))
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
    scored: Sequence[PromptScore] | None = None,
) -> dict[str, Any]:
    """Return the body of a completion: `n` choices of the first prompt, then those of the second, and so on.

    `scored` are the prompts' log-probabilities: before those of an answer that echoes, and as vLLM writes them.
    """
    choices = []
    for index, generation in enumerate(generations):
        prompt_text, prompt_ids = prompts[index // request.n]
        score = None if scored is None else scored[index // request.n]
        whole = text.decode(generation.token_ids)
        said = cut_at_stop(whole, request.stop_strings)
        choice = {"index": index, "text": prompt_text + said if request.echo else said, "logprobs": None}
        if request.wants_logprobs:
            ids, likeliest = generation.token_ids, generation.likeliest
            log_probs: list[float | None] = [*generation.log_probs]
            if request.echo and score is not None:
                ids, log_probs = [*prompt_ids, *ids], [None, *score.log_probs, *log_probs]
                likeliest = [[], *(one[: request.top_logprobs] for one in score.likeliest), *likeliest]
            choice["logprobs"] = text_logprobs(text, ids, log_probs, likeliest)
        choice |= {**finish_fields(generation), "stop_reason": first_stop(whole, request.stop_strings)}
        if request.return_token_ids:
            choice |= {"prompt_token_ids": prompt_ids, "token_ids": generation.token_ids}
        if score is not None and request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(text, prompt_ids, score, request.prompt_logprobs)
        choices.append(choice | sampling_mask(request, generation))
    body = head("cmpl", "text_completion", request)
    return body | {"choices": choices, "usage": usage([ids for _, ids in prompts], generations)}


def prompt_logprobs(
    text: ChatText, prompt_ids: list[int], score: PromptScore, alternatives: int
) -> list[dict[str, Any] | None]:
    """Return by id the log-probability of each token of a prompt but the first, and of the likeliest in its place."""
    found: list[dict[str, Any] | None] = [None]
    for token, log_prob, likeliest in zip(prompt_ids[1:], score.log_probs, score.likeliest, strict=True):
        entries = {token: log_prob, **dict(likeliest[:alternatives])}
        found.append({str(one): {"logprob": entries[one], "decoded_token": text.token(one)[0]} for one in entries})
    return found


def token_generation(request: TokenRequest, generations: Sequence[Generation], text: ChatText) -> dict[str, Any]:
    choices = []
    for index, generation in enumerate(generations):
        choice = {"index": index, "token_ids": generation.token_ids, "logprobs": None}
        if request.wants_logprobs:
            choice["logprobs"] = chat_logprobs(text, generation.token_ids, generation.log_probs, generation.likeliest)
        choices.append(choice | finish_fields(generation) | sampling_mask(request, generation))
    return {"request_id": f"generate-{uuid.uuid4().hex}", "choices": choices, "prompt_logprobs": None}


def sampling_mask(request: ChatRequest | TextRequest | TokenRequest, generation: Generation) -> dict[str, Any]:
    """Return the ids that could be drawn in place of each token, as vLLM names them; none where all could."""
    return {"sampling_mask": generation.kept} if request.return_sampling_mask else {}


def derendered(request: DerenderRequest, model_name: str, text: ChatText) -> dict[str, Any]:
    text.check_tools(request.chat_request.shown_tools)
    prompt_ids = request.prompt_token_ids or []
    generations = [
        Generation(each.token_ids, [], each.finish_reason, []) for each in request.generate_response.choices
    ]
    choices = []
    for index, generation in enumerate(generations):
        message = chat_message(request.chat_request, prompt_ids, generation, text)
        choice = {"index": index, "message": message, "logprobs": None}
        choices.append(choice | chat_end(request.chat_request, generation, message, text))
    body = head("chatcmpl", "chat.completion", request.chat_request) | {"model": model_name}
    return body | {"choices": choices, "usage": usage([prompt_ids], generations)}


def chat_message(
    request: ChatRequest, prompt_ids: list[int], generation: Generation, text: ChatText
) -> dict[str, Any]:
    """Return the assistant's message: content, and apart from it reasoning and, with tools in the request, calls."""
    ids = generation.token_ids
    said = marked = cut_at_stop(text.decode(ids), request.stop_strings)
    if request.shown_tools or text.reads_whole:
        marked = cut_at_stop(text.decode_with_marks(ids), request.stop_strings)
    answer = text.read(marked, said, prompt_ids, request.shown_tools)
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
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


def chat_end(request: ChatRequest, generation: Generation, message: dict[str, Any], text: ChatText) -> dict[str, Any]:
    """Return why a chat completion ended; a call that was asked for by name is the answer, and no reason."""
    fields = finish_fields(generation, bool(message.get("tool_calls")) and request.named_tool is None)
    return {**fields, "stop_reason": first_stop(text.decode(generation.token_ids), request.stop_strings)}


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
    text: ChatText, ids: Sequence[int], log_probs: Sequence[float | None], likeliest: TopTokens, offset: int = 0
) -> dict[str, Any]:
    """Return log-probabilities in the form of completions; `offset` is where the first token's text begins."""
    names, offsets, tops = [], [], []
    for token_id, log_prob, others in zip(ids, log_probs, likeliest, strict=True):
        name = text.token(token_id)[0]
        names.append(name)
        offsets.append(offset)
        offset += shown_length(text, token_id, offset)
        top = {text.token(other)[0]: value for other, value in others}
        # the sampled token is always among them, as OpenAI has it
        tops.append({**top, name: log_prob} if top else None)
    return {
        "tokens": names,
        "token_logprobs": list(log_probs),
        "top_logprobs": tops if any(tops) else None,
        "text_offset": offsets,
    }


def shown_length(text: ChatText, token_id: int, offset: int) -> int:
    """Return the characters of a token in a text, where a first word of SentencePiece has no space before it.

    Special tokens are left out of texts.
    """
    if text.is_special(token_id):
        return 0
    name = text.token(token_id)[0]
    has_lost_space = offset == 0 and name.startswith(" ") and not text.decode([token_id]).startswith(" ")
    return len(name) - has_lost_space


def _token(text: ChatText, token_id: int, log_prob: float) -> dict[str, Any]:
    name, encoded = text.token(token_id)
    return {"token": name, "logprob": log_prob, "bytes": encoded}
