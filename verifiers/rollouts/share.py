"""A part of a limit, so that one kind of work leaves room for another on the same endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from verifiers.rollouts.limits import Limiter

__all__ = ["LimiterShare"]


class LimiterShare(Limiter):
    """At most so many of another limiter's slots; each is held in both, so the whole's bound stays true.

    Closing a share lets nothing more begin in it; the whole goes on for everybody else.

    Args:
        whole: the limiter whose slots are used.
        max_concurrent: most of them held or waited for at once; None for as many as there are.
    """

    def __init__(self, whole: Limiter, max_concurrent: int | None = None) -> None:
        super().__init__(whole.max_concurrent if max_concurrent is None else max_concurrent)
        self.whole = whole

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for room in the share, then in the whole, and hold both.

        Raises:
            NoMoreSlotsError: one of them was closed before this one began.
        """
        async with super().slot(), self.whole.slot():
            yield

    @property
    def free_slots(self) -> int | None:
        """Slots that nobody holds, in the share and in the whole."""
        free = [slots for slots in (super().free_slots, self.whole.free_slots) if slots is not None]
        return min(free) if free else None

    async def wait_for_room(self) -> None:
        """Wait until nothing queues for a slot of the share or of the whole.

        A share that always kept somebody in the whole's queue would keep out everybody who waits for room there.
        """
        await super().wait_for_room()
        await self.whole.wait_for_room()

    def answered(self) -> None:
        self.whole.answered()

    def rate_limited(self, retry_after_s: float | None) -> None:
        self.whole.rate_limited(retry_after_s)

    async def wait_for_request(self) -> None:
        await self.whole.wait_for_request()
