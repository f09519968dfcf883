"""Limits of model calls: rollouts in flight, requests a second, tries of one call; and counts of what is in flight.

One limiter is shared by everything that runs on an endpoint.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from verifiers.errors import ConfigError, EmptyModelResponseError, Error, ProviderError
from verifiers.inference.retries import RetryableError, RetryPolicy

__all__ = [
    "ActivityReading",
    "Limiter",
    "NoMoreSlotsError",
    "RolloutActivity",
    "SubLimiter",
    "call_with_retries",
    "counted_slot",
]

T = TypeVar("T")

# [True] in the context of a rollout that has made no request yet; its tasks share the list
_asks_first: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("asks_first", default=None)


class NoMoreSlotsError(Error, RuntimeError):
    """A rollout waited for a slot when the limiter was closed, so it never began: the run was interrupted."""


class _Slots(Protocol):
    async def acquire(self) -> Any: ...

    def release(self) -> None: ...


class Limiter:
    """A bound on rollouts in flight and, where asked, on requests per second.

    The bound is on rollouts, first come first served, so that a multi-turn rollout that has begun is finished
    before a new one starts: its prefix is still in the server's cache and its sandbox is still alive. A rollout
    has one call in flight at a time, so the bound holds for calls as well.

    Args:
        max_concurrent: rollouts in flight at once; None or a negative number means no bound.
        requests_per_second: requests begun per second over all rollouts; None means no throttle.

    Attributes:
        in_flight: rollouts that hold a slot.
        is_closed: nothing begins any more.

    Belongs to the event loop it is first used in.
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
        self.is_closed = False
        self._queued = 0
        self._queue_emptied = asyncio.Event()
        self._slots: _Slots | None = (
            asyncio.Semaphore(self.max_concurrent) if self.max_concurrent is not None else None
        )
        self._throttle: Any = None
        self._throttle_queue: asyncio.Lock | None = None

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for room for one rollout, and hold it.

        Raises:
            NoMoreSlotsError: the limiter was closed before this one began.
        """
        if self._slots is not None:
            with self.queueing():
                await self._slots.acquire()
        if self.is_closed:
            # the next in the queue gets the slot, and the same answer
            if self._slots is not None:
                self._slots.release()
            raise NoMoreSlotsError("the limiter is closed: what is in flight ends, and nothing begins.")
        self.in_flight += 1
        if self.requests_per_second is not None:
            _asks_first.set([True])
        try:
            yield
        finally:
            self.in_flight -= 1
            if self._slots is not None:
                self._slots.release()
            if self.requests_per_second is not None:
                # requests of its reward functions do not count as the start of a rollout
                _asks_first.set(None)

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
        """Close the limiter: nothing begins any more, queued or later; what is in flight keeps its slots."""
        self.is_closed = True

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

    async def wait_for_request(self) -> None:
        """Wait until one more request may begin under `requests_per_second`.

        Raises:
            NoMoreSlotsError: the limiter was closed, and this would be a rollout's first request.
        """
        if self.requests_per_second is None:
            return
        if self._throttle is None:
            from asyncio_throttle import Throttler

            # a burst of at most 50 ms' worth, rather than one of `rate` at the start of each second; and since the
            # throttle polls, one request at a time could not go faster than its polling
            burst = max(1, round(self.requests_per_second / 20))
            period_s = burst / self.requests_per_second
            self._throttle = Throttler(burst, period_s, retry_interval=min(0.01, period_s / 20))
            self._throttle_queue = asyncio.Lock()
        # asyncio-throttle polls: thousands of waiters in it burn a core, so all but one queue here
        assert self._throttle_queue is not None
        first = _asks_first.get()
        async with self._throttle_queue:
            if self.is_closed and first and first[0]:
                raise NoMoreSlotsError("the limiter is closed: no new rollout starts.")
            async with self._throttle:
                pass
        if first:
            first[0] = False


class SubLimiter(Limiter):
    """A part of another limiter's slots; each slot is held in both, so the whole's bound stays true.

    Closing the part lets nothing more begin in it; the whole stays open to all other calls.

    Args:
        whole: the limiter whose slots are used.
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
        """Free slots, in the part and in the whole."""
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

    async def wait_for_request(self) -> None:
        await self.whole.wait_for_request()


