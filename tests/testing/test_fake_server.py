from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from verifiers.errors import ConfigError, DeadlineError
from verifiers.testing import FakeOpenAIServer, Fault
from verifiers.testing.script import END_ID

USER = [{"role": "user", "content": "2+2?"}]
TOKENS: dict[str, Any] = {"logprobs": True, "extra_body": {"return_token_ids": True}}


@asynccontextmanager
async def sdk(server: FakeOpenAIServer, max_retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    client = openai.AsyncOpenAI(base_url=server.url, api_key="secret", max_retries=max_retries, timeout=10)
    async with client:
        yield client


def post(url: str, body: Any = None) -> tuple[int, Any]:
    data = json.dumps(body if body is not None else {}).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def test_the_openai_client_gets_a_whole_chat_completion() -> None:
    async with FakeOpenAIServer("four", model="tiny") as server, sdk(server) as client:
        answer = await client.chat.completions.create(model="tiny", messages=USER, max_tokens=50)
        models = [model.id async for model in client.models.list()]
    assert answer.choices[0].message.content == "four"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("four") + 1
    assert models == ["tiny"]
    (request,) = server.requests
    assert request.messages == USER
    assert request.headers["authorization"] == "Bearer secret"
    assert request.body["max_tokens"] == 50


@pytest.mark.parametrize(
    ("max_tokens", "text", "reason"), [(3, "fou", "length"), (4, "four", "length"), (5, "four", "stop")]
)
async def test_max_tokens_cuts_the_answer_and_says_so(max_tokens: int, text: str, reason: str) -> None:
    async with FakeOpenAIServer("four") as server, sdk(server) as client:
        answer = await client.chat.completions.create(model="m", messages=USER, max_tokens=max_tokens, **TOKENS)
    choice = answer.choices[0]
    ids = (choice.model_extra or {})["token_ids"]
    assert (choice.message.content, choice.finish_reason) == (text, reason)
    assert len(ids) == max_tokens
    assert (ids[-1] == END_ID) is (reason == "stop")


async def test_answers_come_from_a_list_one_by_one_or_from_a_function() -> None:
    async def double(body: dict[str, Any]) -> str:
        await asyncio.sleep(0)
        return body["messages"][-1]["content"] * 2

    texts = []
    async with FakeOpenAIServer(["a", "b"]) as listed, FakeOpenAIServer(double) as computed:
        for server in (listed, listed, listed, computed):
            async with sdk(server) as client:
                answer = await client.chat.completions.create(model="m", messages=USER)
                texts.append(answer.choices[0].message.content)
    assert texts == ["a", "b", "a", "2+2?2+2?"]


async def test_a_fault_schedule_fails_the_requests_it_names() -> None:
    faults = [Fault(429, times=2, retry_after=7), None, Fault.disconnect(), Fault.malformed(), Fault(400)]
    seen: list[Any] = []
    async with FakeOpenAIServer("fine", faults=faults) as server, sdk(server) as client:
        for _ in range(7):
            try:
                answer = await client.chat.completions.create(model="m", messages=USER)
                seen.append(answer.choices[0].message.content)
            except openai.APIStatusError as error:
                seen.append((error.status_code, error.response.headers.get("retry-after")))
            except openai.APIConnectionError:
                seen.append("disconnected")
            except ValueError:
                seen.append("malformed")
    assert seen == [(429, "7"), (429, "7"), "fine", "disconnected", "malformed", (400, None), "fine"]
    assert server.request_count == 7


async def test_a_hang_lasts_until_the_caller_gives_up() -> None:
    async with FakeOpenAIServer("fine", faults=Fault.hang()) as server, sdk(server) as client:
        call = asyncio.create_task(client.chat.completions.create(model="m", messages=USER))
        await asyncio.to_thread(server.wait_until, lambda seen: seen.in_flight == 1)
        await asyncio.sleep(0.05)
        assert (server.in_flight, call.cancel()) == (1, True)
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(server.wait_until, lambda seen: seen.in_flight == 0)
        answer = await client.chat.completions.create(model="m", messages=USER)
    assert answer.choices[0].message.content == "fine"


def test_waiting_for_what_never_happens_ends_at_its_deadline() -> None:
    with FakeOpenAIServer() as server, pytest.raises(DeadlineError, match="saw 0 requests"):
        server.wait_until(lambda seen: seen.request_count == 1, timeout_s=0.01)


def test_a_script_that_raises_is_a_500_and_is_kept() -> None:
    def broken(body: dict[str, Any]) -> str:
        raise ValueError("no such task")

    with FakeOpenAIServer(broken) as server:
        status, body = post(f"{server.url}/chat/completions", {"messages": USER})
    assert status == 500
    assert "ValueError: no such task" in body["error"]["message"]
    assert [str(error) for error in server.errors] == ["no such task"]


def test_unusable_requests_are_refused() -> None:
    with FakeOpenAIServer() as server:
        chat = f"{server.url}/chat/completions"
        assert post(chat, {"messages": USER, "stream": True})[0] == 400
        assert post(chat, {"prompt": "x"})[0] == 400
        assert post(chat, ["no object"])[0] == 400


def test_a_taken_port_is_an_error_at_the_start() -> None:
    with FakeOpenAIServer() as server, pytest.raises(OSError, match=r"in use|address"):
        FakeOpenAIServer(port=server.port).start()


def test_scripts_that_cannot_work_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="empty"):
        FakeOpenAIServer([])
    with pytest.raises(ConfigError, match="Fault or None"):
        FakeOpenAIServer(faults=[500])  # type: ignore[list-item]
