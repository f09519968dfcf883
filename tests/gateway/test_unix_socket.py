"""The gateway on a Unix socket, for programs in sandboxes without network."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from verifiers.gateway.gateway import Gateway
from verifiers.gateway.session import Session
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeOpenAIServer

BODY = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}


async def post(path: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as http,
        http.post("http://gateway/v1/chat/completions", json=BODY, headers=headers) as response,
    ):
        return response.status


async def test_a_unix_socket_leads_to_the_same_sessions_and_ends_with_the_gateway() -> None:
    gateway = Gateway()
    await gateway.start()
    async with FakeOpenAIServer("42") as server:
        backend = HttpBackend(Endpoint(server.url))
        session = Session(RolloutClient(backend, model="fake"), "fake")
        paths = await asyncio.gather(gateway.unix_socket(), gateway.unix_socket())
        assert paths[0] == paths[1]
        async with gateway.serving(session):
            assert await post(paths[0], session.key) == 200
            assert await post(paths[0], "sk-vf-other") == 401
        assert await post(paths[0], session.key) == 409
        await backend.close()
    # others on this machine may not pass the directory
    directory = Path(paths[0]).parent
    assert directory.stat().st_mode & 0o077 == 0
    await gateway.close()
    assert not directory.exists()
