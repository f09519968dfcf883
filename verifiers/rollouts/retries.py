"""The one retry loop around a model call, and what is worth a retry.

Retried: no answer at all (refused, reset, timed out) and the statuses 408, 409, 425, 429, 5xx and 529. Never
retried: 400, 401, 403, 404, 422 and every other 4xx, for they fail in the same way again. Waits grow by a
factor of two with full jitter (Brooker, "Exponential Backoff And Jitter", AWS 2015), or follow Retry-After.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from verifiers.errors import ProviderError

__all__ = ["RetryPolicy", "call_with_retries", "is_retryable_status", "parse_retry_after"]

T = TypeVar("T")

_RETRYABLE_4XX = frozenset({408, 409, 425, 429})


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how patiently a model call is tried.

    Attributes:
        max_attempts: tries in all; 1 never retries.
        base_s: mean of the first wait is half of this, in seconds; each later one doubles.
        cap_s: longest wait between two tries, in seconds; a longer Retry-After is cut to it.
    """

    max_attempts: int = 5
    base_s: float = 0.5
    cap_s: float = 30.0

    def wait_s(self, attempt: int, retry_after_s: float | None, jitter: float) -> float:
        """Seconds to wait after the given attempt (1, 2, ...); `jitter` is uniform in [0, 1)."""
        if retry_after_s is not None:
            return min(self.cap_s, retry_after_s + jitter * self.base_s)
        return min(self.cap_s, self.base_s * 2 ** (attempt - 1)) * jitter


class RetryableError(ProviderError):
    """A failed try that may succeed when repeated. Never leaves this package: the loop re-raises a ProviderError.

    Attributes:
        retry_after_s: the server's wish, in seconds, or None.
    """

    def __init__(
        self, message: str, *, status: int | None = None, body: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, status=status, body=body)
        self.retry_after_s = retry_after_s


def is_retryable_status(status: int) -> bool:
    """True for HTTP statuses that may go away by themselves."""
    return status in _RETRYABLE_4XX or status >= 500


def parse_retry_after(value: str | None) -> float | None:
    """Seconds asked for by a Retry-After header (seconds or an HTTP date, RFC 9110), or None."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


async def call_with_retries(
    attempt: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    on_retry: Callable[[RetryableError], None] | None = None,
) -> T:
    """Await `attempt()` until it succeeds, fails for good, or `policy.max_attempts` tries are used up.

    Raises:
        ProviderError: the last failure; its message says how many tries were made.
    """
    for number in range(1, policy.max_attempts + 1):
        try:
            return await attempt()
        except RetryableError as error:
            if number == policy.max_attempts:
                tries = f" (after {number} attempts)" if number > 1 else ""
                raise ProviderError(f"{error}{tries}", status=error.status, body=error.body) from error
            if on_retry is not None:
                on_retry(error)
            await asyncio.sleep(policy.wait_s(number, error.retry_after_s, random.random()))
    raise AssertionError("max_attempts is at least 1")
