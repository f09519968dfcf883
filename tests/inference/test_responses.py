"""Environments speak chat completions; an endpoint that serves the Responses API understands them all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.endpoint import Endpoint
from verifiers.inference.responses_api import ResponsesBackend, chat_completion, responses_body
from verifiers.inference.retry import RetryableError, RetryPolicy
from verifiers.inference.wire import read_completion
from verifiers.rollouts.recording_client import RolloutClient

TOOL = {"type": "function", "function": {"name": "add", "description": "sum", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}


def a_response(*output: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a response as the SDK reads and writes it."""
    whole = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1.0,
        "model": "m",
        "status": "completed",
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        },
        **fields,
    }
    return Response.model_validate(whole).model_dump(mode="json")


class ResponsesServer:
    """Answers POST /v1/responses with what is next in `answers`: a response, or a status with an error."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "scripted"}}, status=answer)
        return web.json_response(answer)


@pytest.fixture
async def server() -> AsyncIterator[ResponsesServer]:
    scripted = ResponsesServer()
    app = web.Application()
    app.router.add_post("/v1/responses", scripted.handle)
    async with TestServer(app) as running:
        scripted.url = str(running.make_url("/v1"))
        yield scripted


async def test_a_rollout_with_tools_goes_through_and_counts_its_tokens(server: ResponsesServer) -> None:
    called = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
    server.answers = [a_response(called), 503, a_response(said("2"))]
    backend = ResponsesBackend(Endpoint(server.url))
    client = RolloutClient(backend, model="m", seed=5, retry=RetryPolicy(base_s=0.0))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    first = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], max_tokens=64)
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert (message.content, message.tool_calls[0].function.name) == (None, "add")
    messages.append({"role": "assistant", "content": "", "tool_calls": [message.tool_calls[0].model_dump()]})
    messages.append({"role": "tool", "content": "2", "tool_call_id": "call_1"})
    second = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL], tool_choice="auto")
    await backend.close()
    assert second.choices[0].message.content == "2"
    ChatCompletion.model_validate(second.model_dump())
    assert (client.usage.prompt_tokens, client.usage.completion_tokens, client.retries) == (14, 6, 1)
    assert server.bodies[0]["input"] == messages[:2]
    assert server.bodies[0]["max_output_tokens"] == 64
    assert server.bodies[0]["store"] is False
    assert server.bodies[0]["tools"] == [
        {"type": "function", "name": "add", "description": "sum", "parameters": {"type": "object"}, "strict": False}
    ]
    assert server.bodies[2]["input"][2:] == [
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
    ]
    assert not {"seed", "messages", "max_tokens"} & set(server.bodies[2])


def test_arguments_take_the_names_of_the_other_interface() -> None:
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    body = responses_body(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": "a", "tool_calls": [CALL]},
            ],
            "max_completion_tokens": 9,
            "temperature": 0.5,
            "reasoning_effort": "low",
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "response_format": {"type": "json_schema", "json_schema": schema},
            "n": 1,
        }
    )
    assert body == {
        "model": "m",
        "store": False,
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "see"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"},
                ],
            },
            {"role": "assistant", "content": "a"},
            {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
        ],
        "max_output_tokens": 9,
        "temperature": 0.5,
        "reasoning": {"effort": "low"},
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "json_schema", **schema}},
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"n": 2}, "several answers"),
        ({"stream": True}, "streaming"),
        ({"logprobs": True}, "log-probs"),
        ({"return_token_ids": True}, "token ids"),
        ({"stop": ["x"]}, "no argument 'stop'"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "type 'input_audio' cannot go"),
    ],
)
def test_what_has_no_counterpart_is_refused_and_never_dropped(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        responses_body({"model": "m", "messages": [], **arguments})


async def test_text_completions_are_refused() -> None:
    with pytest.raises(ConfigError, match="no text completions"):
        await ResponsesBackend(Endpoint("http://127.0.0.1:1/v1")).call("/completions", {"model": "m", "prompt": "x"})


def test_a_cut_answer_a_refusal_and_reasoning_keep_their_meaning() -> None:
    cut = chat_completion(
        a_response(said("so far"), status="incomplete", incomplete_details={"reason": "max_output_tokens"}), "u"
    )
    assert (cut["choices"][0]["finish_reason"], cut["choices"][0]["message"]["content"]) == ("length", "so far")
    no_text = chat_completion(a_response(status="incomplete", incomplete_details={"reason": "content_filter"}), "u")
    assert no_text["choices"][0]["finish_reason"] == "content_filter"
    refusal = {**said(""), "content": [{"type": "refusal", "refusal": "no"}]}
    assert chat_completion(a_response(refusal), "u")["choices"][0]["message"]["refusal"] == "no"
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert chat_completion(a_response(thought, said("4")), "u")["choices"][0]["message"]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("response", "kind", "text"),
    [
        (a_response(), RetryableError, "without a message"),
        (a_response(said("hi"), created_at=float("inf")), RetryableError, "no completion"),
        (a_response(status="failed", error={"code": "server_error", "message": "boom"}), RetryableError, "boom"),
        (a_response(status="failed", error={"code": "invalid_prompt", "message": "bad"}), ProviderError, "bad"),
    ],
)
def test_a_failed_response_is_a_failure_and_no_answer(response: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(ProviderError, match=text) as caught:
        read_completion(response, "http://there", "message", convert=chat_completion)
    assert type(caught.value) is kind
