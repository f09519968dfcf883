"""OpenAI's Responses API behind the chat-completions calls that environments make.

A conversation goes as `input` items and comes back as one assistant message; nothing is kept on the server
(`store` is false), so that each call carries the whole conversation, as a chat completion does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.endpoint import CHAT, HttpBackend
from verifiers.inference.retry import RetryableError
from verifiers.inference.wire import WireObject, request_body
from verifiers.types import content_text, image_url_of

RESPONSES = "/responses"

_SAME = frozenset(
    {"metadata", "model", "parallel_tool_calls", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier",
     "store", "temperature", "text", "top_logprobs", "top_p", "truncation", "user", "include"}
)  # fmt: skip
# arguments without a counterpart that may be left out without changing an answer's meaning
_LEFT_OUT = frozenset({"seed", "stream", "n", "logprobs", "return_token_ids"})


class ResponsesBackend(HttpBackend):
    """`chat.completions.create` over POST /responses. Seeds and log-probs are not sent."""

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Make one call, as `HttpBackend.call` does.

        Raises:
            ConfigError: a text completion, or an argument without a counterpart in the Responses API.
        """
        if path != CHAT:
            raise ConfigError("the Responses API has no text completions; use message_type='chat', or api = 'chat'.")
        body = responses_body(request_body(arguments))
        data = await self.post(RESPONSES, body, arguments)
        return WireObject(self.read(data, RESPONSES, "message", convert=chat_completion))


def responses_body(chat: Mapping[str, Any]) -> dict[str, Any]:
    if chat.get("stream") or (chat.get("n") or 1) != 1 or chat.get("logprobs") or chat.get("return_token_ids"):
        raise ConfigError(
            "the Responses API was asked for streaming, several answers, log-probs or token ids; use api = 'chat'."
        )
    body: dict[str, Any] = {"store": False, "input": [item for m in chat["messages"] for item in _items(m)]}
    for name, value in chat.items():
        if name in _SAME:
            body[name] = value
        elif name in ("max_tokens", "max_completion_tokens"):
            body["max_output_tokens"] = value
        elif name == "reasoning_effort":
            body["reasoning"] = {**body.get("reasoning", {}), "effort": value}
        elif name == "tools":
            body["tools"] = [_tool(tool) for tool in value]
        elif name == "tool_choice":
            named = value.get("function", {}).get("name") if isinstance(value, dict) else None
            body["tool_choice"] = {"type": "function", "name": named} if named else value
        elif name == "response_format":
            body["text"] = {**body.get("text", {}), "format": _format(value)}
        elif name not in _LEFT_OUT and name != "messages" and value is not None:
            raise ConfigError(f"the Responses API has no argument {name!r}; leave it out, or use api = 'chat'.")
    return body


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    if tool.get("type") != "function" or "function" not in tool:
        return tool
    # chat completions are lax unless asked, responses strict unless told
    return {"type": "function", "strict": False, **tool["function"]}


def _format(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "json_schema", **value["json_schema"]} if value.get("type") == "json_schema" else value


def _items(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    role, content = message["role"], message.get("content")
    if role == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": content_text(content)}]
    items: list[dict[str, Any]] = []
    if content:
        kind = "output_text" if role == "assistant" else "input_text"
        items.append({"role": role, "content": content if isinstance(content, str) else _parts(content, kind)})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
            }
        )
    return items


def _parts(content: Sequence[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for part in content:
        if part.get("type") == "text":
            parts.append({"type": kind, "text": part["text"]})
        elif (url := image_url_of(part)) is not None:
            parts.append({"type": "input_image", "image_url": url, "detail": "auto"})
        else:
            raise ConfigError(f"a content part of type {part.get('type')!r} cannot go through the Responses API.")
    return parts


def chat_completion(response: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return a chat completion with the content of an object of the Responses API.

    Raises:
        RetryableError: the response failed, or is empty.
        ProviderError: it was refused for good.
    """
    status, error = response.get("status"), response.get("error") or {}
    if status in ("failed", "cancelled"):
        text = f"{url} answered with a response that {status}: {error.get('message') or 'no reason given'}"
        if error.get("code") in ("server_error", "rate_limit_exceeded", None):
            raise RetryableError(text)
        raise ProviderError(text)
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts: list[str] = []
    refusals: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for item in response.get("output") or ():
        if item.get("type") == "message":
            for part in item.get("content") or ():
                (refusals if part.get("type") == "refusal" else texts).append(
                    part.get("refusal") or part.get("text") or ""
                )
        elif item.get("type") == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
        elif item.get("type") == "reasoning":
            reasoning += [part.get("text", "") for part in item.get("summary") or ()]
    cut = status == "incomplete"
    if not (texts or refusals or calls or cut):
        raise RetryableError(f"{url} answered without a message: {response!r:.300}", empty=True)
    if texts:
        message["content"] = "".join(texts)
    for name, value in (
        ("refusal", "".join(refusals)),
        ("reasoning_content", "\n".join(reasoning)),
        ("tool_calls", calls),
    ):
        if value:
            message[name] = value
    reason = (response.get("incomplete_details") or {}).get("reason")
    finish = "tool_calls" if calls else "stop"
    if cut:
        finish = "content_filter" if reason == "content_filter" else "length"
    usage = response["usage"] if isinstance(response.get("usage"), Mapping) else {}
    return {
        "id": response.get("id"),
        "object": "chat.completion",
        "created": int(response.get("created_at") or 0),
        "model": response.get("model"),
        "choices": [{"index": 0, "finish_reason": finish, "logprobs": None, "message": message}],
        "usage": {
            "prompt_tokens": usage.get("input_tokens"),
            "completion_tokens": usage.get("output_tokens"),
            "total_tokens": usage.get("total_tokens"),
        },
    }
