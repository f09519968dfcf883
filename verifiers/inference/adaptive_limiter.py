"""A limit on rollouts in flight that follows the provider's answers, and the choice of an endpoint's limit."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from verifiers.errors import ConfigError
from verifiers.inference.endpoint import is_loopback
from verifiers.inference.limits import Limiter

__all__ = ["LOCAL_MAXIMUM", "REMOTE_MAXIMUM", "AdaptiveLimiter", "ResizableSlots", "limiter_for"]

logger = logging.getLogger("verifiers.rollouts")

LOCAL_MAXIMUM = 256
"""Default of rollouts in flight on a server of this machine, which queues by itself."""

REMOTE_MAXIMUM = 1024
"""Default bound of adaptive growth."""

_START = 20
_USED = 0.8
_CUT = 0.8
_STEP = 0.05
_COOL_DOWN_S = 15.0


class ResizableSlots:
    """A semaphore whose size may change while it is held and waited for; waiters are served in order.

    Shrinking takes nothing from those who hold a slot: no new one is given until enough have come back.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Wait for a slot and take it."""
        if self.taken < self.size and not self._waiters:
            self.taken += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # it was given the slot in the moment in which it was cancelled
                self.release()
            raise

    def release(self) -> None:
        """Give one slot back."""
        self.taken -= 1
        self._serve()

    def resize(self, size: int) -> None:
        """Set the number of slots."""
        self.size = size
        self._serve()

    def _serve(self) -> None:
        while self._waiters and self.taken < self.size:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.taken += 1
                waiter.set_result(None)


class AdaptiveLimiter(Limiter):
    """A bound on rollouts in flight that follows the provider's answers and 429s, as the retry loop reports them.

    It grows when as many calls as the limit were answered in a row without a 429, with at least 80 % of it used: by
    doubling, and above the size it was last cut to by 5 %. A 429 cuts it to 0.8 of itself, and then it stays for
    15 s, or for the Retry-After where the server sends one: what was sent before the cut is refused together.

    Args:
        start: rollouts in flight at first.
        maximum: it never grows beyond this.
        requests_per_second: as of `Limiter`.
        clock: seconds that only ever grow; for tests.

    Attributes:
        cuts: how often it was cut.
    """

    def __init__(
        self,
        start: int = _START,
        maximum: int = REMOTE_MAXIMUM,
        requests_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if start < 1 or maximum < 1:
            raise ConfigError(f"start is {start} and maximum {maximum}; both must be 1 or more.")
        super().__init__(min(start, maximum), requests_per_second)
        self.maximum = maximum
        self._clock = clock
        self._resizable = ResizableSlots(min(start, maximum))
        self._slots = self._resizable
        self._clean = 0
        self._doubles_below = maximum
        self._quiet_until = -float("inf")

    def answered(self) -> None:
        limit = self._resizable.size
        if self.in_flight < _USED * limit or limit >= self.maximum or self._clock() < self._quiet_until:
            return
        self._clean += 1
        if self._clean >= limit:
            grown = 2 * limit if limit < self._doubles_below else limit + max(1, round(_STEP * limit))
            if limit < self._doubles_below:
                grown = min(grown, self._doubles_below)
            self._set(min(grown, self.maximum))

    def rate_limited(self, retry_after_s: float | None) -> None:
        self._clean = 0
        now = self._clock()
        if now < self._quiet_until:
            return
        self._quiet_until = now + (_COOL_DOWN_S if retry_after_s is None else max(1.0, retry_after_s))
        limit = max(1, int(_CUT * self._resizable.size))
        self._doubles_below = limit
        self._set(limit)

    def _set(self, limit: int) -> None:
        logger.debug("rollouts in flight: at most %d, was %d", limit, self._resizable.size)
        self._clean = 0
        self.max_concurrent = limit
        self._resizable.resize(limit)


def limiter_for(
    base_urls: str | Sequence[str],
    max_concurrent: int | None = None,
    *,
    maximum: int | None = None,
    requests_per_second: float | None = None,
) -> Limiter:
    """Return an endpoint's limit: what the user says, else a fixed one on this machine, else an adaptive one.

    Args:
        base_urls: the endpoint's addresses; all of them on this machine make it a local one.
        max_concurrent: the user's choice; wins over everything. None leaves it to the kind of endpoint.
        maximum: of a local endpoint, the limit (default 256); of a remote one, where growth ends (default 1,024).
        requests_per_second: as of `Limiter`.
    """
    if max_concurrent is not None:
        return Limiter(max_concurrent, requests_per_second)
    urls = [base_urls] if isinstance(base_urls, str) else base_urls
    if all(is_loopback(url) for url in urls):
        return Limiter(LOCAL_MAXIMUM if maximum is None else maximum, requests_per_second)
    return AdaptiveLimiter(
        maximum=REMOTE_MAXIMUM if maximum is None else maximum, requests_per_second=requests_per_second
    )
