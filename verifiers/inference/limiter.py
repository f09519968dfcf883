"""The limit of an endpoint: rollouts in flight and requests a second, fixed or following the provider's answers.

One limiter is shared by everything that runs on an endpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from verifiers.errors import ConfigError, Error
from verifiers.server_process import is_loopback

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
_LATE_S = 0.01


class NoMoreSlotsError(Error, RuntimeError):
    """A rollout waited for a slot when the limiter was closed, so it never began: the run was interrupted."""


class Limiter:
    """A bound on rollouts in flight and, where asked, on requests per second.

    The bound is on rollouts, first come first served, so that a multi-turn rollout that has begun is finished
    before a new one starts: its prefix is still in the server's cache and its sandbox is still alive. A rollout
    has one call in flight at a time, so the bound holds for calls as well. `max_concurrent` may change meanwhile:
    nothing is taken from those that hold a slot.

    Belongs to the event loop it is first used in.

    Args:
        max_concurrent: rollouts in flight at once; None or a negative number means no bound.
    """

    def __init__(self, max_concurrent: int | None = None, requests_per_second: float | None = None) -> None:
        if max_concurrent == 0:
            raise ConfigError("max_concurrent is 0, so no rollout could start; give 1 or more, or -1 for no bound.")
        if requests_per_second is not None and requests_per_second <= 0:
            raise ConfigError(
                f"requests_per_second is {requests_per_second}; give a number above 0, or leave it out."
            )
        self.max_concurrent = max_concurrent if max_concurrent is not None and max_concurrent > 0 else None
        self.requests_per_second = requests_per_second
        self.in_flight = 0
        self._closed = asyncio.Event()
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._queued = 0
        self._queue_emptied = asyncio.Event()
        self._next_request_at = 0.0

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for room for one rollout, and hold it.

        Raises:
            NoMoreSlotsError: the limiter was closed before this one began.
        """
        if self._is_full or self._waiters:
            with self.queueing():
                await self._wait_for_slot()
        else:
            self.in_flight += 1
        try:
            if self.is_closed:
                raise NoMoreSlotsError("the limiter is closed: what is in flight ends, and nothing begins.")
            yield
        finally:
            self._give_back()

    @property
    def _is_full(self) -> bool:
        return self.max_concurrent is not None and self.in_flight >= self.max_concurrent

    async def _wait_for_slot(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                # it was given the slot in the moment in which it was cancelled
                self._give_back()
            raise

    def _give_back(self) -> None:
        self.in_flight -= 1
        self._serve()

    def _serve(self) -> None:
        while self._waiters and not self._is_full:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.in_flight += 1
                waiter.set_result(None)

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Count as waiting for a slot: `wait_for_room` waits for the end."""
        self._queued += 1
        try:
            yield
        finally:
            self._queued -= 1
            if not self._queued:
                self._queue_emptied.set()

    def close(self) -> None:
        """Let nothing begin any more, queued or later; what is in flight keeps its slots."""
        self._closed.set()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    @property
    def free_slots(self) -> int | None:
        """Free slots; None where there is no bound. After `wait_for_room` nothing queues for them."""
        return None if self.max_concurrent is None else max(0, self.max_concurrent - self.in_flight)

    async def wait_for_room(self) -> None:
        """Wait until nothing queues for a slot.

        Starting work only then keeps the number of live tasks near `max_concurrent`, however long the list of work
        is: thousands of waiting coroutines would be walked by every garbage collection.
        """
        # a task that was just created has not queued yet
        await asyncio.sleep(0)
        while self._queued:
            self._queue_emptied.clear()
            await self._queue_emptied.wait()

    def answered(self) -> None:
        """Note that a call got its answer. A bound that was given stays; `AdaptiveLimiter`'s may grow."""

    def rate_limited(self, retry_after_s: float | None) -> None:
        """Note that a call was refused with 429, and the server's Retry-After in seconds where it sent one."""

    async def wait_for_request(self, *, begins: bool = False) -> None:
        """Wait until one more request may begin under `requests_per_second`.

        Raises:
            NoMoreSlotsError: the limiter was closed, and this is the request with which a rollout begins.
        """
        if self.requests_per_second is None:
            return
        now = asyncio.get_running_loop().time()
        # timers are late by up to some milliseconds, which must not add up
        due = self._next_request_at if now - self._next_request_at < _LATE_S else now
        self._next_request_at = due + 1.0 / self.requests_per_second
        if begins:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due - now):
                    await self._closed.wait()
            if self.is_closed:
                self._next_request_at -= 1.0 / self.requests_per_second
                raise NoMoreSlotsError("the limiter is closed: no new rollout starts.")
        elif due > now:
            await asyncio.sleep(due - now)


