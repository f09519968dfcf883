"""The retry of calls: one loop, one table of the failures that may pass, one rule for the waits.

Calls of the policy, of judges and of the dataserver and control calls of rollout servers all go through `retry`.
Waits grow by a factor of two with full jitter (Brooker, "Exponential Backoff And Jitter", AWS 2015), or follow
Retry-After.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from verifiers.errors import EmptyModelResponseError, ModelError, OverlongPromptError, ProviderError

if TYPE_CHECKING:
    from verifiers.inference.limiter import Limiter

T = TypeVar("T")


class RetryableError(ProviderError):
    """A failed try that may succeed when repeated. Never leaves `retry`, which raises a ProviderError in the end.

    Attributes:
        retry_after_s: the server's wish, in seconds, or None.
        unreachable: the server could not be reached, or the connection broke; an answer that was late is not that.
        broke: the connection was there, and broke before the answer was.
        empty: it was an answer with nothing in it.
        unresolved: the host's name has no address, which is tried twice at most: it is mostly a typo.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        body: str = "",
        retry_after_s: float | None = None,
        unreachable: bool = False,
        broke: bool = False,
        empty: bool = False,
        unresolved: bool = False,
    ) -> None:
        super().__init__(message, status=status, body=body)
        self.unresolved = unresolved
        self.retry_after_s = retry_after_s
        self.unreachable = unreachable
        self.broke = broke
        self.empty = empty

    def given_up(self, attempts: int) -> ModelError:
        text = f"{self} (after {attempts} attempts)" if attempts > 1 else str(self)
        if self.empty:
            return EmptyModelResponseError(text)
        return ProviderError(text, status=self.status, body=self.body)


# -- the table: what is worth another try ----------------------------------------------------------------------------

_STATUSES = frozenset({408, 409, 425, 429})
_ERRORS = (ConnectionError, TimeoutError, json.JSONDecodeError)
# of the openai package, whose import costs half a second
_CLASSES = frozenset({"APIConnectionError", "APITimeoutError", "APIResponseValidationError"})


def may_pass(error: BaseException) -> bool:
    """Return whether what failed may succeed when it is tried again.

    Yes: the statuses 408, 409, 425, 429 and 5xx, and no usable answer at all (refused, reset, late, unreadable,
    empty). No: every other status, as it would be the same again, an account without money, and an error that was
    raised after retries.
    """
    if isinstance(error, ModelError):
        return isinstance(error, RetryableError)
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    if isinstance(status, int):
        return status_may_pass(status, str(error))
    return isinstance(error, _ERRORS) or type(error).__name__ in _CLASSES


def status_may_pass(status: int, text: str = "") -> bool:
    """Return the same for an HTTP status and the text of the answer."""
    # an account without money answers 429 too, and waiting does not fill it
    return (status in _STATUSES or status >= 500) and not (status == 429 and "insufficient_quota" in text)


