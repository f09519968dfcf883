"""Servers that come back, or are gone, beside pushes: nobody waits for them, and none is left behind."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from fleet_world import NEVER_PUSHED, SOME, loads, restarted, until

from verifiers.rollouts.balancing import server_pool
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.weight_sync import DirectorySync, Fleet, ServerControl
from verifiers.train.weight_sync.fleet import Held
from verifiers.train.weight_sync.server import NoAnswerError

pytestmark = pytest.mark.usefixtures("in_fast_motion")


def test_a_host_that_is_gone_is_left_out_of_pushes(
    servers: list[FakeOpenAIServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = "http://127.0.0.1:9/v1"
    connect, tried = socket.create_connection, []

    def dropping(address: tuple[str, int], timeout: float, *args: Any, **kwargs: Any) -> socket.socket:
        if address[1] != 9:
            return connect(address, timeout, *args, **kwargs)
        tried.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", dropping)
    sync = DirectorySync([servers[0].url, gone], str(tmp_path), timeout_s=60.0)
    sync.push(SOME.items(), 1)
    assert servers[0].weight_version == 1
    # no longer than a host that is there takes
    assert tried
    assert max(tried) <= 5.0
    pool = server_pool([servers[0].url, gone], managed=True)
    sync.fleet.route_through(pool)
    sync.push(SOME.items(), 2)
    assert servers[0].weight_version == 2
    sync.close()


def test_a_push_does_not_wait_for_a_host_that_the_watch_finds_gone(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    sync.push(SOME.items(), 1)
    servers[1].stop()
    until(lambda: sync.fleet._members[1].is_silent)
    asked = []
    sync.fleet._members[1].control.request = lambda *args, **kwargs: asked.append(threading.current_thread())  # type: ignore
    with sync.fleet._members[1].lock:
        assert [member.control.url for member in sync.fleet._reachable()] == [servers[0].url]
    assert threading.main_thread() not in asked


def test_a_push_does_not_wait_while_the_watch_asks_a_host_that_is_gone(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    sync.push(SOME.items(), 1)
    gone = sync.fleet._members[1]
    servers[1].stop()
    until(lambda: gone.is_silent)
    asking, go_on = threading.Event(), threading.Event()

    def hangs(*args: Any, **kwargs: Any) -> None:
        asking.set()
        go_on.wait(10)
        raise NoAnswerError("no connection")

    gone.control.request = hangs  # type: ignore[method-assign]
    assert asking.wait(10)
    sync.fleet.timeout_s = 2.0
    sync.push(SOME.items(), 2)
    assert servers[0].weight_version == 2
    go_on.set()


def test_a_server_that_did_not_answer_at_the_end_of_a_push_goes_on_when_it_is_back(
    servers: list[FakeOpenAIServer], tmp_path: Path
) -> None:
    faults = {"/resume": [Fault.disconnect()]}
    with FakeOpenAIServer(weight_version=NEVER_PUSHED, route_faults=faults) as server:
        sync = DirectorySync([servers[0].url, server.url], str(tmp_path), timeout_s=5.0)
        sync.connect(5.0)
        sync.push(SOME.items(), 1)
        until(lambda: not server.paused)
        assert loads(server) == 1
        sync.close()


def test_one_answer_that_nobody_expected_does_not_end_the_watch(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    sync.push(SOME.items(), 1)
    control = sync.fleet._members[0].control
    ask, asked = control.weight_version, []

    def once(timeout_s: float | None = None) -> str:
        asked.append(timeout_s)
        if len(asked) == 1:
            raise LookupError("an answer that nobody expected")
        return ask(timeout_s)

    control.weight_version = once  # type: ignore[method-assign]
    until(lambda: len(asked) > 1)
    restarted(servers[0])
    until(lambda: servers[0].weight_version == 1)


def test_closing_while_the_watch_loads_leaves_no_server_paused(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(control: ServerControl, timeout_s: float) -> None:
        if threading.current_thread().name == "verifiers-fleet":
            loading.set()
            go_on.wait(10)

    sync.fleet.push(Held(1, load))
    restarted(servers[0])
    assert loading.wait(10)
    assert servers[0].paused
    sync.close()
    assert not servers[0].paused
    go_on.set()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "verifiers-fleet"])
    assert not servers[0].paused


def test_closing_ends_the_watch(sync: DirectorySync) -> None:
    sync.close()
    sync.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "verifiers-fleet"]


def test_the_watch_never_overtakes_a_push(servers: list[FakeOpenAIServer]) -> None:
    """Nor does it say of a version that all have it."""
    fleet = Fleet([server.url for server in servers], timeout_s=5.0)
    told: list[tuple[int, list[Any]]] = []
    fleet.on_version = lambda version: told.append((version, [server.weight_version for server in servers]))
    fleet.push(Held(1, lambda control, timeout_s: None))
    first, last = fleet._members
    with last.lock:
        pushing = threading.Thread(target=fleet.push, args=[Held(2, lambda control, timeout_s: None)])
        pushing.start()
        until(first.lock.locked)
        # the watch is at the last one, and gives it what is newest
        restarted(servers[1])
        newest = fleet._watch._newest()
        assert newest is not None
        assert newest.version == 1
        fleet._watch._bring_back(last, newest)
        assert servers[1].weight_version == 1
    pushing.join()
    assert told == [(1, [1, 1]), (2, [2, 2])]


def test_a_restart_that_no_request_met_is_noticed_by_the_version_and_mended(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    pool = server_pool([server.url for server in servers], managed=True)
    sync.fleet.route_through(pool)
    sync.push(SOME.items(), 5)
    downs: list[str] = []
    mark_down = pool.mark_down
    pool.mark_down = lambda url, reason: (downs.append(url), mark_down(url, reason))[1]  # type: ignore
    before = loads(servers[0])
    restarted(servers[0])
    until(lambda: servers[0].weight_version == 5 and not pool.down())
    assert downs == [servers[0].url]
    assert loads(servers[0]) == before + 1
    assert loads(servers[1]) == 1


def test_a_server_that_only_dropped_a_request_is_used_again_without_a_push(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    pool = server_pool([server.url for server in servers], managed=True)
    sync.fleet.route_through(pool)
    sync.push(SOME.items(), 5)
    pool.mark_down(servers[1].url, "it broke off an answer")
    until(lambda: not pool.down())
    assert loads(servers[1]) == 1
    assert sync.fleet.restarts == 0
