"""Keys, budgets, helpers and the end of a session."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import sys
from typing import Any

import aiohttp
import openai
import pytest

from verifiers.errors import ConfigError
from verifiers.gateway.gateway import Gateway
from verifiers.gateway.listener import past_proxies
from verifiers.gateway.session import Budget, Session
from verifiers.inference.endpoint import Endpoint, HttpBackend, single_backend_for
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeOpenAIServer, Fault


async def ask(url: str, key: str, text: str = "hi", **arguments: Any) -> openai.types.chat.ChatCompletion:
    async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        return await client.chat.completions.create(
            model=arguments.pop("model", "fake"), messages=[{"role": "user", "content": text}], **arguments
        )


async def test_an_unknown_key_is_refused_before_its_body_is_read(opened: Any) -> None:
    _, url, server = await opened()
    with pytest.raises(openai.AuthenticationError, match="not that of a running rollout"):
        await ask(url, "sk-vf-other")
    async with aiohttp.ClientSession() as http, http.get(f"{url}/models") as response:
        assert response.status == 401
    assert not server.requests


async def test_a_sealed_session_answers_409_and_adds_nothing(opened: Any) -> None:
    session, url, server = await opened(latency_s=30.0)
    running = asyncio.create_task(ask(url, session.key))
    await asyncio.to_thread(server.wait_until, lambda seen: seen.in_flight == 1, 60.0)
    session.seal()
    with pytest.raises(openai.ConflictError, match="is over"):
        await running
    with pytest.raises(openai.ConflictError, match="is over"):
        await ask(url, session.key)
    assert session.client.calls == 0
    assert len(server.requests) == 1


async def test_a_budget_of_tokens_bounds_the_next_call(opened: Any) -> None:
    session, url, server = await opened("four", budget=Budget(completion_tokens=12), sampling_args={"max_tokens": 8})
    for text in ("one", "two", "three"):
        await ask(url, session.key, text, max_tokens=100)
    spent = session.client.usage.completion_tokens
    assert [request.body["max_completion_tokens"] for request in server.requests] == [8, 7, 2]
    assert spent == 12
    with pytest.raises(ConfigError, match="calls=0 is too small: no agent could make a call"):
        Budget(calls=0)


async def test_helpers_are_asked_with_the_agents_own_sampling_and_not_trained(opened: Any) -> None:
    async with FakeOpenAIServer("helped", model="judge") as other:
        helper = RolloutClient(single_backend_for(other.url)).untrained
        session, url, server = await opened("mine", helpers={"judge": helper}, aliases=frozenset({"gpt-5"}))
        answer = await ask(url, session.key, model="judge", temperature=0.3, max_tokens=50)
        assert answer.choices[0].message.content == "helped"
        assert other.requests[0].body["temperature"] == 0.3
        assert session.client.calls == 0
        answer = await ask(url, session.key, model="gpt-5")
        assert (answer.choices[0].message.content, answer.model) == ("mine", "gpt-5")
        assert server.requests[0].body["model"] == "fake"
        with pytest.raises(openai.NotFoundError, match="ask for fake, judge"):
            await ask(url, session.key, model="gpt-4")


async def test_parallel_calls_share_a_budget_of_tokens(opened: Any) -> None:
    session, url, server = await opened("four", budget=Budget(completion_tokens=12))
    results = await asyncio.gather(*(ask(url, session.key, str(i)) for i in range(6)), return_exceptions=True)
    assert session.client.usage.completion_tokens <= 12
    assert len(server.requests) == sum(not isinstance(result, Exception) for result in results) < 6


async def test_of_equal_calls_each_retry_gets_its_own_answer_and_adds_no_turn(opened: Any) -> None:
    session, url, server = await opened(["first", "second"])
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {session.key}"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def post(retry: str) -> dict[str, Any]:
            async with http.post(
                f"{url}/chat/completions", json=body, headers={"x-stainless-retry-count": retry}
            ) as response:
                answer: dict[str, Any] = await response.json()
                return answer

        answers = [await post(retry) for retry in "0012"]
    assert [answer["choices"][0]["message"]["content"] for answer in answers[:2]] == ["first", "second"]
    assert answers[2:] == answers[:2]
    assert session.client.calls == len(server.requests) == 2


def read_to_the_last_event(url: str, key: str, text: str) -> None:
    """Ask for a stream, read its last event, and reset the connection."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    body = json.dumps({"model": "fake", "stream": True, "messages": [{"role": "user", "content": text}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall((head + body).encode())
        content = b""
        while b"[DONE]" not in content:
            content += connection.recv(1)


async def test_a_stream_counts_as_read_where_its_reader_hangs_up_at_the_last_event(opened: Any) -> None:
    session, url, _ = await opened("ok")
    interval = sys.getswitchinterval()
    # readers run between any two steps of the gateway
    sys.setswitchinterval(1e-5)
    try:
        reading = (asyncio.to_thread(read_to_the_last_event, url, session.key, str(n)) for n in range(300))
        await asyncio.gather(*reading)
    finally:
        sys.setswitchinterval(interval)
    assert len(session.calls) == 300


@pytest.mark.parametrize("status", [400, 200])
async def test_the_key_and_the_headers_of_an_endpoint_do_not_reach_the_agent(status: int) -> None:
    secrets = ("sk-provider-0123456789", "tenant-4711-abcdef-0123456789")
    error = {"message": f"bad request with {' and '.join(secrets)}", "code": 400}
    quoting = Fault(status, body={"error": error})
    async with FakeOpenAIServer(faults=[quoting]) as server:
        backend = HttpBackend(Endpoint(server.url, secrets[0], {"X-Tenant": secrets[1]}))
        gateway = Gateway()
        await gateway.start()
        client = RolloutClient(backend, model="fake")
        async with gateway.serving(Session(client, "fake")) as session:
            with pytest.raises(openai.BadRequestError, match=r"bad request with \*\*\* and \*\*\*"):
                await ask(gateway.base_url, session.key)
            assert not any(secret in str(session.standing_failure) for secret in secrets)
        await gateway.close()
        await backend.close()


async def test_an_agent_of_this_process_reaches_the_gateway_past_a_proxy(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    session, url, server = await opened("four")
    await ask(url, session.key)
    assert len(server.requests) == 1
    assert "127.0.0.1" in past_proxies({"no_proxy": "inside.example.com"})["NO_PROXY"].split(",")
    assert "inside.example.com" in past_proxies({"no_proxy": "inside.example.com"})["no_proxy"].split(",")