# -- the loop --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of tries of a call, and the waits between them.

    Attributes:
        max_attempts: tries in all; 1 never retries.
        base_s: mean of the first wait is half of this, in seconds; each later one doubles.
        cap_s: longest wait between two tries that is ours to choose, in seconds.
        retry_after_cap_s: longest wait that a server may ask for, in seconds; limits by the minute ask for 60.
    """

    max_attempts: int = 5
    base_s: float = 0.5
    cap_s: float = 30.0
    retry_after_cap_s: float = 120.0

    def wait_s(self, attempt: int, retry_after_s: float | None, jitter: float) -> float:
        """Return the seconds to wait after the given attempt (1, 2, ...); `jitter` is uniform in [0, 1).

        What a server asks for is never cut short by jitter, only spread: those it refused together would otherwise
        come back together.
        """
        if retry_after_s is not None:
            wished_s = min(self.retry_after_cap_s, retry_after_s)
            return wished_s + jitter * max(self.base_s, wished_s / 10)
        return min(self.cap_s, self.base_s * 2 ** (attempt - 1)) * jitter


async def retry(
    attempt: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    on_retry: Callable[[Exception], None] | None = None,
    limiter: Limiter | None = None,
    *,
    deadline: float = math.inf,
    passing: Callable[[Exception], bool] = may_pass,
) -> T:
    """Await `attempt()` until it succeeds, fails for good, or tries or time are used up.

    Args:
        on_retry: called with each failure that is followed by another try.
        limiter: learns of every answer and of every 429.
        deadline: time of time.monotonic after which no try begins.
        passing: narrows the table for a caller that has another answer to some failures.

    Raises:
        ProviderError: the last RetryableError; its message says how many tries were made.
        EmptyModelResponseError: the last answer was empty.
    """
    for number in range(1, policy.max_attempts + 1):
        try:
            result = await attempt()
        except Exception as error:
            if not passing(error):
                raise
            failed = error if isinstance(error, RetryableError) else None
            wish_s = failed.retry_after_s if failed else None
            if limiter is not None and failed and failed.status == 429:
                limiter.rate_limited(wish_s)
            wait_s = policy.wait_s(number, wish_s, random.random())
            is_typo = failed is not None and failed.unresolved and number > 1
            if number == policy.max_attempts or is_typo or time.monotonic() + wait_s >= deadline:
                if failed is None:
                    raise
                raise failed.given_up(number) from error
            if on_retry is not None:
                on_retry(error)
            await asyncio.sleep(wait_s)
        else:
            if limiter is not None:
                limiter.answered()
            return result
    raise AssertionError("max_attempts is at least 1")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that an answer asks to wait: `retry-after-ms`, or Retry-After of RFC 9110."""
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None or not value:
        return seconds
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return None


def _number(value: str | None) -> float | None:
    try:
        number = float(value or "")
    except ValueError:
        return None
    return max(0.0, number) if math.isfinite(number) else None


# -- failures of a model call ----------------------------------------------------------------------------------------


def status_error(url: str, status: int, text: str, retry_after: float | None) -> Exception:
    if is_context_overflow(status, text):
        return OverlongPromptError(_server_message(text))
    message = f"{url} answered {status}: {_server_message(text)}"
    if status_may_pass(status, text):
        return RetryableError(message, status=status, body=text, retry_after_s=retry_after)
    return ProviderError(message, status=status, body=text)


def client_error(base_url: str, error: Exception) -> Exception:
    """Translate an exception of another client; its class and status decide, its text is kept."""
    status = getattr(error, "status_code", None)
    text = f"{type(error).__name__}: {error}"
    if isinstance(status, int):
        headers = getattr(getattr(error, "response", None), "headers", None) or {}
        return status_error(base_url or "the client", status, text, retry_after_s(headers))
    if not may_pass(error):
        return error
    unreachable = type(error).__name__ == "APIConnectionError" or isinstance(error, ConnectionError)
    return RetryableError(f"{base_url or 'the client'}: {text}", unreachable=unreachable)


def _server_message(text: str) -> str:
    inner = _error_in(text)
    message = inner.get("message") or inner.get("detail") if isinstance(inner, dict) else inner
    # pages of web servers have many lines
    return " ".join(str(message or text).split())[:500] or "(empty body)"


def _error_in(text: str) -> Any:
    """Return what a body says of an error, without the request that some quote; one that is not JSON as it is."""
    try:
        error = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return error.get("error", error) if isinstance(error, dict) else error


def reason(error: BaseException) -> str:
    """Return the words of an error; an address in them, such as a proxy's, loses its user and password."""
    return re.sub(r"(?<=://)[^/?#\s]*@", "", str(error)) or type(error).__name__


# -- prompts that do not fit the model's context, in the words of the servers there are ----------------------------

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
    mistake in the settings and not the end of a conversation. `text` is the body, or that of a client's exception.
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
    inner = _error_in(text)
    if not isinstance(inner, dict):
        return str(inner)
    detail = inner.get("detail")
    if isinstance(detail, list):
        detail = [item.get("msg") for item in detail if isinstance(item, dict)]
    return " ".join(
        str(part) for part in (inner.get("message"), detail, inner.get("code"), inner.get("type")) if part
    )
