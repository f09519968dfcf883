"""Servers of a pool that are away: back, they get the newest push, and until then none of their answers counts."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from pool_world import NEVER_PUSHED, loads, pool_of, push, restarted, until

from verifiers.errors import WeightSyncError
from verifiers.inference import server_pool
from verifiers.inference.retry import RetryableError
from verifiers.inference.server_client import ServerClient
from verifiers.inference.server_pool import ServerPool
from verifiers.testing import FakeOpenAIServer, Fault

pytestmark = pytest.mark.usefixtures("in_fast_motion")

ASK: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "2+2?"}],
    "return_token_ids": True,
}


# -- servers that are away -----------------------------------------------------------------------------------------


def test_a_server_that_is_away_is_left_out_and_gets_the_newest_push_when_it_is_back() -> None:
    with pool_of(2) as (pool, servers):
        push(pool, 1)
        servers[1].stop()
        push(pool, 2)
        push(pool, 3)
        assert servers[0].weight_version == 3
        assert list(pool.down) == [servers[1].url]
        assert [server.url for server in pool.servers] == [servers[0].url]
        restarted(servers[1])
        servers[1].start()
        until(lambda: not pool.down)
        assert servers[1].weight_version == 3
        assert pool.repeated_loads == 1
        assert servers[1].weight_calls[-1].path != "/pause"
        assert [call.body for call in servers[1].weight_calls if call.path == "/collective_rpc"][-1] == {"version": 3}


def test_a_push_waits_for_a_single_server_that_is_restarted() -> None:
    with pool_of(1) as (pool, (server,)):
        push(pool, 1)
        server.stop()
        restarted(server)
        starting = threading.Timer(0.2, server.start)
        starting.start()
        push(pool, 2)
        starting.join()
        assert server.weight_version == 2
        assert not server.paused


def test_where_no_server_comes_back_the_push_ends_and_says_which() -> None:
    pool = ServerPool(["http://127.0.0.1:9/v1", "http://127.0.0.1:1/v1"], timeout_s=60.0)
    pool.restart_timeout_s = 0.3
    with pytest.raises(WeightSyncError, match=r"step 3 did not reach the rollout server: .*127\.0\.0\.1:9"):
        push(pool, 3)
    pool.stop()


def test_a_push_does_not_wait_for_a_host_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor while that host is asked whether it is back."""
    with pool_of(2) as (pool, servers):
        push(pool, 1)
        servers[1].stop()
        until(lambda: pool.down)
        request, gone, asked = ServerClient.request, servers[1].url, threading.Event()

        async def hangs(self: ServerClient, *args: Any, **kwargs: Any) -> Any:
            if self.url == gone:
                asked.set()
                await asyncio.sleep(3600)
            return await request(self, *args, **kwargs)

        monkeypatch.setattr(ServerClient, "request", hangs)
        assert asked.wait(30)
        pool.timeout_s = 20.0
        push(pool, 2)
        assert servers[0].weight_version == 2


def test_a_server_that_did_not_answer_at_the_end_of_a_push_continues_when_it_is_back() -> None:
    with pool_of(2, route_faults={"/resume": [Fault.disconnect()]}) as (pool, servers):
        push(pool, 1)
        until(lambda: not servers[1].paused and not pool.down)
        assert loads(servers[1]) == 1


def test_a_restart_that_no_request_met_is_noticed_by_the_version_and_mended() -> None:
    with pool_of(2) as (pool, servers):
        push(pool, 5)
        restarted(servers[0])
        until(lambda: servers[0].weight_version == 5 and not pool.down)
        assert (loads(servers[0]), loads(servers[1])) == (2, 1)
        assert pool.run(pool.wait_until_restored(servers[0].url, 30.0))
        assert pool.run(pool.holds_pushed_weights(servers[0].url))


def test_a_server_that_only_dropped_a_request_is_used_again_without_a_push() -> None:
    with FakeOpenAIServer(faults=[Fault.disconnect()], weight_version=NEVER_PUSHED) as server:
        pool = ServerPool([server.url], timeout_s=30.0)
        push(pool, 5)
        (lost,) = answers_of(pool)
        assert isinstance(lost, RetryableError)
        (answer,) = answers_of(pool)
        assert answer.choices
        assert loads(server) == 1
        assert pool.repeated_loads == 0
        pool.stop()


