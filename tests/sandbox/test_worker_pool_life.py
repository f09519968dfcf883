"""Start, sharing and end of a worker pool's processes."""

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

import pytest

from verifiers.errors import WorkerCallError, WorkerError
from verifiers.sandbox.agent_sandbox import AgentSandbox
from verifiers.sandbox.spec import IsolationLevel
from verifiers.sandbox.worker_pool import WorkerPool


def test_nothing_starts_before_the_first_call() -> None:
    threads = set(threading.enumerate())
    pool = WorkerPool(workers=2)
    # threads of earlier tests may have ended meanwhile
    assert set(threading.enumerate()) <= threads
    assert pool._workers.all == set()
    pool.close()


def test_a_pool_that_ends_while_a_cancelled_call_closes_its_worker_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting, closing, opened = threading.Event(), threading.Event(), []
    close = AgentSandbox._close

    async def begin(sandbox: AgentSandbox, configuration: object) -> None:
        opened.append(sandbox)
        starting.set()
        await asyncio.Event().wait()

    async def close_during_the_end(sandbox: AgentSandbox) -> None:
        closing.set()
        await pool._workers._stopping.wait()
        await asyncio.sleep(0)
        await close(sandbox)

    monkeypatch.setattr(AgentSandbox, "begin", begin)
    monkeypatch.setattr(AgentSandbox, "_close", close_during_the_end)
    pool = WorkerPool(workers=1, isolation="process")
    call = pool._submit("math:sqrt", [4], {}, None)
    assert starting.wait(30)
    call.cancel()
    assert closing.wait(30)
    pool.close()
    assert [sandbox.process.returncode is not None for sandbox in opened] == [True]


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
