"""Answers of a model's server, checked where they arrive, so that nothing behind has to expect anything else.

A message, its tool calls and `usage` are read at the HTTP client, the tokens of a turn where a rollout's calls are
tried. What can be mended is: tool arguments given as an object, content in parts, half of a surrogate pair. Anything
else that no server should send is a failed try, which the one retry of model calls repeats.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verifiers.inference.retry import RetryableError
from verifiers.inference.wire import sampled_tokens, whole_characters
from verifiers.types import content_text

__all__ = ["check_tokens", "counted_tokens", "read_completion", "version_number"]

# of a log-prob; vLLM writes -9999 for minus infinity, which no sampled token can have
_LEAST, _MOST = -9998.0, 1e-3
_LARGEST = 2**31
_SPAN = ("version", "start", "end")
# what a message may hold instead of content
_OTHER_CONTENT = ("tool_calls", "function_call", "refusal", "reasoning_content", "audio")
_UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError)

Converts = Callable[[dict[str, Any], str], dict[str, Any]]


def read_completion(
    data: dict[str, Any], url: str, field: str | None, *, convert: Converts | None = None, may_be_empty: bool = False
) -> dict[str, Any]:
    """Return a completion, in place, with fields of the types that OpenAI's have.

    A `usage`, or a number in it, that is none is left out: it is unknown.

    Args:
        field: what its choices must have: "message", "text", or None for neither.
        convert: makes the completion of an answer of another API.
        may_be_empty: an answer of which nothing was sampled is one, too.

    Raises:
        RetryableError: it is no completion, or stands for a failure of the provider's.
    """
    try:
        answer = convert(data, url) if convert is not None else data
        choices = answer.get("choices")
        if not choices or not isinstance(choices, list):
            raise RetryableError(f"{url} answered without a choice: {reprlib.repr(data)}", empty=True)
        for choice in choices:
            if choice.get("finish_reason") == "error":
                said = (choice.get("error") or {}).get("message")
                raise RetryableError(f"{url} answered with a choice that failed: {said!r:.300}")
            if field == "text":
                choice["text"] = whole_characters(choice["text"])
            elif field is not None and choice.get("message"):
                _mend_message(choice["message"])
        answer["usage"] = counted_tokens(answer) or None
        is_empty = not may_be_empty and field != "text" and _is_empty(choices[0], answer["usage"] or {})
    except _UNREADABLE as error:
        text = f"{url} answered with what is no completion ({error!r:.200}): {reprlib.repr(data)}"
        raise RetryableError(text) from error
    if is_empty:
        raise RetryableError(f"{url} answered without a choice: {reprlib.repr(data)}", empty=True)
    return answer


def _mend_message(message: dict[str, Any]) -> None:
    message["role"] = "assistant"
    # OpenRouter's name, and vLLM's
    reasoning, content = message.pop("reasoning", None), message.get("content")
    if isinstance(content, list):
        message["content"] = content_text(content)
    reasoning = message.pop("reasoning_content", None) or reasoning
    if reasoning and isinstance(reasoning, str):
        message["reasoning_content"] = reasoning
    for name in ("content", "refusal", "reasoning_content"):
        if message.get(name) is not None:
            message[name] = whole_characters(message[name])
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(place, call) for place, call in enumerate(message["tool_calls"])]


def _tool_call(place: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = {} if function.get("arguments") is None else function["arguments"]
    # Ollama and others give the object that the text stands for
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    named = {"name": whole_characters(function["name"]), "arguments": whole_characters(text)}
    call_id = whole_characters(str(call.get("id") or f"call_{place}"))
    return {**call, "id": call_id, "type": "function", "function": {**function, **named}}


def counted_tokens(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of an answer's `usage` that are numbers of tokens."""
    used = answer.get("usage")
    counts = used.items() if isinstance(used, Mapping) else ()
    return {name: value for name, value in counts if type(value) is int and 0 <= value < _LARGEST}


def _is_empty(choice: Mapping[str, Any], used: Mapping[str, Any]) -> bool:
    """Return whether a choice has no message, or one of which nothing was sampled.

    A model may well end its turn at once, but then it has sampled a token, or its content is "" and not null.
    """
    message = choice.get("message")
    if not message:
        return True
    if message.get("content") is not None or any(message.get(name) for name in _OTHER_CONTENT):
        return False
    sampled = used.get("completion_tokens") or choice.get("token_ids")
    return not sampled and choice.get("finish_reason") not in ("length", "content_filter")


def version_number(value: Any) -> int | None:
    """Return a version of weights as a number; None for a name, as of a server that was never pushed to."""
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def check_tokens(
    answer: Mapping[str, Any],
    url: str,
    *,
    needed: bool,
    vocab_size: int | None,
    has_prompt: bool,
) -> None:
    """Check the token ids, log-probs and versions of an answer's first choice, of which a turn is recorded.

    Args:
        answer: as plain data.
        url: of the server.
        needed: the answer must have them (training).
        vocab_size: number of token ids that the model has; None where that is not known.
        has_prompt: the route gives the prompt's ids, too.

    Raises:
        RetryableError: with what is wrong.
    """
    if not answer.get("choices"):
        return
    sampled = sampled_tokens(answer)
    given: dict[str, Any] = {"prompt_token_ids": sampled.prompt_ids} if has_prompt else {}
    given |= {"token_ids": sampled.completion_ids, "logprobs": sampled.logprobs}
    missing = [name for name, value in given.items() if value is None]
    if missing and needed:
        raise RetryableError(
            f"{url} answered without {' and '.join(missing)}, which training needs; use a server that honours "
            "return_token_ids and logprobs, such as vf-serve or vf-vllm, with no proxy before it that drops fields."
        )
    problems = () if missing else _problems(given, sampled.versions, vocab_size or _LARGEST)
    for problem in problems:
        raise RetryableError(f"{url} answered with {problem}.")


def _problems(given: Mapping[str, Any], spans: Sequence[Any], vocab_size: int) -> Iterator[str]:
    for name, values in given.items():
        types, least, most = ((int, float), _LEAST, _MOST) if name == "logprobs" else ((int,), 0, vocab_size - 1)
        values = values if isinstance(values, list) else [[values]]
        wrong = [each for each in values if type(each) not in types or not least <= each <= most]
        if wrong:
            yield f"{reprlib.repr(wrong[0])} among its {name}, which are numbers from {least} to {most}"
    ids, logprobs = len(given["token_ids"]), len(given["logprobs"])
    if ids != logprobs:
        yield f"{ids} token ids but {logprobs} log-probs, which must belong to the same tokens"
    after: Any = 0
    for span in spans:
        version, start, last = [span.get(name) if isinstance(span, Mapping) else None for name in _SPAN]
        number: Any = version_number(version) if isinstance(version, str) else version
        is_name = isinstance(version, str) and number is None
        is_known = is_name or (type(number) is int and 0 <= number < _LARGEST)
        if not is_known or type(start) is not int or type(last) is not int or not after <= start <= last:
            yield f"{reprlib.repr(span)} among its weight_versions, which are spans of tokens with a version"
        after = last
