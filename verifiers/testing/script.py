"""Answers of the fakes: a script of answers, and the response bodies made from them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import ConfigError
from verifiers.testing.faults import Fault

# ASCII's own control characters for these jobs: start of heading, start of text, end of text, shift out and in.
_ROLE, _TEXT, _END, _CALL, _THOUGHT = "\x01", "\x02", "\x03", "\x0e", "\x0f"

END_ID = ord(_END)
"""Token id that ends each message (the end-of-sequence token)."""


def encode_text(text: str) -> list[int]:
    return [ord(character) for character in text]


def decode_ids(ids: Iterable[int]) -> str:
    return "".join(map(chr, ids))


def fake_logprob(token_id: int) -> float:
    """Return the log-probability that the fakes report for a token, in nats: -0.1 .. -0.7 by its id alone."""
    return -(1 + token_id % 7) / 10


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message as its tokens would be sampled: reasoning, content, tool calls.

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
    """Return a conversation as one text that ends where the assistant's answer begins."""
    parts = [f"{_ROLE}tools{_TEXT}{json.dumps(tools, sort_keys=True)}{_END}"] if tools else []
    parts += [f"{_ROLE}{message.get('role', 'user')}{_TEXT}{message_text(message)}{_END}" for message in messages]
    return "".join(parts) + f"{_ROLE}assistant{_TEXT}"


def prompt_ids(body: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids of each prompt in a request body: one for chats, one or more for completions."""
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


# -- answers ---------------------------------------------------------------------------------------------------------

Answer = str | dict[str, Any] | Fault
"""A text, a message dict (content, tool_calls, reasoning_content, finish_reason), or a failure."""

Answers = Answer | Sequence[Answer] | Callable[[dict[str, Any]], Answer | Awaitable[Answer]] | None
"""A script: one answer for all requests; a list served in order of arrival and then from its start again; a
function of the request body, perhaps async; None answers "ok"."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request that a fake was sent.

    Attributes:
        number: from 0, in order of arrival, counted by kind: generation, and each weight route by itself.
    """

    number: int
    path: str
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return list(self.body.get("messages") or ())


class Script:
    """The source of the answer to each request."""

    def __init__(self, answers: Answers = None) -> None:
        self._function: Callable[[dict[str, Any]], Answer | Awaitable[Answer]] | None = None
        self._listed: list[Answer] = []
        self._served = 0
        if answers is None:
            self._listed = ["ok"]
        elif isinstance(answers, (str, dict, Fault)):
            self._listed = [answers]
        elif callable(answers):
            self._function = answers
        else:
            self._listed = list(answers)
            if not self._listed:
                raise ConfigError("the list of scripted answers is empty; give at least one.")

    async def answer(self, body: dict[str, Any]) -> Answer:
        """Return the next answer; raises whatever a scripted function raises."""
        if self._function is not None:
            answer = self._function(body)
            result = await answer if inspect.isawaitable(answer) else answer
        else:
            result = self._listed[self._served % len(self._listed)]
            self._served += 1
        if not isinstance(result, (str, dict, Fault)):
            raise ConfigError(f"a scripted answer is {result!r}; it must be a text, a message dict or a Fault.")
        return result

    async def answers(self, body: dict[str, Any]) -> list[str | dict[str, Any]] | Fault:
        """Return one answer for each choice that the request asks for, or the first Fault among them."""
        answers: list[str | dict[str, Any]] = []
        for _ in range(len(_prompts(body)) * (body.get("n") or 1)):
            answer = await self.answer(body)
            if isinstance(answer, Fault):
                return answer
            answers.append(answer)
        return answers


def response_body(
    body: Mapping[str, Any],
    answers: Sequence[str | dict[str, Any]],
    *,
    number: int = 0,
    model: str = "fake",
    weight_version: int | str = 0,
    token_ids: bool = True,
) -> dict[str, Any]:
    """Return the response to a chat or completion request, in OpenAI's format with vLLM's fields for token ids.

    Args:
        body: the request; `max_tokens`, `n`, `logprobs` and `return_token_ids` are honoured, sampling settings
            and stop strings are not.
        weight_version: reported as the version of every sampled token.
        token_ids: False leaves out token ids and versions even where asked for, as most providers do.
    """
    chat = "messages" in body
    prompts = prompt_ids(body)
    sampled = [_sample(answer, body) for answer in answers]
    per_prompt = len(sampled) // len(prompts)
    choices = [
        _choice(index, choice, body, prompts[index // per_prompt], token_ids, weight_version)
        for index, choice in enumerate(sampled)
    ]
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(choice.ids) for choice in sampled)
    response: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": body.get("model") or model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    if chat and token_ids and body.get("return_token_ids"):
        response["prompt_token_ids"] = prompts[0]
    return response


@dataclass(frozen=True, slots=True)
class _SampledText:
    ids: list[int]
    message: dict[str, Any]
    finish_reason: str


def _sample(answer: str | dict[str, Any], body: Mapping[str, Any]) -> _SampledText:
    message = _as_message(answer)
    finish_reason = message.pop("finish_reason", None)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    ids = [*encode_text(message_text(message)), END_ID]
    if limit is not None and len(ids) > limit:
        cut = ids[:limit]
        return _SampledText(cut, {"role": "assistant", "content": decode_ids(cut)}, "length")
    return _SampledText(ids, message, finish_reason or ("tool_calls" if message.get("tool_calls") else "stop"))


def _as_message(answer: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    message = {"role": "assistant", "content": None, **answer}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, index) for index, call in enumerate(calls)]
    return message


def _tool_call(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    # The short form {"name": ..., "arguments": {...}} is taken as well.
    function = call.get("function", call)
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {
        "id": call.get("id") or f"call_{index}",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _choice(
    index: int, sampled: _SampledText, body: Mapping[str, Any], prompt: list[int], token_ids: bool, version: int | str
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": sampled.finish_reason, "logprobs": None}
    if "messages" in body:
        choice["message"] = sampled.message
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [_logprob_entry(token_id) for token_id in sampled.ids], "refusal": None}
    else:
        choice["text"] = sampled.message["content"] or ""
        if body.get("logprobs") is not None and body["logprobs"] is not False:
            choice["logprobs"] = _completion_logprobs(sampled.ids)
    if token_ids and body.get("return_token_ids"):
        choice["token_ids"] = sampled.ids
        if body.get("return_sampling_mask"):
            # nothing is left out of a script
            choice["sampling_mask"] = [[] for _ in sampled.ids]
        choice["weight_versions"] = [{"version": str(version), "start": 0, "end": len(sampled.ids)}]
        if "messages" not in body:
            choice["prompt_token_ids"] = prompt
    return choice


def _logprob_entry(token_id: int) -> dict[str, Any]:
    token = chr(token_id)
    encoded = list(token.encode("utf-8", "surrogatepass"))
    return {"token": token, "logprob": fake_logprob(token_id), "bytes": encoded, "top_logprobs": []}


def _completion_logprobs(ids: Sequence[int]) -> dict[str, Any]:
    return {
        "tokens": [chr(token_id) for token_id in ids],
        "token_logprobs": [fake_logprob(token_id) for token_id in ids],
        "top_logprobs": None,
        "text_offset": list(range(len(ids))),
    }


def _prompts(body: Mapping[str, Any]) -> Sequence[Any]:
    prompt = body.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return prompt if many and isinstance(prompt, list) else [prompt]
