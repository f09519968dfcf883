"""Weights pushed to a pool: all servers get every push, and one that is away gets it when it is back."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
from pool_world import NEVER_PUSHED, loads, pool_of, restarted, until, update

from verifiers import loop_thread
from verifiers.errors import DeadlineError, WeightSyncError
from verifiers.inference import rollout_server as replica_module
from verifiers.inference import server_pool as pool_module
from verifiers.inference.retries import RetryableError
from verifiers.inference.rollout_server import NoAnswerError, RefusedError, ServerClient
from verifiers.inference.server_pool import ServerPool
from verifiers.testing import FakeOpenAIServer, Fault

ASK: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "2+2?"}],
    "return_token_ids": True,
}


@pytest.fixture(autouse=True)
def in_fast_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are checked, and asked again, without the seconds in between; the end waits on a crowded machine."""
    monkeypatch.setattr(pool_module, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(replica_module, "_RETRY_WAITS_S", (0.01, 0.02, 0.03))
    release_within(30.0, monkeypatch)
    monkeypatch.setattr(loop_thread, "_HEARING_S", 60.0)
    monkeypatch.setattr(loop_thread, "_CLOSING_S", 60.0)


def release_within(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pool_module, replica_module):
        monkeypatch.setattr(module, "SHUTDOWN_S", seconds)


# -- pushes that succeed -------------------------------------------------------------------------------------------


def test_a_push_reaches_all_servers_and_each_stage_ends_on_all_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {"/collective_rpc": [], "/resume": []}
    request = ServerClient.request

    async def watching(self: ServerClient, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        if path in seen:
            seen[path].append([(server.paused, server.weight_version) for server in servers])
        return await request(self, method, path, *args, **kwargs)

    monkeypatch.setattr(ServerClient, "request", watching)
    with pool_of(2) as (pool, servers):
        told: list[int] = []
        pool.on_version = told.append
        pool.push(update(4))
        # the one may have loaded before the other is asked to
        assert [[paused for paused, _ in each] for each in seen["/collective_rpc"]] == [[True] * 2] * 2
        assert seen["/collective_rpc"][0] == [(True, NEVER_PUSHED)] * 2
        assert seen["/resume"][0] == [(True, 4)] * 2
        assert told == [4]
        assert not any(server.paused for server in servers)
        calls = [call.path for call in servers[0].weight_calls if call.path != "/weight_info"]
        assert calls == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
        assert servers[0].weight_calls[-1].query == {}
        by_path = {call.path: call.query for call in servers[0].weight_calls}
        assert by_path["/pause"] == {"mode": "keep"}
        assert by_path["/reset_prefix_cache"] == {"reset_running_requests": "true"}


def test_a_server_that_is_not_vllm_need_not_reset_its_prefixes() -> None:
    with pool_of(1, route_faults={"/reset_prefix_cache": Fault(404, times=1)}) as (pool, (server,)):
        pool.push(update(1))
        pool.push(update(2))
        assert sum(call.path == "/reset_prefix_cache" for call in server.weight_calls) == 1


# -- servers that are away -----------------------------------------------------------------------------------------


def test_a_server_that_is_away_is_left_out_and_gets_the_newest_push_when_it_is_back() -> None:
    with pool_of(2) as (pool, servers):
        pool.push(update(1))
        servers[1].stop()
        pool.push(update(2))
        pool.push(update(3))
        assert servers[0].weight_version == 3
        assert list(pool.down()) == [servers[1].url]
        assert [server.url for server in pool.servers] == [servers[0].url]
        restarted(servers[1])
        servers[1].start()
        until(lambda: not pool.down())
        assert servers[1].weight_version == 3
        assert pool.restarts == pool.repeated_loads == 1
        assert servers[1].weight_calls[-1].path != "/pause"
        assert [call.body for call in servers[1].weight_calls if call.path == "/collective_rpc"][-1] == {"version": 3}


def test_a_push_waits_for_a_single_server_that_is_restarted() -> None:
    with pool_of(1) as (pool, (server,)):
        pool.push(update(1))
        server.stop()
        restarted(server)
        starting = threading.Timer(0.2, server.start)
        starting.start()
        pool.push(update(2))
        starting.join()
        assert server.weight_version == 2
        assert not server.paused


def test_where_no_server_comes_back_the_push_ends_and_says_which() -> None:
    pool = ServerPool(["http://127.0.0.1:9/v1", "http://127.0.0.1:1/v1"], timeout_s=60.0)
    pool.restart_timeout_s = 0.3
    with pytest.raises(WeightSyncError, match=r"step 3 did not reach the rollout server: .*127\.0\.0\.1:9"):
        pool.push(update(3))
    pool.stop()


def test_a_push_does_not_wait_for_a_host_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor while that host is asked whether it is back."""
    with pool_of(2) as (pool, servers):
        pool.push(update(1))
        servers[1].stop()
        until(pool.down)
        request, gone, asked = ServerClient.request, servers[1].url, threading.Event()

        async def hangs(self: ServerClient, *args: Any, **kwargs: Any) -> Any:
            if self.url == gone:
                asked.set()
                await asyncio.sleep(3600)
            return await request(self, *args, **kwargs)

        monkeypatch.setattr(ServerClient, "request", hangs)
        assert asked.wait(30)
        pool.timeout_s = 20.0
        pool.push(update(2))
        assert servers[0].weight_version == 2


def test_a_server_that_did_not_answer_at_the_end_of_a_push_continues_when_it_is_back() -> None:
    with pool_of(2, route_faults={"/resume": [Fault.disconnect()]}) as (pool, servers):
        pool.push(update(1))
        until(lambda: not servers[1].paused and not pool.down())
        assert loads(servers[1]) == 1


def test_a_restart_that_no_request_met_is_noticed_by_the_version_and_mended() -> None:
    with pool_of(2) as (pool, servers):
        pool.push(update(5))
        restarted(servers[0])
        until(lambda: servers[0].weight_version == 5 and not pool.down())
        assert (loads(servers[0]), loads(servers[1])) == (2, 1)
        assert pool.wait_until_restored(servers[0].url, 30.0)
        assert pool.holds_pushed_weights(servers[0].url)


def test_a_server_that_only_dropped_a_request_is_used_again_without_a_push() -> None:
    with pool_of(2) as (pool, servers):
        pool.push(update(5))
        pool.mark_down(servers[1].url, "it broke off an answer")
        until(lambda: not pool.down())
        assert loads(servers[1]) == 1
        assert pool.restarts == 0


def test_an_answer_that_nobody_expected_does_not_end_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(1) as (pool, (server,)):
        pool.push(update(1))
        ask, asked = ServerClient.weight_version, []

        async def once(self: ServerClient, timeout_s: float | None = None) -> str:
            asked.append(timeout_s)
            if len(asked) == 1:
                raise LookupError("an answer that nobody expected")
            return await ask(self, timeout_s)

        monkeypatch.setattr(ServerClient, "weight_version", once)
        until(lambda: len(asked) > 1)
        restarted(server)
        until(lambda: server.weight_version == 1)


def test_a_check_never_overtakes_a_push() -> None:
    """A check that asked for the version before a push gives the server no older weights after it."""
    with pool_of(2) as (pool, servers):
        told: list[tuple[int, list[Any]]] = []
        pool.on_version = lambda version: told.append((version, [server.weight_version for server in servers]))
        pool.push(update(1))
        watched, asked, go_on = threading.Event(), threading.Event(), threading.Event()
        server = pool.replicas[0].server
        ask = server.weight_version

        async def slow(timeout_s: float | None = None) -> str:
            watched.set()
            name = await ask(timeout_s)
            if name == NEVER_PUSHED and not asked.is_set():
                asked.set()
                await asyncio.to_thread(go_on.wait, 30)
            return name

        server.weight_version = slow
        # a check that began before may not be the one that finds the restart
        assert watched.wait(30)
        restarted(servers[0])
        assert asked.wait(30)
        pool.push(update(2))
        before = loads(servers[0])
        go_on.set()
        assert pool.holds_pushed_weights(servers[0].url)
        assert loads(servers[0]) == before
        assert told == [(1, [1, 1]), (2, [2, 2])]


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"])
def test_an_error_that_passes_does_not_end_the_push(path: str) -> None:
    with pool_of(1, route_faults={path: [Fault(500), Fault(503)]}) as (pool, (server,)):
        pool.push(update(1))
        assert server.weight_version == 1
        assert not server.paused
        # it stayed paused in between: nothing was sampled from partially loaded weights
        assert sum(call.path == "/pause" for call in server.weight_calls) == (3 if path == "/pause" else 1)


@pytest.mark.parametrize(("status", "times"), [(500, 4), (400, 1), (501, 1)])
def test_an_error_that_stays_or_cannot_pass_ends_the_push(status: int, times: int) -> None:
    faults = {"/collective_rpc": [Fault(status, times=times, body="out of order")]}
    with pool_of(1, route_faults=faults) as (pool, (server,)):
        with pytest.raises(WeightSyncError, match=r"step 1 did not reach the rollout server.*out of order"):
            pool.push(update(1))
        assert loads(server) == times
        assert not server.paused
        # no run, this one or the next, takes what is there now for whole weights
        assert server.weight_version == replica_module.PARTIALLY_LOADED


def test_the_first_failure_is_reported_not_the_one_of_resuming() -> None:
    faults = {"/collective_rpc": Fault(400, body="out of memory"), "/resume": Fault(400, body="second trouble")}
    with pool_of(1, route_faults=faults) as (pool, _), pytest.raises(WeightSyncError) as raised:
        pool.push(update(1))
    assert "out of memory" in str(raised.value)
    assert "second trouble" not in str(raised.value)


def test_what_may_not_be_repeated_is_not() -> None:
    tries: list[float] = []

    async def load(server: ServerClient, timeout_s: float) -> None:
        tries.append(timeout_s)
        raise RefusedError("it stands in a collective", 500)

    with pool_of(1) as (pool, (server,)):
        with pytest.raises(WeightSyncError, match="collective"):
            pool.push(update(1, load, is_repeatable=False))
        assert len(tries) == 1
        assert not server.paused


class Layers:
    """A load that breaks off leaves layers open, and the next one closes them with tensors of both, as vLLM does."""

    def __init__(self, broken: int) -> None:
        self.broken = broken
        self.are_open = False
        self.held = "old"

    async def load(self, server: ServerClient, timeout_s: float) -> None:
        if self.broken:
            self.broken -= 1
            self.are_open = True
            raise RefusedError("the disk hiccups", 500)
        self.held = "mixed" if self.are_open else "whole"
        self.are_open = False


@pytest.mark.parametrize("broken", [0, 1, 3])
def test_weights_are_whole_after_loads_that_broke_off(broken: int) -> None:
    layers = Layers(broken)
    with pool_of(1) as (pool, (server,)):
        pool.push(update(1, layers.load))
        assert layers.held == "whole"
        # such a push is then verified by log-probs
        assert pool.repeated_loads == (1 if broken else 0)
        assert server.weight_version == 1


def test_the_next_run_loads_until_the_weights_are_whole_after_a_load_that_stayed_broken() -> None:
    layers = Layers(4)
    with pool_of(1) as (pool, (server,)):
        with pytest.raises(WeightSyncError, match="hiccups"):
            pool.push(update(1, layers.load))
        assert not server.paused
        # the next run knows of it by the name of the weights alone
        other = ServerPool([server.url], timeout_s=30.0)
        other.push(update(1, layers.load))
        other.stop()
        assert layers.held == "whole"


def test_a_restarted_server_too_loads_until_the_weights_are_whole() -> None:
    layers = Layers(0)
    with pool_of(1) as (pool, (server,)):
        pool.push(update(1, layers.load))
        layers.broken, layers.held = 4, "first"
        restarted(server)
        until(lambda: server.weight_version == 1 and not pool.down())
        assert layers.held == "whole"
        assert pool.repeated_loads > pool.restarts == 1


def test_what_a_server_refused_is_not_given_to_one_that_comes_back() -> None:
    faults = {"/collective_rpc": [None, Fault(400, body="no tensor of that name")]}
    with pool_of(1, route_faults=faults) as (pool, (server,)):
        pool.push(update(1))
        with pytest.raises(WeightSyncError, match="no tensor of that name"):
            pool.push(update(2))
        # told by the calls, since a check may have paused it again by now, to give it what it held before
        calls = [call.path for call in server.weight_calls if call.path != "/weight_info"]
        refused = calls.index("/collective_rpc", calls.index("/collective_rpc") + 1)
        assert calls[refused + 1 : refused + 3] == ["/update_weight_version", "/resume"]
        restarted(server)
        until(lambda: server.weight_version == 1)
        assert [call.body for call in server.weight_calls if call.path == "/collective_rpc"][-1] == {"version": 1}


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
        pool.push(update(1))
        pool.push(update(2))
        assert server.weight_version == 2
        assert not server.paused


# -- deadlines and interrupts --------------------------------------------------------------------------------------


def test_a_push_to_a_server_that_hangs_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    release_within(0.5, monkeypatch)
    faults = {"/collective_rpc": [Fault.hang()], "/resume": [Fault.hang()]}
    with pool_of(1, route_faults=faults) as (pool, _):
        # what comes before the hang is to be answered in time
        pool.timeout_s = 3.0
        with pytest.raises(WeightSyncError, match=r"collective_rpc got no answer: timed out"):
            pool.push(update(1))
        pool.stop()


def test_a_slow_answer_to_the_question_of_the_version_has_the_whole_deadline() -> None:
    with pool_of(1) as (pool, _):
        server, given = pool.replicas[0].server, [0.0]

        async def noting(timeout_s: float | None = None) -> str:
            given.append(timeout_s or 0.0)
            return "1"

        pool.timeout_s, server.weight_version = 60.0, noting
        pool.push(update(2))
        # the watch may ask beside it, with a shorter one
        assert max(given) > 50.0


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_push_waits_for_no_answer_and_leaves_no_server_paused(count: int) -> None:
    with pool_of(count) as (pool, servers):
        pool.push(update(1))
        loading = threading.Event()

        async def load(server: ServerClient, timeout_s: float) -> None:
            loading.set()
            await asyncio.sleep(3600)

        def interrupt() -> None:
            loading.wait(30)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            pool.push(update(2, load))
        interrupting.join()
        assert not any(server.paused for server in servers)
        # nor will one that comes back be given what the run removes as it ends
        assert pool._current.version == 1


def test_stopping_while_a_restarted_server_loads_leaves_it_not_paused_and_no_thread() -> None:
    with pool_of(2) as (pool, servers):
        loading = threading.Event()

        async def load(server: ServerClient, timeout_s: float) -> None:
            if loads_again:
                loading.set()
                await asyncio.sleep(3600)

        loads_again: list[bool] = []
        pool.push(update(1, load))
        loads_again.append(True)
        restarted(servers[0])
        assert loading.wait(30)
        assert servers[0].paused
        thread = pool.thread()
        pool.stop()
        pool.stop()
        assert not servers[0].paused
        assert not thread.is_alive


# -- answers from weights that were never pushed -------------------------------------------------------------------


def answers_of(pool: ServerPool, count: int = 1) -> list[Any]:
    async def ask() -> list[Any]:
        calls = (pool.call("/chat/completions", ASK) for _ in range(count))
        return await asyncio.gather(*calls, return_exceptions=True)

    return pool.run(ask(), 30.0)


def test_an_answer_from_weights_that_were_never_pushed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CHECK_INTERVAL_S", 3600.0)
    with pool_of(1) as (pool, (server,)):
        pool.push(update(7))
        assert len(answers_of(pool, 5)) == 5
        restarted(server)
        (refused,) = answers_of(pool)
        assert isinstance(refused, RetryableError)
        assert "'default', which were never pushed" in str(refused)
        # the next call waits until the server has the weights again
        (answer,) = answers_of(pool)
        assert answer.choices[0].weight_versions[0].version == "7"
        assert pool.restarts == 1


def test_an_answer_that_names_no_weights_counts_once_its_server_named_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CHECK_INTERVAL_S", 3600.0)
    with (
        FakeOpenAIServer("4", token_ids=False, weight_version=NEVER_PUSHED) as server,
        FakeOpenAIServer("4", token_ids=False) as other,
    ):
        pool = ServerPool([server.url], timeout_s=30.0)
        pool.connect(30.0)
        pool.push(update(7))
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
        assert pool.holds_pushed_weights(server.url)
        pool.push(update(1))

        async def load(control: ServerClient, timeout_s: float) -> None:
            for name in ("1", "1+reload", "2", NEVER_PUSHED):
                server.weight_version = name
                seen.append(await pool._is_verified(server.url))

        pool.push(update(2, load))
        assert seen == [True, True, True, False]


def test_an_unreachable_server_holds_nothing() -> None:
    with pool_of(1) as (pool, (server,)):
        pool.push(update(1))
        server.stop()
        assert not pool.holds_pushed_weights(server.url)
        assert not pool.wait_until_restored(server.url, 0.1)


def test_a_pool_whose_loop_is_blocked_says_so() -> None:
    with pool_of(1) as (pool, _):
        go_on = threading.Event()

        async def block() -> None:
            go_on.wait(30)

        pool.stall_timeout_s = 0.05
        with pytest.raises(DeadlineError, match="blocks the event loop"):
            pool.run(block(), 60.0)
        go_on.set()


async def test_a_no_answer_error_says_whether_the_server_was_reached() -> None:
    with pytest.raises(NoAnswerError, match="got no answer") as raised:
        await ServerClient("http://127.0.0.1:9").request("GET", "/health", timeout_s=5.0)
    assert not raised.value.timed_out
