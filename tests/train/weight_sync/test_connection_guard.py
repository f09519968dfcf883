"""The guard of new connections: what it refuses is closed, and what others do in threads does not hold it up."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Callable

import pytest

from verifiers.rollouts.endpoint import Endpoint, HttpBackend
from verifiers.rollouts.retries import RetryableError
from verifiers.testing import FakeOpenAIServer
from verifiers.train.weight_sync.guard import ConnectionGuard

CALL = {"model": "fake", "messages": []}


def guarded(server: FakeOpenAIServer, ask: Callable[[], bool]) -> HttpBackend:
    backend = HttpBackend(Endpoint(server.url))
    backend.new_connector = ConnectionGuard(server.url, ask).connector
    return backend


def left_open() -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        gc.collect()
    return [str(warning.message) for warning in found]


def test_a_connection_that_is_refused_is_closed() -> None:
    async def refused(server: FakeOpenAIServer) -> None:
        backend = guarded(server, lambda: False)
        with pytest.raises(RetryableError, match="started again"):
            await backend.call("/chat/completions", CALL)
        await backend.close()

    left_open()
    with FakeOpenAIServer() as server:
        asyncio.run(refused(server))
        assert server.request_count == 0
    assert left_open() == []


def test_a_connection_that_is_given_up_while_it_is_checked_is_closed() -> None:
    asked, answer = threading.Event(), threading.Event()

    def ask() -> bool:
        asked.set()
        return answer.wait(10)

    async def given_up(server: FakeOpenAIServer) -> None:
        backend = guarded(server, ask)
        calls = [asyncio.create_task(backend.call("/chat/completions", CALL)) for _ in range(4)]
        assert await asyncio.to_thread(asked.wait, 10)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await backend.close()

    left_open()
    with FakeOpenAIServer() as server:
        try:
            asyncio.run(given_up(server))
        finally:
            answer.set()
        assert server.request_count == 0
    assert left_open() == []


async def test_functions_that_fill_the_event_loops_threads_do_not_hold_up_a_connection() -> None:
    release = threading.Event()
    blocking = [asyncio.create_task(asyncio.to_thread(release.wait, 15)) for _ in range(64)]
    try:
        with FakeOpenAIServer("yes") as server:
            backend = guarded(server, lambda: True)
            async with asyncio.timeout(5):
                answer = await backend.call("/chat/completions", CALL)
            assert answer.choices[0].message.content == "yes"
            await backend.close()
    finally:
        release.set()
        await asyncio.gather(*blocking)


async def test_a_server_is_asked_one_question_at_a_time_and_never_answers_for_later_connections() -> None:
    lock, asking, most, questions = threading.Lock(), 0, 0, 0

    def ask() -> bool:
        nonlocal asking, most, questions
        with lock:
            asking += 1
            questions += 1
            most = max(most, asking)
        time.sleep(0.02)
        with lock:
            asking -= 1
        return True

    guard = ConnectionGuard("http://server", ask)
    for _ in range(5):
        before = questions
        checks = [asyncio.create_task(guard.check()) for _ in range(20)]
        await asyncio.sleep(0.01)
        # the first question is being asked: these need one that is asked after they came
        checks += [asyncio.create_task(guard.check()) for _ in range(20)]
        await asyncio.gather(*checks)
        assert questions == before + 2
    assert most == 1
