"""DaemonThreads: synchronous functions off the event loop, none of which can hold the others up for good."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time

import pytest

from verifiers.concurrency import DaemonThreads, OverdueError, threads_for


async def test_no_more_calls_run_at_once_than_the_limit_and_all_of_them_run() -> None:
    threads, lock = DaemonThreads("tool", limit=3), threading.Lock()
    running = most = 0

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.002)
        with lock:
            running -= 1
        return number

    assert await asyncio.gather(*(threads.run(lambda n=n: work(n)) for n in range(50))) == list(range(50))  # type: ignore[misc]
    assert most == 3


async def test_a_call_that_hangs_is_given_up_and_gives_its_place_to_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads, release = DaemonThreads("tool", limit=1), threading.Event()
    hung = asyncio.create_task(threads.run(release.wait, timeout_s=0.1))
    quick = asyncio.create_task(threads.run(lambda: "quick", timeout_s=60.0))
    try:
        with pytest.raises(OverdueError):
            await hung
        assert "A tool still runs after its deadline" in caplog.text
        assert await quick == "quick"
    finally:
        release.set()
    # the thread that came back late is not counted twice
    assert await asyncio.gather(*(threads.run(lambda: 1) for _ in range(5))) == [1] * 5
    assert threads._running == 0


async def test_a_cancelled_call_in_the_queue_never_runs() -> None:
    threads, release, ran = DaemonThreads("tool", limit=1), threading.Event(), threading.Event()
    first = asyncio.create_task(threads.run(release.wait))
    second = asyncio.create_task(threads.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    assert await first is True
    assert await threads.run(lambda: 1) == 1
    assert not ran.is_set()


async def test_what_a_call_raises_and_the_context_it_is_made_in_are_carried_over() -> None:
    threads, name = DaemonThreads("tool", limit=64), contextvars.ContextVar("name", default="none")
    name.set("mine")
    assert await threads.run(name.get) == "mine"
    with pytest.raises(KeyError, match="lost"):
        await threads.run(lambda: {}["lost"])


async def test_threads_are_used_again_and_do_not_keep_the_process_alive() -> None:
    threads = DaemonThreads("tool", limit=64)
    assert threads_for("tool", 64) is threads_for("tool", 64) is not threads_for("judge", 32)
    used = {await threads.run(threading.current_thread) for _ in range(20)}
    assert len(used) <= 2
    assert all(thread.daemon for thread in used)
