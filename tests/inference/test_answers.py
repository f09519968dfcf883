"""Answers as they are read: mended where that is possible, bounded in size, never parsed on the loop where long."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verifiers.errors import ProviderError
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.inference.retry import RetryableError
from verifiers.inference.wire import plain_data, sampled_tokens
from verifiers.testing import FakeOpenAIServer, Fault

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "2+2?"}]}
MB = 2**20


def completion(message: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}]}


async def ask(url: str, asked: dict[str, Any] = ASK, path: str = "/chat/completions", **settings: Any) -> Any:
    backend = HttpBackend(Endpoint(url, **settings))
    try:
        return await backend.call(path, asked)
    finally:
        await backend.close()


async def read(message: dict[str, Any]) -> Any:
    async with FakeOpenAIServer(faults=Fault(200, body=completion(message))) as server:
        return (await ask(server.url)).choices[0].message


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"zone": "CET"}, '{"zone": "CET"}'),
        (None, "{}"),
        ("", "{}"),
        ('{"a": 1}', '{"a": 1}'),
        ("\ud83d", "\ufffd"),
        ([1], "[1]"),
    ],
)
async def test_arguments_of_tool_calls_are_text(arguments: Any, text: str) -> None:
    message = await read({"tool_calls": [{"id": None, "function": {"name": "now", "arguments": arguments}}]})
    assert message.tool_calls[0].function.arguments == text
    assert message.tool_calls[0].id


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"a":  1}', '{"a":  1}'),
        ('{"a": "cut o', '{"not_json": "{\\"a\\": \\"cut o"}'),
        ("[1]", '{"not_json": "[1]"}'),
        ("", "{}"),
        ("[" * 9_000, json.dumps({"not_json": "[" * 9_000})),
        ({"a": 1}, {"a": 1}),
    ],
)
async def test_arguments_that_a_model_got_wrong_go_back_as_an_object_which_every_server_reads(
    arguments: Any, sent: Any
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    async with FakeOpenAIServer("4") as server:
        await ask(server.url, {"model": "m", "messages": [*ASK["messages"], said]})
    (back,) = server.requests[0].body["messages"][1]["tool_calls"]
    assert back["function"] == {"name": "now", "arguments": sent}
    assert call["function"] == {"name": "now", "arguments": arguments}


async def test_content_in_parts_and_thoughts_by_another_name_are_read() -> None:
    message = await read({"content": [{"type": "text", "text": "4"}, "2"], "reasoning": "hm"})
    assert (message.content, message.reasoning_content) == ("42", "hm")


async def test_half_a_character_can_be_sent_back() -> None:
    async with FakeOpenAIServer("4") as server:
        content = 'say "\ud83d", \ud83d\ude00'
        await ask(server.url, {"model": "m", "messages": [{"role": "user", "content": content}]})
        assert server.requests[0].messages[0]["content"] == 'say "\ufffd", \U0001f600'


@pytest.fixture
async def long_answers() -> AsyncIterator[str]:
    """Return the URL of a server whose answers have as many characters as their path says, packed or not."""

    async def answer(request: web.Request) -> web.Response:
        body = json.dumps(completion({"content": "x" * int(request.match_info["size"])})).encode()
        if request.match_info["form"] == "packed":
            return web.Response(body=gzip.compress(body), headers={"Content-Encoding": "gzip"})
        return web.Response(body=body)

    app = web.Application()
    app.router.add_post("/{form}/{size}/v1/chat/completions", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


@pytest.mark.parametrize("status", [301, 307])
async def test_nothing_is_sent_on_to_another_place(status: int) -> None:
    asked: list[str] = []

    async def send_on(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(
            status=status, headers={"Location": "https://there.example/v1/chat/completions?key=s3cret"}
        )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", send_on)
    said = rf"answered {status} and sends on to 'https://there.example"
    async with TestServer(app) as server:
        with pytest.raises(ProviderError, match=said) as caught:
            await ask(str(server.make_url("/v1")), headers={"api-key": "12345678"})
    assert "s3cret" not in str(caught.value)
    assert asked == ["/v1/chat/completions"]


async def test_an_answer_that_fills_mistrals_context_is_one_that_was_cut_off() -> None:
    body = completion({"content": "4"})
    body["choices"][0]["finish_reason"] = "model_length"
    async with FakeOpenAIServer(faults=Fault(200, body=body)) as server:
        assert (await ask(server.url)).choices[0].finish_reason == "length"


async def test_a_message_of_a_text_completion_may_be_anything() -> None:
    body = {"choices": [{"text": "5", "message": "5", "finish_reason": "stop"}]}
    async with FakeOpenAIServer(faults=Fault(200, body=body)) as server:
        answer = await ask(server.url, {"model": "m", "prompt": "2+3="}, "/completions")
    assert sampled_tokens(plain_data(answer)).refusal is None


@pytest.mark.parametrize("form", ["plain", "packed"])
async def test_an_answer_above_the_limit_is_a_failed_try_that_names_the_setting(long_answers: str, form: str) -> None:
    url = f"{long_answers}/{form}/{3 * MB}/v1"
    with pytest.raises(RetryableError, match=r"more than 2 MiB.*max_answer_mb"):
        await ask(url, max_answer_mb=2)
    assert len((await ask(url)).choices[0].message.content) == 3 * MB


async def test_a_long_answer_is_parsed_off_the_loop(long_answers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, parsed = asyncio.get_running_loop(), []
    loads = json.loads

    def note(content: Any) -> Any:
        parsed.append(asyncio._get_running_loop() is loop)
        return loads(content)

    monkeypatch.setattr("json.loads", note)
    for size in (1, 2 * MB):
        await ask(f"{long_answers}/plain/{size}/v1")
    assert parsed == [True, False]
