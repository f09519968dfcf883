"""SingleFlight: calls that are made at the same time with the same key are one call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

__all__ = ["SingleFlight"]

T = TypeVar("T")


class SingleFlight:
    """One call for all callers that want the same at the same time; nothing is kept after it ends.

    Where the caller that does the work is cancelled, the next one does it.
    """

    def __init__(self) -> None:
        self._calls: dict[Hashable, asyncio.Future[Any]] = {}

    async def result(self, key: Hashable, work: Callable[[], Awaitable[T]]) -> T:
        """Return what `work()` gives, or gave to another caller with this key on this event loop that still waits."""
        loop = asyncio.get_running_loop()
        place = (id(loop), key)
        while (call := self._calls.get(place)) is not None:
            await asyncio.wait([call])
            if not call.cancelled():
                return call.result()
        call = self._calls[place] = loop.create_future()
        try:
            call.set_result(await work())
        except Exception as error:
            call.set_exception(error)
        finally:
            call.cancel()
            del self._calls[place]
        return call.result()
