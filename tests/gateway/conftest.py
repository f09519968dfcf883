"""A gateway over a scripted server, with one session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from verifiers.gateway.gateway import Gateway
from verifiers.gateway.session import Session
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.inference.retry import RetryPolicy
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeOpenAIServer

Open = Callable[..., Any]


@pytest.fixture
async def closing() -> AsyncIterator[AsyncExitStack]:
    """Return a stack that closes what a test enters."""
    async with AsyncExitStack() as held:
        yield held


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Return a function that opens a session over a server with these answers."""
    async with AsyncExitStack() as held:
        gateway = Gateway(keep_alive_s=0.05)
        await gateway.start()
        held.push_async_callback(gateway.close)

        async def open_session(
            answers: Any = None,
            *,
            latency_s: float = 0.0,
            faults: Any = None,
            require_tokens: bool = True,
            **arguments: Any,
        ) -> tuple[Session, str, FakeOpenAIServer]:
            server = await held.enter_async_context(FakeOpenAIServer(answers, latency_s=latency_s, faults=faults))
            backend = HttpBackend(Endpoint(server.url))
            held.push_async_callback(backend.close)
            client = RolloutClient(
                backend, model="fake", seed=7, require_tokens=require_tokens, retry=RetryPolicy(max_attempts=1)
            )
            session = Session(client, "fake", **arguments)
            await held.enter_async_context(gateway.serving(session))
            return session, gateway.base_url, server

        yield open_session
