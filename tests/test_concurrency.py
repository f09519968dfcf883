"""Objects that belong to an event loop end with it."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from typing import Any

import pytest

from verifiers.concurrency import at_loop_end
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.loop_thread import LoopThread, run_blocking
from verifiers.testing import FakeOpenAIServer


def test_the_end_runs_when_its_loop_ends() -> None:
    ended: list[str] = []

    async def end() -> None:
        await asyncio.sleep(0)
        ended.append("now")

    async def program() -> object:
        close = at_loop_end(end)
        await asyncio.sleep(0)
        assert not ended
        return close

    kept = asyncio.run(program())
    assert ended == ["now"]
    assert kept is not None


@pytest.mark.filterwarnings("error")
def test_a_backend_that_nobody_closes_leaves_no_connection_behind_its_loop() -> None:
    with FakeOpenAIServer("yes") as server:
        backend = HttpBackend(Endpoint(server.url))

        async def ask() -> None:
            arguments = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            await backend.call("/chat/completions", arguments)

        for number in (1, 2):
            asyncio.run(ask())
            assert backend._session is not None
            assert backend._session.closed
            assert server.request_count == number
        backend._session = None
        gc.collect()


def test_synchronous_calls_share_one_loop_wherever_they_come_from() -> None:
    async def loop_of_call() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def inside_a_loop() -> asyncio.AbstractEventLoop:
        return run_blocking(loop_of_call)

    first = run_blocking(loop_of_call)
    assert run_blocking(loop_of_call) is first
    assert asyncio.run(inside_a_loop()) is first
    # a call on that loop itself would wait for itself
    assert run_blocking(inside_a_loop) is not first


def test_a_synchronous_call_raises_what_its_work_raises_and_the_next_one_works() -> None:
    async def fail(error: BaseException) -> None:
        raise error

    async def answer() -> int:
        return 42

    for error in (LookupError("mine"), SystemExit(3)):
        with pytest.raises(type(error)):
            run_blocking(functools.partial(fail, error))
        assert run_blocking(answer) == 42


@pytest.mark.parametrize("begins_first", [True, False])
def test_work_on_a_loop_ends_where_its_caller_is_interrupted_while_it_hands_it_over(
    begins_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = threading.Event(), threading.Event()
    submit = asyncio.run_coroutine_threadsafe

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    def interrupted(coroutine: Any, loop: asyncio.AbstractEventLoop) -> None:
        submit(coroutine, loop)
        if begins_first:
            began.wait(30)
        raise KeyboardInterrupt

    thread = LoopThread(failed=lambda error: None)
    thread.start()
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        thread.run(work(), 60.0, ending_s=30.0)
    assert ended.is_set() == began.is_set()
    thread.close()


def test_what_closes_slowly_is_not_called_blocking(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("verifiers.loop_thread._CLOSING_S", 0.1)
    has_time = threading.Event()
    thread = LoopThread(failed=lambda error: None, close_last=lambda: asyncio.to_thread(has_time.wait, 30.0))
    thread.start()
    thread.close()
    has_time.set()
    assert "did not end in 1.1 s: something is still being closed" in caplog.text
