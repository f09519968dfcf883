"""Large headers and bodies, slow readers and crowds of connections: refused or held, and other sessions go on."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from verifiers.gateway import gateway as gateway_module
from verifiers.gateway.gateway import Gateway
from verifiers.gateway.session import Session
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.inference.wire import WireObject
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeOpenAIServer

MIB = 2**20
BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
CROWD = """
import asyncio, resource, sys

async def main(port, wanted):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opened = []
    for _ in range(min(wanted, hard - 100)):
        try:
            opened.append(await asyncio.open_connection("127.0.0.1", port))
        except OSError:
            break
    # some say half of a request
    for _, writer in opened[::2]:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n")
    print(len(opened), flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
"""


def key_of(session: Session) -> dict[str, str]:
    return {"Authorization": f"Bearer {session.key}"}


class Policy:
    """A model that gives one text, of one token."""

    base_url, api_key = "http://policy", "EMPTY"

    def __init__(self, text: str) -> None:
        self._text = text

    async def call(self, path: str, arguments: Mapping[str, Any]) -> WireObject:
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": self._text},
            "token_ids": [1],
            "logprobs": {"content": [{"token": "", "logprob": -1.0}]},
        }
        return WireObject({"id": "1", "choices": [choice], "prompt_token_ids": [2], "usage": None})

    async def close(self) -> None: ...


async def test_a_connection_whose_headers_have_no_end_is_closed_before_they_are_many(opened: Any) -> None:
    session, url, _ = await opened("fine")
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    # a request in order, and then the next one's headers
    writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\n\r\n".encode())
    assert b"200 OK" in await reader.readline()
    writer.write(b"GET /v1/models HTTP/1.1\r\n")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 100:
            writer.write(f"x-{sent}: {'a' * MIB}\r\n".encode())
            await writer.drain()
            sent += 1
    # beside what the sockets hold
    assert sent < 20


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_body_of_64_mib_is_answered_and_more_is_refused() -> None:
    policy = Policy("fine")
    async with small_gateway() as (gateway, other):
        session = Session(RolloutClient(policy, model="fake", require_tokens=True), "fake")
        async with gateway.serving(session), aiohttp.ClientSession(headers=key_of(session)) as http:
            text = "a" * (64 * MIB - 200)
            for content, status in ((text, 200), (text + "a" * 400, 413)):
                body = json.dumps({**BODY, "messages": [{"role": "user", "content": content}]}).encode()
                async with http.post(f"{gateway.base_url}/chat/completions", data=io.BytesIO(body)) as response:
                    answer = await response.json()
                assert response.status == status
            assert answer["error"]["code"] == "request_too_large"
            assert "64 MiB" in answer["error"]["message"]
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=other.key) as client:
            assert (await client.chat.completions.create(**BODY)).choices[0].message.content == "fine"


@asynccontextmanager
async def small_gateway(latency_s: float = 0.0, **arguments: Any) -> AsyncIterator[tuple[Gateway, Session]]:
    async with AsyncExitStack() as held:
        server = await held.enter_async_context(FakeOpenAIServer("fine", latency_s=latency_s))
        backend = HttpBackend(Endpoint(server.url))
        held.push_async_callback(backend.close)
        gateway = Gateway(**arguments)
        await gateway.start()
        held.push_async_callback(gateway.close)
        session = Session(RolloutClient(backend, model="fake", require_tokens=True), "fake")
        yield gateway, await held.enter_async_context(gateway.serving(session))


async def test_at_the_bound_connections_that_ask_nothing_are_closed() -> None:
    async with small_gateway(latency_s=0.2, max_connections=4) as (gateway, session):
        port = int(gateway.url.rpartition(":")[2])
        async with aiohttp.ClientSession(headers=key_of(session)) as http:

            async def ask() -> int:
                async with http.post(f"{gateway.base_url}/chat/completions", json=BODY) as response:
                    await response.read()
                    return response.status

            assert await ask() == 200
            crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            asking = asyncio.create_task(ask())
            crowd += [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            assert await asking == 200
            assert await crowd[0][0].read() == b""
        for _, writer in crowd:
            writer.close()


async def test_where_every_connection_is_being_answered_a_new_one_is_closed() -> None:
    async with small_gateway(latency_s=0.5, max_connections=2) as (gateway, session):
        async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=session.key, max_retries=0) as client:
            results = await asyncio.gather(
                *(client.chat.completions.create(**BODY, temperature=place) for place in range(3)),
                return_exceptions=True,
            )
        failed = [result for result in results if isinstance(result, Exception)]
        assert [type(error) for error in failed] == [openai.APIConnectionError]


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_more_requests_of_one_session_than_may_be_at_once_are_refused(
    opened: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("verifiers.gateway.session.MAX_REQUESTS", 2)
    session, url, server = await opened("fine", latency_s=0.3)

    async def ask(number: int) -> tuple[int, dict[str, Any], str | None]:
        body = {**BODY, "max_tokens": 5, "metadata": {"user_id": str(number)}}
        async with http.post(f"{url}/{path}", json=body) as response:
            return response.status, await response.json(), response.headers.get("x-should-retry")

    async with aiohttp.ClientSession(headers=key_of(session)) as http:
        answers = await asyncio.gather(*map(ask, range(3)))
        (refused,) = [(answer, retried) for status, answer, retried in answers if status != 200]
        assert "2 requests of this rollout" in refused[0]["error"]["message"]
        assert (refused[0].get("type") == "error") == (path == "messages")
        assert refused[1] == "false"
        assert sorted(status for status, _, _ in answers) == [200, 200, 429]
        assert (await ask(3))[0] == 200
    assert len(server.requests) == 3


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_body_of_very_many_values_is_refused_before_it_is_checked(opened: Any, path: str) -> None:
    session, url, server = await opened("fine")
    messages = [{"role": "user", "content": "a"}] * 100_000
    body = {"model": "fake", "max_tokens": 5, "input" if path == "responses" else "messages": messages}
    data = io.BytesIO(json.dumps(body).encode())
    async with aiohttp.request("POST", f"{url}/{path}", data=data, headers=key_of(session)) as response:
        answer = await response.json()
    assert response.status == 413
    assert "more than 200,000 values" in answer["error"]["message"]
    assert not server.requests


@pytest.mark.slow
async def test_an_agent_that_does_not_read_its_answer_loses_its_connection_and_the_answer_is_not_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_module, "STALLED_S", 1.0)
    async with small_gateway() as (gateway, session):
        slow = Session(RolloutClient(Policy("long" * 4 * MIB), model="fake", require_tokens=True), "fake")
        async with gateway.serving(slow):
            host, port = gateway.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {slow.key}\r\n"
            content = json.dumps(BODY).encode()
            writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            # the first bytes of the answer
            await reader.readexactly(100)
            async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=session.key) as client:
                assert (await client.chat.completions.create(**BODY)).choices[0].message.content == "fine"
            await asyncio.sleep(1.2)
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await reader.readexactly(16 * MIB)
        assert (slow.client.calls, session.client.calls) == (0, 1)
        writer.close()


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Let this process open 1,024 files, as most systems do."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_ten_thousand_idle_connections_leave_a_session_untouched(few_descriptors: None) -> None:
    async with small_gateway() as (gateway, session):
        command = [sys.executable, "-c", CROWD, gateway.url.rpartition(":")[2], "10000"]
        crowd = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert crowd.stdout is not None
        opening = asyncio.create_task(crowd.stdout.readline())
        try:
            async with openai.AsyncOpenAI(base_url=gateway.base_url, api_key=session.key) as client:
                calls = 0
                while not opening.done() or calls < 20:
                    messages: Any = [{"role": "user", "content": f"call {calls}"}]
                    await client.chat.completions.create(model="fake", messages=messages)
                    calls += 1
            # fewer where the hard limit of open files is low
            assert int(await opening) >= 1500
            assert session.client.calls == calls
        finally:
            crowd.kill()
            await crowd.wait()
