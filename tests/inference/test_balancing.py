"""Several servers of one model: the least loaded gets the call, and a rollout stays where its prefix is."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from verifiers.errors import ConfigError, OverlongPromptError, ProviderError
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.inference.load_balancer import LoadBalancer, backend_for
from verifiers.inference.retries import RetryableError, RetryPolicy
from verifiers.inference.server_pool import ServerPool
from verifiers.inference.wire import WireObject
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeOpenAIServer, Fault

CHAT = "/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}
ANSWER = WireObject({"choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}}]})
DOWN = RetryableError("refused", unreachable=True)


class Scripted:
    """A backend that answers, fails with what is in `error`, or waits for `gate`."""

    api_key = "EMPTY"

    def __init__(self, name: str) -> None:
        self.base_url = f"http://{name}/v1"
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.calls = 0
        self.closed = False

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return ANSWER

    async def close(self) -> None:
        self.closed = True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def balanced(count: int, clock: Clock | None = None) -> tuple[list[Scripted], LoadBalancer]:
    servers = [Scripted(f"s{number}") for number in range(count)]
    return servers, LoadBalancer(servers, seed=1, clock=clock or Clock())


async def test_calls_in_flight_are_spread_evenly_and_go_first_to_the_least_loaded() -> None:
    servers, backend = balanced(3)
    gate = asyncio.Event()
    for server in servers:
        server.gate = gate
    tasks = [asyncio.create_task(backend.call(CHAT, ASK)) for _ in range(30)]
    await asyncio.sleep(0)
    assert list(backend.in_flight.values()) == [10, 10, 10]
    gate.set()
    await asyncio.gather(*tasks)
    assert set(backend.in_flight.values()) == {0}
    servers[0].gate = servers[2].gate = asyncio.Event()
    held = [asyncio.create_task(backend.call_on(backend.replicas[number], CHAT, ASK)) for number in (0, 2)]
    await asyncio.sleep(0)
    before = servers[1].calls
    for _ in range(5):
        await backend.call(CHAT, ASK)
    assert servers[1].calls == before + 5
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert set(backend.in_flight.values()) == {0}


async def test_idle_servers_are_drawn_among_by_the_seed() -> None:
    async def drawn(seed: int) -> list[int]:
        servers = [Scripted(f"s{number}") for number in range(4)]
        backend = LoadBalancer(servers, seed=seed)
        order = []
        for _ in range(40):
            before = [server.calls for server in servers]
            await backend.call(CHAT, ASK)
            order.append(next(number for number, server in enumerate(servers) if server.calls > before[number]))
        return order

    first = await drawn(1)
    assert first == await drawn(1)
    assert first != await drawn(2)
    assert set(first) == {0, 1, 2, 3}


async def test_the_turns_of_one_rollout_stay_on_one_server() -> None:
    servers, backend = balanced(4)
    for _ in range(12):
        client = RolloutClient(backend, model="m")
        before = [server.calls for server in servers]
        for _ in range(5):
            await client.chat.completions.create(**ASK)
            await client.untrained.chat.completions.create(**ASK)
        assert sorted(server.calls - b for server, b in zip(servers, before, strict=True)) == [0, 0, 0, 10]
        assert client.base_url in backend.urls
    assert sum(server.calls > 0 for server in servers) > 1


async def test_a_server_that_cannot_be_reached_costs_no_try_and_is_left_alone_for_a_growing_time() -> None:
    clock = Clock()
    servers, backend = balanced(2, clock)
    servers[0].error = DOWN
    waits = []
    for _ in range(4):
        # until it is tried again
        before, since = servers[0].calls, clock.now
        while servers[0].calls == before:
            assert await backend.call_on(backend.replicas[1], CHAT, ASK) is ANSWER
            for _ in range(20):
                assert await backend.call(CHAT, ASK) is ANSWER
            clock.now += 0.25
        assert servers[0].calls == before + 1
        waits.append(clock.now - since)
    assert waits == [0.25, 1.0, 2.0, 4.0]
    servers[0].error = None
    clock.now += 8.0
    for _ in range(40):
        await backend.call(CHAT, ASK)
    assert servers[0].calls > 10


async def test_one_call_probes_while_the_others_go_elsewhere() -> None:
    clock = Clock()
    servers, backend = balanced(2, clock)
    servers[0].error = DOWN
    while not servers[0].calls:
        await backend.call(CHAT, ASK)
    clock.now += 10.0
    servers[0].gate = asyncio.Event()
    tasks = [asyncio.create_task(backend.call(CHAT, ASK)) for _ in range(20)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert backend.in_flight[servers[0].base_url] == 1
    clock.now += 5.0
    servers[1].gate = servers[0].gate
    # it is through by now, and its answer takes its time
    tasks += [asyncio.create_task(backend.call(CHAT, ASK)) for _ in range(20)]
    await asyncio.sleep(0)
    assert backend.in_flight[servers[0].base_url] > 1
    servers[0].gate.set()
    assert await asyncio.gather(*tasks) == [ANSWER] * 40


async def test_calls_that_fail_together_count_as_one_failure() -> None:
    clock = Clock()
    servers, backend = balanced(2, clock)
    servers[0].error = servers[1].error = DOWN
    tasks = [asyncio.create_task(backend.call_on(backend.replicas[0], CHAT, ASK)) for _ in range(50)]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert backend.replicas[0].ejected_until == clock.now + 1.0


async def test_with_all_servers_gone_the_call_fails_once_each_and_the_next_one_tries_again() -> None:
    servers, backend = balanced(3)
    for server in servers:
        server.error = DOWN
    with pytest.raises(RetryableError, match="refused"):
        await backend.call(CHAT, ASK)
    assert [server.calls for server in servers] == [1, 1, 1]
    for server in servers:
        server.error = None
    assert await backend.call(CHAT, ASK) is ANSWER


@pytest.mark.parametrize(
    ("error", "moves"),
    [
        (RetryableError("busy", status=503), True),
        (RetryableError("late"), True),
        (RetryableError("slow down", status=429), False),
    ],
)
async def test_the_next_try_goes_elsewhere_unless_it_was_only_a_limit(error: RetryableError, moves: bool) -> None:
    servers, backend = balanced(2)
    handle = backend.for_rollout()
    await handle.call(CHAT, ASK)
    first = next(server for server in servers if server.calls)
    other = next(server for server in servers if server is not first)
    first.error = error
    with pytest.raises(RetryableError):
        await handle.call(CHAT, ASK)
    first.error = None
    await handle.call(CHAT, ASK)
    assert (first.calls, other.calls) == ((2, 1) if moves else (3, 0))
    # neither is set aside: it answered, or was late
    assert all(replica.is_ready(100.0) for replica in backend.replicas)


@pytest.mark.parametrize(
    "error", [ProviderError("bad key", status=401), OverlongPromptError("too long"), KeyError("x")]
)
async def test_what_would_fail_everywhere_is_asked_once(error: Exception) -> None:
    servers, backend = balanced(3)
    for server in servers:
        server.error = error
    with pytest.raises(type(error)):
        await backend.call(CHAT, ASK)
    assert sum(server.calls for server in servers) == 1


async def test_real_servers_share_the_work_and_one_that_dies_takes_no_rollout_with_it() -> None:
    async with FakeOpenAIServer("4") as one, FakeOpenAIServer("4") as two:
        backend = LoadBalancer([HttpBackend(Endpoint(server.url)) for server in (one, two)], seed=3)
        assert backend_for(backend) is backend
        answered: Counter[str] = Counter()

        async def rollout(number: int) -> None:
            client = RolloutClient(backend, model="m", retry=RetryPolicy(base_s=0.01))
            for turn in range(3):
                if (number, turn) == (5, 1):
                    await asyncio.to_thread(one.stop)
                await client.chat.completions.create(**ASK)
                answered[client.base_url] += 1

        await asyncio.gather(*(rollout(number) for number in range(40)))
        await backend.close()
    assert sum(answered.values()) == 120
    assert answered[two.url] >= 60


async def test_a_request_that_ends_its_server_is_asked_of_one_other_and_no_more() -> None:
    def answer(body: dict[str, Any]) -> Any:
        return Fault.disconnect() if body["messages"][-1]["content"] == "poison" else "4"

    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeOpenAIServer(answer)) for _ in range(4)]
        backend = ServerPool([server.url for server in servers], up_timeout_s=1.0)
        client = RolloutClient(backend, model="m", retry=RetryPolicy(base_s=0.0))
        with pytest.raises(ProviderError, match=r"and then .* broke off while answering the same request"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "poison"}])
        assert len(backend.down()) == 2
        # the others have lost nothing, nor has the rollout
        assert await client.chat.completions.create(**ASK)
        await backend.close()


async def test_calls_of_one_rollout_that_fall_with_one_server_lose_it_once() -> None:
    servers = [Scripted("a"), Scripted("b")]
    backend = ServerPool(servers)
    handle = backend.for_rollout()
    handle._replica = backend.replicas[0]
    servers[0].gate = servers[1].gate = asyncio.Event()
    servers[0].error = RetryableError("reset", unreachable=True, broke=True)
    tasks = [asyncio.create_task(handle.call(CHAT, ASK)) for _ in range(3)]
    await asyncio.sleep(0)
    assert servers[0].calls == 3
    # the first that is asked elsewhere has no answer yet where the others fall
    servers[1].gate = asyncio.Event()
    servers[0].gate.set()
    for _ in range(9):
        await asyncio.sleep(0)
    assert servers[1].calls == 3
    servers[1].gate.set()
    assert await asyncio.gather(*tasks) == [ANSWER] * 3
    assert list(backend.down()) == [servers[0].base_url]


async def test_a_server_that_errs_and_then_goes_counts_as_lost_under_the_request() -> None:
    servers = [Scripted(f"s{number}") for number in range(4)]
    backend = ServerPool(servers)
    for server in servers:
        server.error = RetryableError("engine is dead", status=500)
    handle = backend.for_rollout()
    for _ in range(2):
        with pytest.raises(RetryableError, match="engine is dead"):
            await handle.call(CHAT, ASK)
        erred = next(one for one in servers if one.calls and one.base_url not in backend.down())
        backend.mark_down(erred.base_url, "it does not answer")
    with pytest.raises(ProviderError, match="it may crash them"):
        await handle.call(CHAT, ASK)
    assert sum(server.calls for server in servers) == 2


async def test_breaks_with_an_answer_between_them_are_counted_again() -> None:
    clock = Clock()
    servers, backend = balanced(3, clock)
    handle = backend.for_rollout()
    for _ in range(4):
        clock.now += 100.0
        await handle.call(CHAT, ASK)
        holds = max(servers, key=lambda server: server.base_url == handle.base_url)
        holds.error = RetryableError("reset", unreachable=True, broke=True)
        assert await handle.call(CHAT, ASK) is ANSWER
        holds.error = None


async def test_closing_closes_every_backend_and_no_backend_is_refused() -> None:
    servers, backend = balanced(2)
    await backend.for_rollout().close()
    assert not any(server.closed for server in servers)
    await backend.close()
    assert all(server.closed for server in servers)
    with pytest.raises(ConfigError, match="no server"):
        LoadBalancer([])


async def test_a_fault_at_one_server_is_mended_at_the_other() -> None:
    async with FakeOpenAIServer("4", faults=lambda _: Fault(503)) as sick, FakeOpenAIServer("4") as well:
        backend = LoadBalancer([HttpBackend(Endpoint(server.url)) for server in (sick, well)])
        for _ in range(10):
            client = RolloutClient(backend, model="m", retry=RetryPolicy(max_attempts=2, base_s=0.0))
            await client.chat.completions.create(**ASK)
        await backend.close()
    assert well.request_count == 10
