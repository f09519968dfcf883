"""Weights pushed to a pool: a push is on all servers, or ends in time with its cause and leaves no server paused."""

from __future__ import annotations

import asyncio
import signal
import threading
from typing import Any

import pytest
from pool_world import NEVER_PUSHED, loads, pool_of, push, restarted, until

from verifiers.errors import DeadlineError, WeightSyncError
from verifiers.inference import server_pool
from verifiers.inference.server_client import RefusedError, ServerClient
from verifiers.inference.server_pool import PARTIALLY_LOADED, ServerPool
from verifiers.testing import Fault

pytestmark = pytest.mark.usefixtures("in_fast_motion")


# -- pushes that succeed -------------------------------------------------------------------------------------------


def test_a_push_reaches_all_servers_and_each_stage_ends_on_all_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Any]] = {"/collective_rpc": [], "/resume": []}
    request = ServerClient.request

    async def noting_request(self: ServerClient, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        if path in seen:
            seen[path].append([(server.paused, server.weight_version) for server in servers])
        return await request(self, method, path, *args, **kwargs)

    monkeypatch.setattr(ServerClient, "request", noting_request)
    with pool_of(2) as (pool, servers):
        told: list[int] = []
        pool.configure(restart_timeout_s=60.0, stall_timeout_s=60.0, on_version=told.append)
        push(pool, 4)
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
        push(pool, 1)
        push(pool, 2)
        assert sum(call.path == "/reset_prefix_cache" for call in server.weight_calls) == 1


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"])
def test_an_error_that_passes_does_not_end_the_push(path: str) -> None:
    with pool_of(1, route_faults={path: [Fault(500), Fault(503)]}) as (pool, (server,)):
        push(pool, 1)
        assert server.weight_version == 1
        assert not server.paused
        # it stayed paused in between: nothing was sampled from partially loaded weights
        assert sum(call.path == "/pause" for call in server.weight_calls) == (3 if path == "/pause" else 1)


ROUTES = ["/pause", "/weight_info", "/reset_prefix_cache", "/update_weight_version", "/resume"]


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_that_hangs_is_made_again_within_the_deadline(path: str) -> None:
    with pool_of(1, route_faults={path: [Fault.hang()]}, timeout_s=3.0) as (pool, (server,)):
        push(pool, 1)
        assert server.weight_version == 1
        assert not server.paused


@pytest.mark.parametrize(("status", "times"), [(500, 4), (400, 1), (422, 1)])
def test_an_error_that_stays_or_cannot_pass_ends_the_push(status: int, times: int) -> None:
    faults = {"/collective_rpc": [Fault(status, times=times, body="out of order")]}
    with pool_of(1, route_faults=faults) as (pool, (server,)):
        with pytest.raises(WeightSyncError, match=r"step 1 did not reach the rollout server.*out of order"):
            push(pool, 1)
        assert loads(server) == times
        assert not server.paused
        # no run, this one or the next, takes what is there now for whole weights
        assert server.weight_version == PARTIALLY_LOADED


def test_the_first_failure_is_reported_not_the_one_of_resuming() -> None:
    faults = {"/collective_rpc": Fault(400, body="out of memory"), "/resume": Fault(400, body="second trouble")}
    with pool_of(1, route_faults=faults) as (pool, _), pytest.raises(WeightSyncError) as raised:
        push(pool, 1)
    assert "out of memory" in str(raised.value)
    assert "second trouble" not in str(raised.value)


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
        push(pool, 1, layers.load)
        assert layers.held == "whole"
        # such a push is then verified by log-probs
        assert pool.repeated_loads == (1 if broken else 0)
        assert server.weight_version == 1


def test_the_next_run_loads_until_the_weights_are_whole_after_a_load_that_stayed_broken() -> None:
    layers = Layers(4)
    with pool_of(1) as (pool, (server,)):
        with pytest.raises(WeightSyncError, match="hiccups"):
            push(pool, 1, layers.load)
        assert not server.paused
        # the next run knows of it by the name of the weights alone
        other = ServerPool([server.url], timeout_s=30.0)
        push(other, 1, layers.load)
        other.stop()
        assert layers.held == "whole"


def test_what_a_server_refused_is_not_given_to_one_that_comes_back() -> None:
    faults = {"/collective_rpc": [None, Fault(400, body="no tensor of that name")]}
    with pool_of(1, route_faults=faults) as (pool, (server,)):
        push(pool, 1)
        with pytest.raises(WeightSyncError, match="no tensor of that name"):
            push(pool, 2)
        # told by the calls, since a check may have paused it again by now, to give it what it held before
        calls = [call.path for call in server.weight_calls if call.path != "/weight_info"]
        refused = calls.index("/collective_rpc", calls.index("/collective_rpc") + 1)
        assert calls[refused + 1 : refused + 3] == ["/update_weight_version", "/resume"]
        restarted(server)
        until(lambda: server.weight_version == 1)
        assert [call.body for call in server.weight_calls if call.path == "/collective_rpc"][-1] == {"version": 1}


# -- deadlines and interrupts --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_push_to_a_server_that_hangs_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "SHUTDOWN_S", 0.5)
    faults = {"/collective_rpc": [Fault.hang()], "/resume": [Fault.hang()]}
    with pool_of(1, route_faults=faults) as (pool, _):
        # what comes before the hang is to be answered in time
        pool.timeout_s = 3.0
        with pytest.raises(WeightSyncError, match=r"collective_rpc got no answer: timed out"):
            push(pool, 1)
        pool.stop()


@pytest.mark.parametrize("count", [1, 2])
def test_an_interrupted_push_waits_for_no_answer_and_leaves_no_server_paused(count: int) -> None:
    with pool_of(count) as (pool, servers):
        push(pool, 1)
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
            push(pool, 2, load)
        interrupting.join()
        assert not any(server.paused for server in servers)
        # nor will one that comes back be given what the run removes as it ends
        restarted(servers[0])
        until(lambda: servers[0].weight_version == 1)


def test_stopping_while_a_restarted_server_loads_leaves_it_not_paused_and_no_thread() -> None:
    with pool_of(2) as (pool, servers):
        loading = threading.Event()

        async def load(server: ServerClient, timeout_s: float) -> None:
            if loads_again:
                loading.set()
                await asyncio.sleep(3600)

        loads_again: list[bool] = []
        push(pool, 1, load)
        loads_again.append(True)
        restarted(servers[0])
        assert loading.wait(30)
        assert servers[0].paused
        thread = pool.thread()
        pool.stop()
        pool.stop()
        assert not servers[0].paused
        assert not thread.is_alive


def test_a_pool_whose_loop_is_blocked_says_so() -> None:
    with pool_of(1) as (pool, _):
        go_on = threading.Event()

        async def block() -> None:
            go_on.wait(30)

        pool.stall_timeout_s = 0.05
        with pytest.raises(DeadlineError, match="blocks the event loop"):
            pool.run(block(), 60.0)
        go_on.set()
