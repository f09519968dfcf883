"""What an event loop holds ends with it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from verifiers.concurrency import at_loop_end
from verifiers.rollouts.endpoint import Endpoint, HttpBackend
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


def test_the_end_runs_once_where_it_was_asked_for_before() -> None:
    ended: list[str] = []

    async def end() -> None:
        ended.append("now")

    async def program() -> None:
        close = at_loop_end(end)
        await close()
        assert ended == ["now"]

    asyncio.run(program())
    assert ended == ["now"]


@pytest.mark.filterwarnings("error")
def test_a_backend_that_nobody_closes_leaves_no_connection_behind_its_loop() -> None:
    with FakeOpenAIServer("yes") as server:
        backend = HttpBackend(Endpoint(server.url))

        async def ask() -> None:
            arguments = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            await backend.call("/chat/completions", arguments)

        for _ in range(2):
            asyncio.run(ask())
            assert backend._session is not None
            assert backend._session.closed
            backend._session = None
            gc.collect()
