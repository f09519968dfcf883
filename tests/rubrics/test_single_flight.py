"""SingleFlight: calls of one key at the same time are one call."""

from __future__ import annotations

import asyncio

import pytest

from verifiers.rubrics.single_flight import SingleFlight


async def test_work_asked_for_at_once_is_done_once_and_later_again() -> None:
    shared, runs = SingleFlight(), 0

    async def work() -> int:
        nonlocal runs
        number = runs = runs + 1
        await asyncio.sleep(0)
        return number

    assert await asyncio.gather(*[shared.result("key", work) for _ in range(5)]) == [1] * 5
    assert await asyncio.gather(shared.result("key", work), shared.result("other", work)) == [2, 3]
    assert shared._calls == {}


async def test_a_failure_is_shared_too() -> None:
    shared, runs = SingleFlight(), 0

    async def work() -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0)
        raise ValueError("no")

    ended = await asyncio.gather(*[shared.result("key", work) for _ in range(3)], return_exceptions=True)
    assert [type(one) for one in ended] == [ValueError] * 3
    assert runs == 1


async def test_a_cancelled_caller_leaves_the_work_to_the_next() -> None:
    shared, begun = SingleFlight(), asyncio.Event()
    release = asyncio.Event()

    async def work() -> str:
        begun.set()
        await release.wait()
        return "done"

    first = asyncio.create_task(shared.result("key", work))
    await begun.wait()
    second = asyncio.create_task(shared.result("key", work))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    release.set()
    assert await asyncio.wait_for(second, 5) == "done"
    assert shared._calls == {}
