"""Several rollout servers: all get every push, one that is away is left out, one that comes back gets it first."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fleet_world import NEVER_PUSHED, SOME, restarted, until

from verifiers.errors import WeightSyncError
from verifiers.rollouts.balancing import BalancedBackend, server_pool
from verifiers.rollouts.retries import RetryableError
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.train.weight_sync import DirectorySync, Fleet, ServerControl
from verifiers.train.weight_sync.fleet import Held
from verifiers.train.weight_sync.guard import ConnectionGuard

pytestmark = pytest.mark.usefixtures("in_fast_motion")


def test_a_push_reaches_all_servers_and_each_stage_ends_on_all_first(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    paused: list[list[bool]] = []
    named: list[list[Any]] = []
    ask = ServerControl.request

    def watching(self: ServerControl, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        if path == "/collective_rpc":
            paused.append([server.paused for server in servers])
        if path == "/resume":
            named.append([server.weight_version for server in servers])
        return ask(self, method, path, *args, **kwargs)

    for server in sync.fleet._members:
        server.control.request = watching.__get__(server.control)  # type: ignore[method-assign]
    told: list[int] = []
    sync.fleet.on_version = told.append
    sync.push(SOME.items(), 4)
    assert paused == [[True, True]] * 2
    assert named == [[4, 4]] * 2
    assert told == [4]
    assert not any(server.paused for server in servers)


def test_a_server_that_is_away_is_left_out_and_gets_the_newest_push_when_it_is_back(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    pool = server_pool([server.url for server in servers], managed=True)
    sync.fleet.route_through(pool)
    sync.push(SOME.items(), 1)
    servers[1].stop()
    sync.push(SOME.items(), 2)
    sync.push(SOME.items(), 3)
    assert servers[0].weight_version == 3
    assert list(pool.down()) == [servers[1].url]
    assert [server.root for server in sync.fleet.servers] == [servers[0].url.removesuffix("/v1")]
    restarted(servers[1])
    servers[1].start()
    until(lambda: not pool.down())
    assert servers[1].weight_version == 3
    assert sync.fleet.restarts == 1
    # what was asked again was there: the newest version is kept
    path = next(c for c in reversed(servers[1].weight_calls) if c.path == "/collective_rpc").body["kwargs"]
    assert path["weights_path"].endswith("version-3")
    assert Path(path["weights_path"]).is_dir()


def test_a_push_waits_for_a_single_server_that_starts_again(tmp_path: Path) -> None:
    with FakeOpenAIServer(weight_version=NEVER_PUSHED) as server:
        sync = DirectorySync(server.url, str(tmp_path), timeout_s=5.0)
        sync.connect(5.0)
        sync.push(SOME.items(), 1)
        server.stop()
        starting = threading.Timer(0.4, server.start)
        restarted(server)
        starting.start()
        sync.push(SOME.items(), 2)
        starting.join()
        assert server.weight_version == 2
        assert not server.paused
        sync.close()


def test_where_no_server_comes_back_the_push_ends_and_says_which(tmp_path: Path) -> None:
    sync = DirectorySync(["http://127.0.0.1:9/v1", "http://127.0.0.1:1/v1"], str(tmp_path), timeout_s=60.0)
    sync.fleet.restart_timeout_s = 0.3
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"step 3 did not reach the rollout server: .*127\.0\.0\.1:9"):
        sync.push(SOME.items(), 3)
    assert time.monotonic() - started < 3.0
    assert list(tmp_path.glob("*/version-*")) == []


def test_a_server_that_is_not_vllm_need_not_forget_prefixes(tmp_path: Path) -> None:
    with FakeOpenAIServer(route_faults={"/reset_prefix_cache": Fault(404, times=1)}) as server:
        sync = DirectorySync(server.url, str(tmp_path))
        sync.push(SOME.items(), 1)
        sync.push(SOME.items(), 2)
        assert sum(call.path == "/reset_prefix_cache" for call in server.weight_calls) == 1
        sync.close()


def test_no_request_gets_through_to_weights_that_were_not_pushed(
    servers: list[FakeOpenAIServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each new connection asks which weights are there; the fleet's own watch is off."""
    server = servers[0]
    fleet = Fleet([server.url], timeout_s=5.0)
    fleet.push(Held(7, lambda control, timeout_s: None))
    pool = server_pool([server.url], managed=True, up_timeout_s=0.3)
    fleet.pool = pool
    guard = ConnectionGuard(server.url, lambda: fleet.holds_pushed_weights(server.url))
    for backend in pool.backends:
        backend.new_connector = guard.connector  # type: ignore[attr-defined]

    async def ask(pool: BalancedBackend) -> Any:
        return await pool.call("/chat/completions", {"model": "fake", "messages": []})

    async def both() -> tuple[int, str]:
        await asyncio.gather(*(ask(pool) for _ in range(20)))
        answered = server.request_count
        server.stop()
        restarted(server)
        server.start()
        refusals = []
        # the first may find a connection of before, which is broken
        for _ in range(2):
            pool.mark_up(server.url)
            try:
                await ask(pool)
            except RetryableError as error:
                refusals.append(str(error))
        await pool.close()
        return answered, " ".join(refusals)

    answered, refusal = asyncio.run(both())
    assert "started again" in refusal
    assert server.request_count == answered == 20
    checks = sum(call.path == "/weight_info" for call in server.weight_calls)
    # connections that are made together share a question
    assert 1 <= checks < 20


