"""Writing OpenAI's chat-completion JSON, with vLLM's token ids and weight versions."""

from __future__ import annotations

import time
import uuid
from typing import Any

from verifiers_embedded.generation import Generation
from verifiers_embedded.prompts import ChatText
from verifiers_embedded.stopping import cut_at_stop
from verifiers_embedded.tool_calls import call_id
from verifiers_embedded.wire import ChatRequest


def chat_completion(
    request: ChatRequest, prompt_ids: list[int], generation: Generation, text: ChatText
) -> dict[str, Any]:
    """The response body.

    With `return_token_ids` it carries ``prompt_token_ids`` and the choice's ``token_ids``: every sampled
    token, also the end-of-text or stop-string token that ended it. With `logprobs` there is one entry for
    each of these ids.
    """
    message = _message(request, prompt_ids, generation, text)
    finish_reason: str = generation.finish_reason
    if message.get("tool_calls") and finish_reason == "stop":
        finish_reason = "tool_calls"
    choice: dict[str, Any] = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(generation, text) if request.logprobs else None,
        "finish_reason": finish_reason,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in generation.spans
        ],
    }
    sampled = len(generation.token_ids)
    body: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": sampled,
            "total_tokens": len(prompt_ids) + sampled,
        },
    }
    if request.return_token_ids:
        choice["token_ids"] = generation.token_ids
        body["prompt_token_ids"] = prompt_ids
    return body


def _message(
    request: ChatRequest, prompt_ids: list[int], generation: Generation, text: ChatText
) -> dict[str, Any]:
    """The assistant's message; with tools in the request its calls stand apart from the content."""
    content = cut_at_stop(text.decode(generation.token_ids), request.stop)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if not request.tools:
        return message
    answer = text.divide(generation.token_ids, content)
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


def _logprobs(generation: Generation, text: ChatText) -> dict[str, Any]:
    content = []
    for token_id, log_prob in zip(generation.token_ids, generation.log_probs, strict=True):
        name, encoded = text.token(token_id)
        content.append({"token": name, "logprob": log_prob, "bytes": encoded, "top_logprobs": []})
    return {"content": content, "refusal": None}