def test_a_check_never_overtakes_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that asked for the version before a push gives the server no older weights after it."""
    with pool_of(2) as (pool, servers):
        told: list[tuple[int, list[Any]]] = []
        pool.configure(
            restart_timeout_s=60.0,
            stall_timeout_s=60.0,
            on_version=lambda version: told.append((version, [server.weight_version for server in servers])),
        )
        push(pool, 1)
        watched, asked, go_on = threading.Event(), threading.Event(), threading.Event()
        ask = ServerClient.weight_version

        async def slow(self: ServerClient, timeout_s: float | None = None) -> str:
            name = await ask(self, timeout_s)
            if self.url != servers[0].url:
                return name
            watched.set()
            if name == NEVER_PUSHED and not asked.is_set():
                asked.set()
                await asyncio.to_thread(go_on.wait, 30)
            return name

        monkeypatch.setattr(ServerClient, "weight_version", slow)
        # a check that began before may not be the one that finds the restart
        assert watched.wait(30)
        restarted(servers[0])
        assert asked.wait(30)
        push(pool, 2)
        before = loads(servers[0])
        go_on.set()
        assert pool.run(pool.holds_pushed_weights(servers[0].url))
        assert loads(servers[0]) == before
        assert told == [(1, [1, 1]), (2, [2, 2])]


def test_an_engine_that_crashed_is_waited_for_as_one_that_is_restarted() -> None:
    """Its server answers 500 for a moment before it ends."""
    dead, questions = threading.Event(), []

    def health(number: int) -> Fault | None:
        if not dead.is_set():
            return None
        questions.append(number)
        if len(questions) < 3:
            return Fault(503)
        dead.clear()
        return None

    def load(number: int) -> Fault | None:
        if number == 1:
            dead.set()
        return Fault(500, body="EngineDead") if dead.is_set() else None

    with pool_of(1, route_faults={"/collective_rpc": load, "/health": health}) as (pool, (server,)):
        push(pool, 1)
        push(pool, 2)
        assert server.weight_version == 2
        assert not server.paused


# -- answers from weights that were never pushed -------------------------------------------------------------------


def answers_of(pool: ServerPool, count: int = 1) -> list[Any]:
    async def ask() -> list[Any]:
        calls = (pool.call("/chat/completions", ASK) for _ in range(count))
        return await asyncio.gather(*calls, return_exceptions=True)

    return pool.run(ask(), 30.0)


def test_an_answer_from_weights_that_were_never_pushed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "CHECK_INTERVAL_S", 3600.0)
    with pool_of(1) as (pool, (server,)):
        push(pool, 7)
        assert len(answers_of(pool, 5)) == 5
        restarted(server)
        (refused,) = answers_of(pool)
        assert isinstance(refused, RetryableError)
        assert "'default', which were never pushed" in str(refused)
        # the next call waits until the server has the weights again
        (answer,) = answers_of(pool)
        assert answer.choices[0].weight_versions[0].version == "7"
        assert pool.repeated_loads == 1


def test_an_answer_that_names_no_weights_counts_once_its_server_named_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "CHECK_INTERVAL_S", 3600.0)
    with (
        FakeOpenAIServer("4", token_ids=False, weight_version=NEVER_PUSHED) as server,
        FakeOpenAIServer("4", token_ids=False) as other,
    ):
        pool = ServerPool([server.url], timeout_s=30.0)
        pool.run(pool.connect(30.0))
        push(pool, 7)
        asked = sum(call.path == "/weight_info" for call in server.weight_calls)
        answers = answers_of(pool, 40)
        assert [answer.choices[0].message.content for answer in answers] == ["4"] * 40
        # calls in flight together share their questions
        assert 0 < sum(call.path == "/weight_info" for call in server.weight_calls) - asked < 10
        restarted(server)
        (refused,) = answers_of(pool)
        assert isinstance(refused, RetryableError)
        assert "given up" in str(refused)
        (answer,) = answers_of(pool)
        assert answer.choices[0].message.content == "4"
        assert server.weight_version == 7
        pool.stop()
        assert other.request_count == 0


def test_a_version_that_is_being_loaded_counts_as_pushed() -> None:
    seen = []
    with pool_of(1) as (pool, (server,)):
        assert pool.run(pool.holds_pushed_weights(server.url))
        push(pool, 1)

        async def load(control: ServerClient, timeout_s: float) -> None:
            for name in ("1", "1+reload", "2", NEVER_PUSHED):
                server.weight_version = name
                seen.append(await pool.holds_pushed_weights(server.url))

        push(pool, 2, load)
        assert seen == [True, True, True, False]


def test_an_unreachable_server_holds_nothing() -> None:
    with pool_of(1) as (pool, (server,)):
        push(pool, 1)
        server.stop()
        assert not pool.run(pool.holds_pushed_weights(server.url))
        assert not pool.run(pool.wait_until_restored(server.url, 0.1))