def test_a_version_that_is_being_loaded_counts_as_pushed(servers: list[FakeOpenAIServer]) -> None:
    server = servers[0]
    fleet = Fleet([server.url], timeout_s=5.0)
    assert fleet.holds_pushed_weights(server.url)
    fleet.push(Held(1, lambda control, timeout_s: None))
    seen = []

    def load(control: ServerControl, timeout_s: float) -> None:
        for name in ("1", "1+reload", "2", NEVER_PUSHED):
            server.weight_version = name
            seen.append(fleet.holds_pushed_weights(server.url))

    fleet.push(Held(2, load))
    assert seen == [True, True, True, False]
    server.weight_version = 1
    assert not fleet.holds_pushed_weights(server.url)


def test_a_run_that_is_stopped_in_the_middle_of_a_push_leaves_no_server_paused(
    servers: list[FakeOpenAIServer], sync: DirectorySync
) -> None:
    def interrupted(server: ServerControl, timeout_s: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync.fleet.push(Held(1, interrupted))
    # nor will one that comes back be given what the run removes as it ends
    assert sync.fleet._current is None
    assert all([call.path for call in server.weight_calls].count("/pause") == 1 for server in servers)
    assert not any(server.paused for server in servers)


def test_an_interrupted_push_waits_for_no_answer_of_several_servers(servers: list[FakeOpenAIServer]) -> None:
    fleet = Fleet([server.url for server in servers], timeout_s=30.0)
    loading, go_on = threading.Event(), threading.Event()

    def load(server: ServerControl, timeout_s: float) -> None:
        if server.url == servers[1].url:
            loading.set()
            go_on.wait(10)

    def interrupt() -> None:
        loading.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before, started = threading.enumerate(), time.monotonic()
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        fleet.push(Held(1, load))
    assert time.monotonic() - started < 5.0
    assert not any(server.paused for server in servers)
    interrupting.join()
    fleet.close()
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert left
    # nor does the process that ends
    assert all(thread.daemon for thread in left)
    go_on.set()
    for thread in left:
        thread.join(10)


def test_a_push_that_failed_waits_no_longer_for_a_server_that_hangs(tmp_path: Path) -> None:
    faults = {"/collective_rpc": [Fault.hang()], "/resume": [Fault.hang()]}
    with FakeOpenAIServer(weight_version=NEVER_PUSHED, route_faults=faults) as server:
        sync = DirectorySync(server.url, str(tmp_path), timeout_s=0.3)
        sync.connect(5.0)
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match="did not reach the rollout server"):
            sync.push(SOME.items(), 1)
        sync.close()
        assert time.monotonic() - started < 3.0