class SubLimiter(Limiter):
    """A part of another limiter's slots; each slot is held in both, so the whole's bound stays true.

    Closing the part lets nothing more begin in it; the whole stays open to all other calls.

    Args:
        max_concurrent: most of them held or waited for at once; None for as many as there are.
    """

    def __init__(self, whole: Limiter, max_concurrent: int | None = None) -> None:
        super().__init__(whole.max_concurrent if max_concurrent is None else max_concurrent)
        self.whole = whole

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for room in the part, then in the whole, and hold both.

        Raises:
            NoMoreSlotsError: one of them was closed before this one began.
        """
        async with super().slot(), self.whole.slot():
            yield

    @property
    def free_slots(self) -> int | None:
        free = [slots for slots in (super().free_slots, self.whole.free_slots) if slots is not None]
        return min(free) if free else None

    async def wait_for_room(self) -> None:
        """Wait until nothing queues for a slot of the part or of the whole.

        A part that always kept a waiter in the whole's queue would keep out all others that wait for room there.
        """
        await super().wait_for_room()
        await self.whole.wait_for_room()

    def answered(self) -> None:
        self.whole.answered()

    def rate_limited(self, retry_after_s: float | None) -> None:
        self.whole.rate_limited(retry_after_s)

    async def wait_for_request(self, *, begins: bool = False) -> None:
        await self.whole.wait_for_request(begins=begins)


class AdaptiveLimiter(Limiter):
    """A bound on rollouts in flight that follows the provider's answers and 429s, as the retry loop reports them.

    It grows when as many calls as the limit were answered in a row without a 429, with at least 80 % of it used: by
    doubling, and above the size it was last cut to by 5 %. A 429 cuts it to 0.8 of itself, and then it stays for
    15 s, or for the Retry-After where the server sends one: what was sent before the cut is refused together.
    """

    max_concurrent: int

    def __init__(
        self,
        start: int = _START,
        maximum: int = REMOTE_MAXIMUM,
        requests_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(min(start, maximum), requests_per_second)
        self.maximum = maximum
        self._clock = clock
        self._clean = 0
        self._doubles_below = maximum
        self._quiet_until = -float("inf")

    def answered(self) -> None:
        limit = self.max_concurrent
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
        limit = max(1, int(_CUT * self.max_concurrent))
        self._doubles_below = limit
        self._set(limit)

    def _set(self, limit: int) -> None:
        logger.debug("rollouts in flight: at most %d, was %d", limit, self.max_concurrent)
        self._clean = 0
        self.max_concurrent = limit
        self._serve()


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
    """
    if max_concurrent is not None:
        return Limiter(max_concurrent, requests_per_second)
    urls = [base_urls] if isinstance(base_urls, str) else base_urls
    if all(is_loopback(url) for url in urls):
        return Limiter(LOCAL_MAXIMUM if maximum is None else maximum, requests_per_second)
    return AdaptiveLimiter(
        maximum=REMOTE_MAXIMUM if maximum is None else maximum, requests_per_second=requests_per_second
    )
