"""A share of a limit: what runs in it leaves room for everybody else, and the whole's bound stays true."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from verifiers.inference.limiter import Limiter, NoMoreSlotsError, SubLimiter


class Work:
    """Takes slots and holds each for some turns of the loop."""

    def __init__(self) -> None:
        self.running, self.most, self.done = 0, 0, 0
        self.begun = asyncio.Event()

    async def one(self, limiter: Limiter) -> None:
        async with limiter.slot():
            self.running += 1
            self.most = max(self.most, self.running)
            self.begun.set()
            for _ in range(10):
                await asyncio.sleep(0)
            self.running -= 1
            self.done += 1

    async def many(self, limiter: Limiter, count: int) -> None:
        """Begins work as blocks and evaluations do: when there is room."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                await limiter.wait_for_room()
                tasks.create_task(self.one(limiter))


def test_a_share_keeps_to_its_own_bound_and_the_whole_to_its() -> None:
    async def play() -> tuple[Work, Work, int]:
        whole = Limiter(3)
        mine, others, most = Work(), Work(), 0

        async def look() -> None:
            nonlocal most
            while mine.done < 20:
                most = max(most, mine.running + others.running)
                await asyncio.sleep(0)

        await asyncio.gather(mine.many(SubLimiter(whole, 2), 20), others.many(whole, 20), look())
        assert whole.in_flight == 0
        return mine, others, most

    mine, others, most = asyncio.run(play())
    assert (mine.most, mine.done, others.done, most) == (2, 20, 20, 3)


def test_work_in_a_share_does_not_keep_out_who_waits_for_room_in_the_whole() -> None:
    async def play() -> int:
        whole, mine, others = Limiter(16), Work(), Work()
        busy = asyncio.create_task(mine.many(SubLimiter(whole), 500))
        await mine.begun.wait()
        await others.many(whole, 160)
        done = mine.done
        await busy
        return done

    # both have their turns; those who wait for room would otherwise wait for all 500
    assert asyncio.run(play()) < 250


def test_a_closed_share_closes_nothing_else() -> None:
    async def play() -> None:
        whole = Limiter(1)
        share = SubLimiter(whole)
        share.close()
        with pytest.raises(NoMoreSlotsError):
            async with share.slot():
                pass
        async with whole.slot():
            assert (share.free_slots, whole.in_flight) == (0, 1)
        assert share.free_slots == 1

    asyncio.run(play())


def test_a_share_of_what_has_no_bound_has_its_own_or_none() -> None:
    assert SubLimiter(Limiter()).free_slots is None
    assert SubLimiter(Limiter(), 3).free_slots == 3


def test_what_a_call_tells_its_limiter_reaches_the_whole() -> None:
    class Told(Limiter):
        def __init__(self) -> None:
            super().__init__(2)
            self.said: list[Any] = []

        def answered(self) -> None:
            self.said.append("answered")

        def rate_limited(self, retry_after_s: float | None) -> None:
            self.said.append(retry_after_s)

        async def wait_for_request(self) -> None:
            self.said.append("request")

    async def play() -> list[Any]:
        whole = Told()
        share = SubLimiter(whole, 1)
        await share.wait_for_request()
        share.answered()
        share.rate_limited(2.0)
        return whole.said

    assert asyncio.run(play()) == ["request", "answered", 2.0]
