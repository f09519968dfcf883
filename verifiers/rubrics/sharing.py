"""Work that several reward functions of one rollout want at the same moment, done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

__all__ = ["SharedWork"]

T = TypeVar("T")


class _Call:
    __slots__ = ("done", "error", "lock", "users", "value")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.users = 0
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None


class SharedWork:
    """Whoever asks for work that is under way gets what comes of it, result or exception; nothing is kept after.

    A caller that is cancelled leaves the work to the next one.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, _Call] = {}

    async def result(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """What `work()` gives, or gave to another caller with this key on this event loop that is still waiting."""
        place = (id(asyncio.get_running_loop()), key)
        call = self._calls.setdefault(place, _Call())
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
