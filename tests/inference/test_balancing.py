"""Calls to several servers of one model: a prefix stays where it is, and a server that is lost takes none with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Mapping
from typing import Any

import pytest
from pool_world import until

from verifiers.errors import ConfigError, OverlongPromptError, ProviderError
from verifiers.inference.retry import RetryableError, RetryPolicy
from verifiers.inference.server_pool import ServerPool, backend_for
from verifiers.inference.wire import WireObject
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeOpenAIServer, Fault

CHAT = "/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}
REFUSED = RetryableError("refused", unreachable=True)
BROKE = RetryableError("reset", unreachable=True, broke=True)
QUICK = RetryPolicy(base_s=0.01)


class Scripted:
    """A backend that answers, once `gate` is open, or fails with what is in `error`; it is its own answer."""

    api_key = "EMPTY"
    choices = (WireObject({"message": {"role": "assistant", "content": "4"}}),)

    def __init__(self, name: str) -> None:
        self.base_url = f"http://{name}/v1"
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls = self.in_flight = 0
        self.closed = False

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        self.calls += 1
        self.in_flight += 1
        try:
            await self.gate.wait()
        finally:
            self.in_flight -= 1
        if self.error is not None:
            raise self.error
        return self

    async def close(self) -> None:
        self.closed = True


def pool_of(count: int) -> tuple[list[Scripted], ServerPool]:
    servers = [Scripted(f"s{number}") for number in range(count)]
    return servers, ServerPool(servers)


async def in_flight(servers: list[Scripted], pool: ServerPool, groups: list[Hashable]) -> list[int]:
    """Return how many calls each server has, of calls that are made at once, one for each group."""
    for server in servers:
        server.gate.clear()
    calls = [asyncio.create_task(pool.for_rollout(group).call(CHAT, ASK)) for group in groups]
    for _ in range(5):
        await asyncio.sleep(0)
    found = [server.in_flight for server in servers]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    return found


# -- which server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [None, "one group"], ids=["rollouts of their own", "rollouts of one group"])
async def test_no_server_gets_much_more_than_the_least_loaded_one(group: str | None) -> None:
    servers, pool = pool_of(3)
    found = await in_flight(servers, pool, [group] * 60)
    assert sum(found) == 60
    assert max(found) <= (20 if group is None else 4 + 1.5 * min(found) + 1)
    assert sorted(await in_flight(servers, pool, [group])) == [0, 0, 1], "nothing is left behind"


async def test_the_turns_of_a_rollout_and_the_rollouts_of_a_group_go_to_one_server() -> None:
    servers, pool = pool_of(4)
    for number in range(12):
        before = [server.calls for server in servers]
        for client in [RolloutClient(pool, model="m", group=("block", number)) for _ in range(3)]:
            for _ in range(2):
                await client.chat.completions.create(**ASK)
                await client.untrained.chat.completions.create(**ASK)
            assert client.base_url in pool.urls
        assert sorted(server.calls - b for server, b in zip(servers, before, strict=True)) == [0, 0, 0, 12]
    assert sum(server.calls > 0 for server in servers) > 1


async def test_a_group_whose_server_is_gone_finds_another_home() -> None:
    _, pool = pool_of(4)
    home = await pool.for_rollout("group").call(CHAT, ASK)
    home.error = REFUSED
    second = await pool.for_rollout("group").call(CHAT, ASK)
    assert second is not home
    assert {await pool.for_rollout("group").call(CHAT, ASK) for _ in range(8)} == {second}
    assert list(pool.down) == [home.base_url]


@pytest.mark.parametrize(
    ("error", "moves"),
    [
        (RetryableError("busy", status=503), True),
        (RetryableError("late"), True),
        (RetryableError("slow down", status=429), False),
    ],
)
async def test_the_next_try_goes_elsewhere_unless_it_was_only_a_limit(error: RetryableError, moves: bool) -> None:
    _, pool = pool_of(2)
    handle = pool.for_rollout()
    first = await handle.call(CHAT, ASK)
    first.error = error
    with pytest.raises(RetryableError):
        await handle.call(CHAT, ASK)
    first.error = None
    assert (await handle.call(CHAT, ASK) is first) != moves
    assert not pool.down, "it answered, or was late"


async def test_where_all_servers_fail_they_are_tried_by_turns() -> None:
    servers, pool = pool_of(2)
    for server in servers:
        server.error = RetryableError("busy", status=503)
    handle = pool.for_rollout()
    for _ in range(6):
        with pytest.raises(RetryableError):
            await handle.call(CHAT, ASK)
    assert [server.calls for server in servers] == [3, 3]


@pytest.mark.parametrize(
    "error", [ProviderError("bad key", status=401), OverlongPromptError("too long"), KeyError("x")]
)
async def test_what_would_fail_everywhere_is_asked_once(error: Exception) -> None:
    servers, pool = pool_of(3)
    for server in servers:
        server.error = error
    with pytest.raises(type(error)):
        await pool.call(CHAT, ASK)
    assert sum(server.calls for server in servers) == 1


async def test_closing_closes_every_backend_and_no_server_or_one_twice_is_refused() -> None:
    servers, pool = pool_of(2)
    await pool.for_rollout().close()
    assert not any(server.closed for server in servers)
    await pool.close()
    assert all(server.closed for server in servers)
    with pytest.raises(ConfigError, match="no server"):
        ServerPool([])
    with pytest.raises(ConfigError, match="twice"):
        ServerPool([servers[0], servers[0]])
    assert backend_for(pool) is pool


# -- lost servers ----------------------------------------------------------------------------------------------


async def test_with_all_servers_gone_a_call_fails_once_each_and_the_next_one_tries_again() -> None:
    servers, pool = pool_of(3)
    for server in servers:
        server.error = REFUSED
    with pytest.raises(RetryableError, match="refused"):
        await pool.call(CHAT, ASK)
    assert [server.calls for server in servers] == [1, 1, 1]
    assert len(pool.down) == 3
    for server in servers:
        server.error = None
    assert await pool.call(CHAT, ASK) in servers
    assert len(pool.down) == 2
    await pool.close()


@pytest.mark.usefixtures("in_fast_motion")
async def test_a_lost_server_costs_no_try_and_is_used_again_when_it_is_up() -> None:
    questions: list[int] = []

    def health(number: int) -> Fault | None:
        questions.append(number)
        # what stands before it may answer earlier than the server itself; a provider has no such route
        return Fault(503) if number == 0 else Fault(404)

    async with FakeOpenAIServer("4", route_faults={"/health": health}) as one, FakeOpenAIServer("4") as two:
        pool = ServerPool([one.url, two.url])

        async def play(count: int) -> int:
            clients = [RolloutClient(pool, model="m", retry=QUICK) for _ in range(count)]
            await asyncio.gather(*(client.chat.completions.create(**ASK) for client in clients))
            return sum(client.retries for client in clients)

        await play(40)
        assert not questions, "a server that answers is not asked whether it is up"
        await asyncio.to_thread(one.stop)
        assert await play(40) == 0
        assert list(pool.down) == [one.url]
        before = one.request_count
        await asyncio.to_thread(one.start)
        await asyncio.to_thread(until, lambda: not pool.down)
        await play(40)
        assert one.request_count > before
        asked = len(questions)
        await asyncio.sleep(0.1)
        assert len(questions) == asked >= 2
        await pool.close()


# -- a request that crashes servers ----------------------------------------------------------------------------


async def test_a_request_that_ends_its_server_is_asked_of_one_other_and_no_more() -> None:
    def answer(body: dict[str, Any]) -> Any:
        return Fault.disconnect() if body["messages"][-1]["content"] == "poison" else "4"

    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeOpenAIServer(answer)) for _ in range(4)]
        pool = ServerPool([server.url for server in servers])
        client = RolloutClient(pool, model="m", retry=RetryPolicy(base_s=0.0))
        with pytest.raises(ProviderError, match=r"and then .* broke off while answering the same request"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "poison"}])
        assert sum(server.request_count for server in servers) == 2
        # the rollout has lost nothing
        assert await client.chat.completions.create(**ASK)
        await pool.close()


async def test_calls_of_one_rollout_that_fall_with_one_server_lose_it_once() -> None:
    servers, pool = pool_of(2)
    handle = pool.for_rollout()
    home = await handle.call(CHAT, ASK)
    (other,) = [server for server in servers if server is not home]
    home.error = BROKE
    home.gate.clear()
    other.gate.clear()
    tasks = [asyncio.create_task(handle.call(CHAT, ASK)) for _ in range(3)]
    await asyncio.sleep(0)
    # the first that is asked elsewhere has no answer yet where the others fall
    home.gate.set()
    for _ in range(9):
        await asyncio.sleep(0)
    assert other.in_flight == 3
    other.gate.set()
    assert await asyncio.gather(*tasks) == [other] * 3
    await pool.close()


async def test_a_server_that_errs_and_then_goes_counts_as_lost_under_the_request() -> None:
    servers, pool = pool_of(4)
    handle = pool.for_rollout()
    for server in servers:
        server.error = RetryableError("engine is dead", status=500)
    for _ in range(2):
        before = {server: server.calls for server in servers}
        with pytest.raises(RetryableError, match="engine is dead"):
            await handle.call(CHAT, ASK)
        (erred,) = [server for server in servers if server.calls > before[server]]
        erred.error = REFUSED
        while erred.base_url not in pool.down:
            with contextlib.suppress(RetryableError):
                await pool.call(CHAT, ASK)
    before = {server: server.calls for server in servers}
    with pytest.raises(ProviderError, match="it may crash them"):
        await handle.call(CHAT, ASK)
    assert before == {server: server.calls for server in servers}
    await pool.close()


async def test_breaks_with_an_answer_between_them_are_counted_again() -> None:
    servers, pool = pool_of(6)
    handle = pool.for_rollout()
    for _ in range(4):
        (await handle.call(CHAT, ASK)).error = BROKE
        assert await handle.call(CHAT, ASK) in servers
    await pool.close()
