"""Rollouts in flight are bounded, first come first served; a limit that adapts finds what a provider bears."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import (
    LOCAL_MAXIMUM,
    AdaptiveLimiter,
    Limiter,
    NoMoreSlotsError,
    SubLimiter,
    limiter_for,
)
from verifiers.inference.retry import RetryableError, RetryPolicy, retry
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeClient


async def test_slots_are_given_in_the_order_of_asking() -> None:
    limiter = Limiter(2)
    order: list[int] = []

    async def one(number: int) -> None:
        async with limiter.slot():
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(one(number) for number in range(10)))
    assert order == list(range(10))


@pytest.mark.parametrize("when", ["while it waits", "in the moment in which it is served"])
async def test_a_slot_comes_back_when_its_holder_fails_or_its_waiter_is_cancelled(when: str) -> None:
    limiter = Limiter(1)
    with pytest.raises(KeyError):
        async with limiter.slot():
            raise KeyError
    holding = limiter.slot()
    await holding.__aenter__()
    waiter = asyncio.create_task(limiter.slot().__aenter__())
    await asyncio.sleep(0)
    if when == "while it waits":
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await holding.__aexit__(None, None, None)
    else:
        await holding.__aexit__(None, None, None)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
    async with asyncio.timeout(5), limiter.slot():
        assert limiter.in_flight == 1


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


def test_limits_that_let_nothing_through_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_concurrent is 0"):
        Limiter(0)
    with pytest.raises(ConfigError, match=r"requests_per_second is 0\.0"):
        Limiter(requests_per_second=0.0)


async def test_a_storm_of_changes_and_cancellations_ends_with_every_slot_back() -> None:
    rng = random.Random(7)
    clock = Clock()
    limiter = AdaptiveLimiter(start=20, clock=clock)

    async def one() -> None:
        async with limiter.slot():
            await asyncio.sleep(0)

    tasks = []
    for _ in range(2000):
        tasks.append(asyncio.create_task(one()))
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        if rng.random() < 0.2:
            clock.now += 15.0
            limiter.rate_limited(None)
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        assert limiter.in_flight <= 20
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert limiter.in_flight == 0


# -- requests per second ---------------------------------------------------------------------------------------


async def test_requests_begin_in_order_and_no_faster_than_asked() -> None:
    limiter = Limiter(requests_per_second=20.0)
    begun: list[tuple[int, float]] = []

    async def one(number: int) -> None:
        await limiter.wait_for_request()
        begun.append((number, time.monotonic() - started))

    started = time.monotonic()
    await asyncio.gather(*(one(number) for number in range(5)))
    assert [number for number, _ in begun] == list(range(5))
    # an event loop's timers may be early by their resolution
    assert all(seconds >= number / 20.0 - 0.002 for number, seconds in begun)


async def test_late_timers_do_not_hold_a_high_rate_down() -> None:
    limiter = Limiter(requests_per_second=2000.0)
    started = time.monotonic()
    for _ in range(1000):
        await limiter.wait_for_request()
    assert 0.45 <= time.monotonic() - started < 9


async def test_every_call_of_a_rollout_passes_the_throttle_retries_and_judges_included() -> None:
    limiter = Limiter(requests_per_second=1.0)
    passed = 0

    async def count(*, begins: bool) -> None:
        nonlocal passed
        passed += 1

    limiter.wait_for_request = count  # type: ignore[method-assign]
    client = RolloutClient(ClientBackend(FakeClient("4")), limiter=limiter, model="m")
    ask: dict[str, Any] = {"model": "m", "messages": []}
    await client.chat.completions.create(**ask)
    await client.untrained.chat.completions.create(**ask)
    assert passed == 2


# -- a share of a limit ----------------------------------------------------------------------------------------


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


async def test_a_share_keeps_to_its_own_bound_and_the_whole_to_its() -> None:
    whole = Limiter(3)
    mine, others, most = Work(), Work(), 0

    async def look() -> None:
        nonlocal most
        while mine.done < 20:
            most = max(most, mine.running + others.running)
            await asyncio.sleep(0)

    await asyncio.gather(mine.many(SubLimiter(whole, 2), 20), others.many(whole, 20), look())
    assert whole.in_flight == 0
    assert (mine.most, mine.done, others.done, most) == (2, 20, 20, 3)


async def test_work_in_a_share_does_not_keep_out_who_waits_for_room_in_the_whole() -> None:
    whole, mine, others = Limiter(16), Work(), Work()
    busy = asyncio.create_task(mine.many(SubLimiter(whole), 500))
    await mine.begun.wait()
    await others.many(whole, 160)
    # both have their turns; those who wait for room would otherwise wait for all 500
    assert mine.done < 250
    await busy


async def test_a_closed_share_closes_nothing_else() -> None:
    whole = Limiter(1)
    share = SubLimiter(whole)
    share.close()
    with pytest.raises(NoMoreSlotsError):
        async with share.slot():
            pass
    async with whole.slot():
        assert (share.free_slots, whole.in_flight) == (0, 1)
    assert share.free_slots == 1


async def test_what_a_call_tells_its_limiter_reaches_the_whole() -> None:
    clock = Clock()
    whole = AdaptiveLimiter(start=100, requests_per_second=0.01, clock=clock)
    share = SubLimiter(whole, 1)
    await share.wait_for_request()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await share.wait_for_request()
    share.rate_limited(40.0)
    assert whole.max_concurrent == 80
    clock.now += 40.0
    whole.in_flight = 80
    for _ in range(80):
        share.answered()
    assert whole.max_concurrent == 84


# -- a limit that follows the provider --------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def answer(limiter: AdaptiveLimiter, times: int, used: float = 1.0) -> None:
    for _ in range(times):
        limiter.in_flight = round(used * (limiter.max_concurrent or 0))
        limiter.answered()


def test_it_starts_at_20_and_doubles_while_answers_are_clean_up_to_its_maximum() -> None:
    limiter = AdaptiveLimiter(maximum=100, clock=Clock())
    seen = [limiter.max_concurrent]
    for _ in range(4):
        answer(limiter, limiter.max_concurrent or 0)
        seen.append(limiter.max_concurrent)
    assert seen == [20, 40, 80, 100, 100]


def test_it_grows_only_after_a_limits_worth_of_answers_and_where_80_percent_are_used() -> None:
    limiter = AdaptiveLimiter(clock=Clock())
    answer(limiter, 19)
    assert limiter.max_concurrent == 20
    answer(limiter, 1000, used=0.75)
    assert limiter.max_concurrent == 20
    answer(limiter, 1, used=0.8)
    assert limiter.max_concurrent == 40


def test_a_429_cuts_it_to_four_fifths_at_most_once_in_15_s() -> None:
    clock = Clock()
    limiter = AdaptiveLimiter(start=100, clock=clock)
    for _ in range(50):
        limiter.rate_limited(None)
    assert limiter.max_concurrent == 80
    clock.now += 14.9
    limiter.rate_limited(None)
    assert limiter.max_concurrent == 80
    clock.now += 0.1
    limiter.rate_limited(None)
    assert limiter.max_concurrent == 64


def test_a_retry_after_says_how_long_a_cut_is_the_last() -> None:
    clock = Clock()
    limiter = AdaptiveLimiter(start=100, clock=clock)
    limiter.rate_limited(40.0)
    clock.now += 39.0
    limiter.rate_limited(40.0)
    assert limiter.max_concurrent == 80
    clock.now += 1.0
    limiter.rate_limited(0.0)
    assert limiter.max_concurrent == 64
    # also a server that asks for no wait cannot cut twice for what was sent together
    limiter.rate_limited(0.0)
    assert limiter.max_concurrent == 64


def test_after_a_cut_it_rests_and_then_grows_by_steps_and_never_below_one() -> None:
    clock = Clock()
    limiter = AdaptiveLimiter(start=100, clock=clock)
    limiter.rate_limited(None)
    answer(limiter, 500)
    assert limiter.max_concurrent == 80
    clock.now += 15.0
    answer(limiter, 79)
    limiter.in_flight = 80
    clock.now += 15.0
    answer(limiter, 1)
    assert limiter.max_concurrent == 84
    for _ in range(100):
        clock.now += 15.0
        limiter.rate_limited(None)
    assert limiter.max_concurrent == 1
    clock.now += 15.0
    answer(limiter, 1)
    assert limiter.max_concurrent == 2


async def test_shrinking_takes_no_slot_away_and_gives_none_until_enough_came_back() -> None:
    limiter = AdaptiveLimiter(start=4, clock=Clock())
    release = asyncio.Semaphore(0)
    order: list[int] = []

    async def one(number: int) -> None:
        async with limiter.slot():
            order.append(number)
            await release.acquire()

    tasks = [asyncio.create_task(one(number)) for number in range(8)]
    await asyncio.sleep(0)
    limiter.rate_limited(None)
    assert (limiter.in_flight, limiter.max_concurrent) == (4, 3)
    release.release()
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == [0, 1, 2, 3]
    release.release()
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == [0, 1, 2, 3, 4]
    for _ in range(6):
        release.release()
    async with asyncio.timeout(5):
        await asyncio.gather(*tasks)
    assert order == list(range(8))
    assert limiter.in_flight == 0


async def evaluate(
    jobs: int, *, concurrent: int | None = None, per_second: float | None = None, retry_after_s: float | None = None
) -> dict[str, float]:
    """`jobs` calls of about 1 s against a provider with a limit on concurrency or on rate, in virtual time."""
    loop = asyncio.get_running_loop()
    limiter = AdaptiveLimiter(clock=loop.time)
    policy = RetryPolicy(max_attempts=9)
    draw = random.Random(1)
    serving, refused, failed = 0, 0, 0
    tokens, refilled = per_second or 0.0, 0.0

    async def attempt() -> None:
        nonlocal serving, refused, tokens, refilled
        if per_second is not None:
            now = loop.time()
            tokens, refilled = min(per_second, tokens + (now - refilled) * per_second), now
        if (per_second is not None and tokens < 1) or (concurrent is not None and serving >= concurrent):
            refused += 1
            raise RetryableError("slow down", status=429, retry_after_s=retry_after_s)
        tokens -= 1
        serving += 1
        await asyncio.sleep(draw.uniform(0.5, 1.5))
        serving -= 1

    async def one() -> None:
        nonlocal failed
        async with limiter.slot():
            try:
                await retry(attempt, policy, None, limiter)
            except ProviderError:
                failed += 1

    await asyncio.gather(*(one() for _ in range(jobs)))
    best = min(float(concurrent or jobs), per_second or float(jobs))
    return {"of_best": jobs / loop.time() / best, "refused": refused / jobs, "failed": failed / jobs}


@pytest.mark.parametrize(
    ("jobs", "provider", "least", "most_refused"),
    [
        (4000, {"concurrent": 50, "retry_after_s": 1.0}, 0.8, 0.05),
        (1500, {"concurrent": 10, "retry_after_s": 1.0}, 0.8, 0.1),
        (4000, {"per_second": 30.0, "retry_after_s": 1.0}, 0.9, 0.05),
    ],
)
def test_throughput_comes_near_what_the_provider_gives_with_few_refusals(
    jobs: int,
    provider: dict[str, float],
    least: float,
    most_refused: float,
    in_virtual_time: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the retry loop's jitter
    monkeypatch.setattr("random.random", random.Random(2).random)
    measured = in_virtual_time(evaluate(jobs, **provider))  # type: ignore[arg-type]
    assert measured["of_best"] > least, measured
    assert measured["refused"] < most_refused, measured
    assert measured["failed"] < 0.001, measured


def test_what_the_user_says_wins_then_the_kind_of_host_decides() -> None:
    for urls in ("https://api.openai.com/v1", "http://127.0.0.1:8000/v1", ["http://localhost:1/v1", "http://h/v1"]):
        given = limiter_for(urls, 7, maximum=3, requests_per_second=2.0)
        assert type(given) is Limiter
        assert (given.max_concurrent, given.requests_per_second) == (7, 2.0)
    assert limiter_for("http://h/v1", -1).max_concurrent is None
    local = limiter_for("http://127.0.0.1:8000/v1", requests_per_second=3.0)
    assert type(local) is Limiter
    assert (local.max_concurrent, local.requests_per_second) == (LOCAL_MAXIMUM, 3.0)
    assert limiter_for(["http://localhost:1/v1", "http://[::1]:2/v1"], maximum=512).max_concurrent == 512
    remote = limiter_for(["http://localhost:1/v1", "http://gpu1:1/v1"], maximum=64, requests_per_second=4.0)
    assert isinstance(remote, AdaptiveLimiter)
    assert (remote.max_concurrent, remote.maximum, remote.requests_per_second) == (20, 64, 4.0)
    assert limiter_for("https://api.openai.com/v1", maximum=5).max_concurrent == 5
