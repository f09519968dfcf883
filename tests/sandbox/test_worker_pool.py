"""Warm workers: what calls give, what they cannot do to one another, and how they end."""

# looking at the machine from outside is the point of these tests, and nothing else runs in their event loops
# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verifiers.errors import ConfigError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.sandbox.spec import IsolationLevel
from verifiers.sandbox.worker_pool import WorkerPool


def test_json_goes_in_and_comes_out(pool: WorkerPool) -> None:
    answer = pool.call_blocking("pool_functions:echo", 1, "zwei", None, [1.5], timeout_s=60, key={"a": ["ü"]})
    assert answer == {"args": [1, "zwei", None, [1.5]], "kwargs": {"key": {"a": ["ü"]}}}
    assert pool.call_blocking("math:sqrt", 16) == 4
    long = "x" * 5_000_000
    assert pool.call_blocking("builtins:len", long) == 5_000_000


def test_errors_of_any_kind_are_told(pool: WorkerPool) -> None:
    kinds = {"recurse": "RecursionError", "deep": "RecursionError", "leave": "SystemExit", "huge": "OverflowError"}
    for function, kind in {**kinds, "eat": "MemoryError"}.items():
        with pytest.raises(WorkerCallError) as raised:
            pool.call_blocking(f"pool_functions:{function}", timeout_s=60)
        assert raised.value.kind == kind
    with pytest.raises(WorkerCallError) as raised:
        pool.call_blocking("builtins:bytearray", 10 << 30)
    assert raised.value.kind == "MemoryError"
    with pytest.raises(WorkerCallError, match="not JSON serializable"):
        pool.call_blocking("builtins:range", 3)


def test_a_process_that_dies_or_talks_nonsense_is_an_error_of_its_call_alone(pool: WorkerPool) -> None:
    for function in ("crash", "corrupt", "flood"):
        with pytest.raises(WorkerError):
            pool.call_blocking(f"pool_functions:{function}", timeout_s=4)
        assert pool.call_blocking("pool_functions:echo", 1)["args"] == [1]


def test_a_call_past_its_time_is_killed_and_the_worker_stays_warm(pool: WorkerPool) -> None:
    pool.call_blocking("math:sqrt", 1)
    (worker,) = pool._workers.all
    for function in ("hang", "burn"):
        with pytest.raises(WorkerTimeoutError, match=r"0\.3 s"):
            pool.call_blocking(f"pool_functions:{function}", timeout_s=0.3)
    assert pool.call_blocking("math:sqrt", 4) == 2
    assert set(pool._workers.all) == {worker}


def test_processes_that_a_call_leaves_are_gone_when_it_has_answered(
    pool: WorkerPool, marker: str, count_of: Callable[[str], int]
) -> None:
    assert pool.call_blocking("pool_functions:background", marker) is True
    assert count_of(marker) == 0
    with pytest.raises(WorkerTimeoutError):
        pool.call_blocking("pool_functions:hang", marker, timeout_s=0.5)
    assert count_of(marker) == 0


def test_one_call_can_do_nothing_to_the_next(pool: WorkerPool) -> None:
    assert pool.call_blocking("pool_functions:poison") == "poisoned"
    assert pool.call_blocking("math:sqrt", 9) == 3
    assert pool.call_blocking("pool_functions:echo", 1)["args"] == [1]
    assert "POISON" not in pool.call_blocking("pool_functions:environment")
    assert [pool.call_blocking("pool_functions:count") for _ in range(3)] == [1, 1, 1]


def test_a_process_that_stays_behind_cannot_answer_later_calls(pool: WorkerPool) -> None:
    assert pool.call_blocking("pool_functions:forge") == "left"
    for number in range(20):
        assert pool.call_blocking("pool_functions:echo", number)["args"] == [number]


def test_what_a_function_prints_is_not_its_answer(pool: WorkerPool) -> None:
    assert pool.call_blocking("pool_functions:chatter") == "quiet"


def test_killing_the_agent_costs_one_call(pool: WorkerPool) -> None:
    assert pool.call_blocking("math:sqrt", 1) == 1
    if next(iter(pool._workers.all)).sandbox.isolation == "bubblewrap":
        # nobody inside can send it that signal
        assert pool.call_blocking("pool_functions:kill_parent") == "parent is alive"
    else:
        with pytest.raises(WorkerError):
            pool.call_blocking("pool_functions:kill_parent")
    assert pool.call_blocking("math:sqrt", 4) == 2


def test_a_worker_that_died_while_it_was_idle_is_replaced(pool: WorkerPool) -> None:
    pool.call_blocking("math:sqrt", 1)
    (worker,) = pool._workers.all
    worker.sandbox.process.kill()
    worker.sandbox.process.wait()
    assert pool.call_blocking("math:sqrt", 4) == 2


def test_a_call_has_neither_network_nor_files_nor_keys(
    contained: str, functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    target = tmp_path / "out"
    target.mkdir()
    target.chmod(0o777)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        WorkerPool(workers=1, isolation="bubblewrap", paths=[functions]) as pool,
    ):
        assert pool.call_blocking("pool_functions:network", server.getsockname()[1]) == "stopped"
        for path in (f"{target}/file", f"{functions}/file", "/usr/file", "/etc/passwd"):
            assert pool.call_blocking("pool_functions:write_to", path) == "stopped"
        assert "canary" not in str(pool.call_blocking("pool_functions:environment"))
        assert pool.call_blocking("os:listdir", os.path.dirname(functions)) == [os.path.basename(functions)]
    assert os.listdir(target) == []