async def call_with_retries(
    attempt: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    on_retry: Callable[[RetryableError], None] | None = None,
    limiter: Limiter | None = None,
    *,
    throttled: bool = True,
) -> T:
    """Await `attempt()` until it succeeds, fails for good, or `policy.max_attempts` tries are used up.

    Args:
        attempt: makes one try.
        policy: number of tries, and waits.
        on_retry: called with each failure that is followed by another try.
        limiter: bounds the requests begun per second, and learns of every answer and of every 429.
        throttled: each try waits for the limiter's `requests_per_second`.

    Raises:
        ProviderError: the last failure; its message says how many tries were made.
        EmptyModelResponseError: the last answer was empty.
    """
    for number in range(1, policy.max_attempts + 1):
        if limiter is not None and throttled:
            await limiter.wait_for_request()
        try:
            result = await attempt()
        except RetryableError as error:
            if limiter is not None and error.status == 429:
                limiter.rate_limited(error.retry_after_s)
            if number == policy.max_attempts or (error.unresolved and number > 1):
                text = f"{error} (after {number} attempts)" if number > 1 else str(error)
                if error.empty:
                    raise EmptyModelResponseError(text) from error
                raise ProviderError(text, status=error.status, body=error.body) from error
            if on_retry is not None:
                on_retry(error)
            await asyncio.sleep(policy.wait_s(number, error.retry_after_s, random.random()))
        else:
            if limiter is not None:
                limiter.answered()
            return result
    raise AssertionError("max_attempts is at least 1")


@dataclass(frozen=True, slots=True)
class ActivityReading:
    """Sums since the start; the difference of two readings belongs to the time between them.

    Attributes:
        generating_s: seconds in which at least one rollout was running.
        busy_s: seconds in which at least one rollout was running or being scored.
        rollout_s: seconds of all rollouts that ran, added up; divided by the time, the mean number in flight.
        queued_s: the same of rollouts that waited for a slot of the limiter.
    """

    generating_s: float = 0.0
    busy_s: float = 0.0
    rollout_s: float = 0.0
    queued_s: float = 0.0

    def __sub__(self, before: ActivityReading) -> ActivityReading:
        return ActivityReading(
            self.generating_s - before.generating_s,
            self.busy_s - before.busy_s,
            self.rollout_s - before.rollout_s,
            self.queued_s - before.queued_s,
        )

    def __add__(self, other: ActivityReading) -> ActivityReading:
        return ActivityReading(
            self.generating_s + other.generating_s,
            self.busy_s + other.busy_s,
            self.rollout_s + other.rollout_s,
            self.queued_s + other.queued_s,
        )


class RolloutActivity:
    """Counts of the rollouts that wait, run and are scored, added up over time. Thread-safe.

    Args:
        clock: gives seconds; another one for tests.

    Attributes:
        queued, running, scoring: rollouts now.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.queued = self.running = self.scoring = self._most_running = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._sums = [0.0, 0.0, 0.0, 0.0]

    def change(self, *, queued: int = 0, running: int = 0, scoring: int = 0) -> None:
        """Add to the counts; negative numbers take away."""
        with self._lock:
            self._add_elapsed()
            self.queued += queued
            self.running += running
            self.scoring += scoring
            self._most_running = max(self._most_running, self.running)

    def read(self) -> ActivityReading:
        """Return the sums up to now."""
        with self._lock:
            self._add_elapsed()
            return ActivityReading(*self._sums)

    def take_most_running(self) -> int:
        """Return the most rollouts that ran at once since the last call."""
        with self._lock:
            most, self._most_running = self._most_running, self.running
            return most

    def _add_elapsed(self) -> None:
        now = self._clock()
        passed, self._since = now - self._since, now
        if self.running:
            self._sums[0] += passed
            self._sums[2] += passed * self.running
        if self.running or self.scoring:
            self._sums[1] += passed
        if self.queued:
            self._sums[3] += passed * self.queued


@asynccontextmanager
async def counted_slot(limiter: Limiter, activity: RolloutActivity) -> AsyncIterator[None]:
    """Hold a slot; count the rollout as queued until it has the slot, and as running while it holds it."""
    activity.change(queued=1)
    queued = 1
    try:
        async with limiter.slot():
            activity.change(queued=-1, running=1)
            queued = 0
            try:
                yield
            finally:
                activity.change(running=-1)
    finally:
        if queued:
            activity.change(queued=-1)
