"""One limit on what is in flight, owned by one object and shared by everything that runs on an endpoint."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from verifiers.errors import ConfigError, Error

__all__ = ["Limiter", "NoMoreSlotsError"]

# of the rollout whose context this is: has it asked for nothing yet? Its tasks share the list.
_asks_first: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("asks_first", default=None)


class NoMoreSlotsError(Error, RuntimeError):
    """A rollout waited for a slot when the limiter was closed, so it never began: the run was interrupted."""


class _Slots(Protocol):
    async def acquire(self) -> Any: ...

    def release(self) -> None: ...


class Limiter:
    """Bounds rollouts in flight and, where asked, requests per second.

    The bound is on rollouts, first come first served, so that a multi-turn rollout that has begun is finished
    before a new one starts: its prefix is still in the server's cache and its sandbox is still alive. A rollout
    has one call in flight at a time, hence the bound holds for calls as well.

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
            self._queued += 1
            try:
                await self._slots.acquire()
            finally:
                self._queued -= 1
                if not self._queued:
                    self._queue_emptied.set()
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
                # what its rewards ask for is no beginning
                _asks_first.set(None)

    def close(self) -> None:
        """Let nothing begin any more, neither what queues nor what comes later; what is in flight keeps its slots."""
        self.is_closed = True

    @property
    def free_slots(self) -> int | None:
        """Slots that nobody holds; None where there is no bound. After `wait_for_room` nobody queues for them."""
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
        """A call got its answer. A bound that was given does not move; `AdaptiveLimiter`'s does."""

    def rate_limited(self, retry_after_s: float | None) -> None:
        """A call was refused with 429, with the server's Retry-After in seconds where it sent one."""

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
                raise NoMoreSlotsError(
                    "the limiter is closed: a rollout that has asked for nothing yet does not begin."
                )
            async with self._throttle:
                pass
        if first:
            first[0] = False
