"""Calls in flight are bounded, first come first served, and requests begin no faster than asked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import asyncio_throttle
import pytest

from verifiers.errors import ConfigError
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import Limiter, NoMoreSlotsError
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeClient


async def test_never_more_than_the_bound_are_in_flight_and_all_get_their_turn() -> None:
    limiter = Limiter(3)
    seen: list[int] = []

    async def one() -> None:
        async with limiter.slot():
            seen.append(limiter.in_flight)
            await asyncio.sleep(0)
            seen.append(limiter.in_flight)

    await asyncio.gather(*(one() for _ in range(20)))
    assert len(seen) == 40
    assert max(seen) == 3
    assert limiter.in_flight == 0


async def test_slots_are_given_in_the_order_of_asking() -> None:
    limiter = Limiter(2)
    order: list[int] = []

    async def one(number: int) -> None:
        async with limiter.slot():
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(one(number) for number in range(10)))
    assert order == list(range(10))


async def test_a_slot_comes_back_when_its_holder_fails_or_its_waiter_is_cancelled() -> None:
    limiter = Limiter(1)
    with pytest.raises(KeyError):
        async with limiter.slot():
            raise KeyError
    async with limiter.slot():
        waiter = asyncio.create_task(limiter.slot().__aenter__())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
    async with asyncio.timeout(5), limiter.slot():
        assert limiter.in_flight == 1


@pytest.mark.parametrize("unbounded", [None, -1])
async def test_without_a_bound_everything_is_in_flight(unbounded: int | None) -> None:
    limiter = Limiter(unbounded)
    everyone = asyncio.Barrier(50)

    async def one() -> None:
        async with limiter.slot():
            await everyone.wait()

    async with asyncio.timeout(5):
        await asyncio.gather(*(one() for _ in range(50)))


async def test_room_is_there_when_nothing_queues() -> None:
    limiter = Limiter(1)
    release = asyncio.Event()

    async def hold() -> None:
        async with limiter.slot():
            await release.wait()

    holders = [asyncio.create_task(hold()) for _ in range(2)]
    room = asyncio.create_task(limiter.wait_for_room())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not room.done()
    release.set()
    async with asyncio.timeout(5):
        await asyncio.gather(room, *holders)


@pytest.mark.parametrize("bound", [2, None])
async def test_a_closed_limiter_lets_nothing_begin_and_what_is_in_flight_end(bound: int | None) -> None:
    limiter = Limiter(bound)
    release = asyncio.Event()
    ended = 0

    async def hold() -> None:
        nonlocal ended
        async with limiter.slot():
            await release.wait()
        ended += 1

    holders = [asyncio.create_task(hold()) for _ in range(2)]
    await asyncio.sleep(0)
    queued = [asyncio.create_task(hold()) for _ in range(5 if bound else 0)]
    await asyncio.sleep(0)
    limiter.close()
    late = [asyncio.create_task(hold()) for _ in range(3)]
    await asyncio.sleep(0)
    release.set()
    async with asyncio.timeout(5):
        await asyncio.gather(*holders)
        refused = await asyncio.gather(*queued, *late, return_exceptions=True)
    assert ended == 2
    assert [type(one) for one in refused] == [NoMoreSlotsError] * len(refused)
    assert limiter.in_flight == 0


def test_bounds_that_let_nothing_through_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_concurrent is 0"):
        Limiter(0)
    for rate in (0.0, -1.0):
        with pytest.raises(ConfigError, match=f"requests_per_second is {rate}"):
            Limiter(requests_per_second=rate)


async def test_requests_begin_no_faster_than_asked_and_in_order() -> None:
    limiter = Limiter(requests_per_second=20.0)
    begun: list[tuple[int, float]] = []

    async def one(number: int) -> None:
        await limiter.wait_for_request()
        begun.append((number, time.monotonic() - started))

    started = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(5)))
    assert [number for number, _ in begun] == list(range(5))
    assert all(seconds >= number / 20 for number, seconds in begun)


async def test_a_high_rate_is_kept_from_above_and_is_not_held_down_by_polling() -> None:
    limiter = Limiter(requests_per_second=2000.0)
    started = time.monotonic()
    for _ in range(1000):
        await limiter.wait_for_request()
    # bursts of 100 each 50 ms: the last of 1,000 begins after nine periods; polled each 10 ms one by one it took 10 s
    assert 0.45 <= time.monotonic() - started < 9


async def test_few_of_many_waiters_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    polling = most = 0
    acquire = asyncio_throttle.Throttler.acquire

    async def counted(self: Any) -> None:
        nonlocal polling, most
        polling += 1
        most = max(most, polling)
        try:
            await acquire(self)
        finally:
            polling -= 1

    monkeypatch.setattr(asyncio_throttle.Throttler, "acquire", counted)
    limiter = Limiter(requests_per_second=5000.0)
    await asyncio.gather(*(limiter.wait_for_request() for _ in range(8)))
    waiters = [asyncio.create_task(limiter.wait_for_request()) for _ in range(1000)]
    await asyncio.sleep(0)
    for waiter in waiters:
        waiter.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    assert most == 1


async def test_every_call_of_a_rollout_passes_the_throttle_retries_and_judges_included() -> None:
    limiter = Limiter(requests_per_second=1.0)
    passed = 0

    async def count() -> None:
        nonlocal passed
        passed += 1

    limiter.wait_for_request = count  # type: ignore[method-assign]
    client = RolloutClient(ClientBackend(FakeClient("4")), limiter=limiter, model="m")
    ask: dict[str, Any] = {"model": "m", "messages": []}
    await client.chat.completions.create(**ask)
    await client.untrained.chat.completions.create(**ask)
    assert passed == 2
