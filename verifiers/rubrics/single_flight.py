"""SingleFlight: calls that are made at the same time with the same key are one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

__all__ = ["SingleFlight"]

T = TypeVar("T")


class _Flight:
    __slots__ = ("done", "error", "lock", "users", "value")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None


class SingleFlight:
    """One call for all callers that want the same at the same time; nothing is kept after it ends.

    Where the caller that does the work is cancelled, the next one does it.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Flight] = {}

    async def result(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """Return what `work()` gives, or gave to another caller with this key on this event loop that still waits."""
        place = (id(asyncio.get_running_loop()), key)
        call = self._calls.setdefault(place, _Flight())
        call.users += 1
        try:
            async with call.lock:
                if not call.done:
                    try:
                        call.value = await work()
                    except Exception as error:
                        call.error = error
                    call.done = True
            if call.error is not None:
                raise call.error
            value: T = call.value
            return value
        finally:
            call.users -= 1
            if not call.users:
                self._calls.pop(place, None)