def test_functions_and_arguments_that_cannot_be_sent_are_refused(pool: WorkerPool) -> None:
    for function in ("math", "math:", ":sqrt"):
        with pytest.raises(ConfigError, match="module:attribute"):
            pool.call_blocking(function)
    with pytest.raises(ConfigError, match="not JSON"):
        pool.call_blocking("math:sqrt", object())
    with pytest.raises(ConfigError, match="paths"):
        pool.call_blocking("module_that_is_not_there:function")
    with pytest.raises(ConfigError, match="AttributeError"):
        pool.call_blocking("math:no_such_function")
    with pytest.raises(ConfigError, match="timeout_s"):
        pool.call_blocking("math:sqrt", 1, timeout_s=0)
    with pytest.raises(ConfigError, match="at least one"):
        WorkerPool(workers=0)
    with pytest.raises(ConfigError, match="'docker'"):
        WorkerPool(isolation="docker")


def test_a_module_to_preload_that_cannot_be_imported_is_said() -> None:
    with (
        WorkerPool(workers=1, preload=["no_such_module"]) as pool,
        pytest.raises(WorkerError, match="no_such_module"),
    ):
        pool.call_blocking("math:sqrt", 1)


def test_nothing_starts_before_the_first_call() -> None:
    threads = set(threading.enumerate())
    pool = WorkerPool(workers=2)
    # threads of earlier tests may have ended meanwhile
    assert set(threading.enumerate()) <= threads
    assert pool._workers.all == set()
    pool.close()


@pytest.mark.slow
async def test_a_queued_calls_time_starts_when_a_worker_takes_it(pool: WorkerPool) -> None:
    first = pool.call("time:sleep", 3, timeout_s=60)
    queued = (pool.call("math:sqrt", 4, timeout_s=2.5) for _ in range(3))
    assert await asyncio.gather(first, *queued) == [None, 2, 2, 2]


async def test_cancelling_a_call_kills_it_and_frees_the_worker(
    pool: WorkerPool, marker: str, count_of: Callable[[str], int], wait_until_gone: Callable[[str], None]
) -> None:
    task = asyncio.create_task(pool.call("pool_functions:hang", marker, timeout_s=100))
    queued = asyncio.create_task(pool.call("pool_functions:hang", marker, timeout_s=100))
    while not count_of(marker):
        await asyncio.sleep(0.01)
    for cancelled in (queued, task):
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
    async with asyncio.timeout(30):
        assert await pool.call("math:sqrt", 4) == 2
    wait_until_gone(marker)


async def test_a_cancelled_call_never_takes_the_next_one_with_it(pool: WorkerPool) -> None:
    await pool.call("math:sqrt", 4)
    for number in range(30):
        first = asyncio.create_task(pool.call("time:sleep", 0.001 * (number % 4)))
        second = asyncio.create_task(pool.call("math:sqrt", number * number))
        await asyncio.sleep(0.001 * (number % 5))
        first.cancel()
        assert await second == number
        await asyncio.gather(first, return_exceptions=True)


def test_it_serves_many_threads_and_event_loops_at_once(isolation: IsolationLevel) -> None:
    results: list[float] = []

    async def many(pool: WorkerPool, offset: int) -> None:
        results.extend(await asyncio.gather(*(pool.call("math:sqrt", (offset + n) ** 2) for n in range(50))))

    with WorkerPool(workers=2, isolation=isolation) as pool:
        threads = [threading.Thread(target=lambda n=n: asyncio.run(many(pool, n * 50))) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(results) == list(range(200))


def test_closing_ends_calls_under_way_and_those_that_wait(isolation: IsolationLevel) -> None:
    pool = WorkerPool(workers=1, isolation=isolation, timeout_s=100)
    pool.call_blocking("math:sqrt", 1)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            pool.call_blocking("time:sleep", 100)
        except WorkerError as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not pool._workers._turns._waiters:
        time.sleep(0.001)
    (worker,) = pool._workers.all
    pool.close()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2
    assert all("closed" in str(error) for error in errors)
    assert worker.sandbox.process.returncode is not None
    with pytest.raises(WorkerError, match="closed"):
        pool.call_blocking("math:sqrt", 1)
    pool.close()


def test_a_pool_that_nobody_holds_ends_its_workers() -> None:
    pool = WorkerPool(workers=1, isolation="process")
    pool.call_blocking("math:sqrt", 1)
    (worker,) = pool._workers.all
    del pool
    gc.collect()
    assert worker.sandbox.process.wait(60) is not None


def _in_a_forked_child(pool: WorkerPool, answers: multiprocessing.Queue[float]) -> None:
    answers.put(pool.call_blocking("math:sqrt", 81))
    pool.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_workers_of_its_own(isolation: IsolationLevel) -> None:
    context = multiprocessing.get_context("fork")
    with WorkerPool(workers=1, isolation=isolation) as pool:
        assert pool.call_blocking("math:sqrt", 4) == 2
        answers = context.Queue()
        child = context.Process(target=_in_a_forked_child, args=(pool, answers))
        child.start()
        assert answers.get(timeout=60) == 9
        child.join(60)
        assert child.exitcode == 0
        assert pool.call_blocking("math:sqrt", 16) == 4


def test_no_descriptor_is_left_behind(isolation: IsolationLevel, functions: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with WorkerPool(workers=1, isolation=isolation, paths=[functions]) as pool:
        for function in ("echo", "crash", "fail"):
            for _ in range(5):
                try:
                    pool.call_blocking(f"pool_functions:{function}", *(["x"] if function == "fail" else []))
                except (WorkerError, WorkerCallError):
                    pass
    assert set(os.listdir("/proc/self/fd")) == before
