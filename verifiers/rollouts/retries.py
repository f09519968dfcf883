"""The one retry loop around a model call, and what is worth a retry.

Retried: no usable answer at all (refused, reset, timed out, unreadable, empty) and the statuses 408, 409, 425, 429,
5xx and 529. Never retried: 400, 401, 403, 404, 422 and every other 4xx, for they fail in the same way again. Waits
grow by a factor of two with full jitter (Brooker, "Exponential Backoff And Jitter", AWS 2015), or follow Retry-After.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from verifiers.errors import EmptyModelResponseError, ProviderError

__all__ = ["RetryPolicy", "WatchesAnswers", "call_with_retries", "is_retryable_status", "retry_after_s"]

T = TypeVar("T")

_RETRYABLE_4XX = frozenset({408, 409, 425, 429})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a model call is tried.

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
        """Seconds to wait after the given attempt (1, 2, ...); `jitter` is uniform in [0, 1).

        What a server asks for is never cut short by jitter, only spread: those it refused together would otherwise
        come back together.
        """
        if retry_after_s is not None:
            wished_s = min(self.retry_after_cap_s, retry_after_s)
            return wished_s + jitter * max(self.base_s, wished_s / 10)
        return min(self.cap_s, self.base_s * 2 ** (attempt - 1)) * jitter


class RetryableError(ProviderError):
    """A failed try that may succeed when repeated. Never leaves this package: the loop re-raises a ProviderError.

    Attributes:
        retry_after_s: the server's wish, in seconds, or None.
        unreachable: the server could not be reached, or the connection broke; an answer that was late is not that.
        empty: it was an answer with nothing in it.
        broke: the connection was there, and broke before the answer was.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        body: str = "",
        retry_after_s: float | None = None,
        unreachable: bool = False,
        empty: bool = False,
        broke: bool = False,
    ) -> None:
        super().__init__(message, status=status, body=body)
        self.retry_after_s = retry_after_s
        self.unreachable = unreachable
        self.empty = empty
        self.broke = broke


class WatchesAnswers(Protocol):
    """Is told how a server bears what it is sent: a limiter that adapts to it."""

    def answered(self) -> None: ...

    def rate_limited(self, retry_after_s: float | None) -> None: ...


def is_retryable_status(status: int) -> bool:
    """True for HTTP statuses that may go away by themselves."""
    return status in _RETRYABLE_4XX or status >= 500


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait: `retry-after-ms`, or Retry-After in seconds or as an HTTP date (RFC 9110).

    Args:
        headers: of the answer; looked up by lower-case names.
    """
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


async def call_with_retries(
    attempt: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    on_retry: Callable[[RetryableError], None] | None = None,
    watcher: WatchesAnswers | None = None,
) -> T:
    """Await `attempt()` until it succeeds, fails for good, or `policy.max_attempts` tries are used up.

    Args:
        on_retry: called with each failure that is followed by another try.
        watcher: told of every answer, and of every 429.

    Raises:
        ProviderError: the last failure; its message says how many tries were made.
        EmptyModelResponseError: the last answer was empty.
    """
    for number in range(1, policy.max_attempts + 1):
        try:
            result = await attempt()
        except RetryableError as error:
            if watcher is not None and error.status == 429:
                watcher.rate_limited(error.retry_after_s)
            if number == policy.max_attempts:
                text = f"{error} (after {number} attempts)" if number > 1 else str(error)
                if error.empty:
                    raise EmptyModelResponseError(text) from error
                raise ProviderError(text, status=error.status, body=error.body) from error
            if on_retry is not None:
                on_retry(error)
            await asyncio.sleep(policy.wait_s(number, error.retry_after_s, random.random()))
        else:
            if watcher is not None:
                watcher.answered()
            return result
    raise AssertionError("max_attempts is at least 1")
