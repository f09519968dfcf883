"""Each wire format through its own SDK: what is sent upstream, what comes back, streamed and whole."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletion

from verifiers.gateway.calls import note_left_out
from verifiers.gateway.session import Session
from verifiers.testing import Fault

TOOL = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALLS = {
    "content": "Let me see.",
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{ "a":1}'}}],
}


def openai_client(session: Session, url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=session.key, max_retries=2)


def anthropic_client(session: Session, url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=session.key, max_retries=2)


def text_of(row_ids: list[int]) -> str:
    return "".join(map(chr, row_ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_with_tools_is_recorded_as_sampled(opened: Any, closing: AsyncExitStack, stream: bool) -> None:
    session, url, server = await opened([CALLS, "It is 2."])
    client = await closing.enter_async_context(openai_client(session, url))

    async def ask(messages: list[Any]) -> Any:
        arguments: dict[str, Any] = {"model": "fake", "messages": messages, "temperature": 0.2, "logprobs": True}
        arguments["tools"] = [{"type": "function", "function": TOOL}]
        if not stream:
            return (await client.chat.completions.create(**arguments)).choices[0].message
        async with client.chat.completions.stream(**arguments) as events:
            async for _ in events:
                pass
            return (await events.get_final_completion()).choices[0].message

    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]}
    ]
    first = await ask(messages)
    assert first.tool_calls[0].function.arguments == '{ "a":1}'
    result = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    second = await ask([*messages, first.model_dump(exclude_none=True), result])
    assert second.content == "It is 2."

    sent = [request.body for request in server.requests]
    assert [message["content"] for message in sent[0]["messages"]] == ["1 + 1?"]
    # the run's sampling, not the agent's
    assert [body["temperature"] for body in sent] == [1.0, 1.0]
    assert len({body["seed"] for body in sent}) == 2
    turns = session.client.turns
    assert [text_of(list(turn.completion_ids))[: len("It is 2.")] for turn in turns][1] == "It is 2."
    assert all(len(turn.logprobs) == len(turn.completion_ids) for turn in turns)


async def test_answers_keep_no_trace_fields_and_are_what_the_sdk_expects(
    opened: Any, closing: AsyncExitStack
) -> None:
    session, url, _ = await opened("fine")
    answer = await (await closing.enter_async_context(openai_client(session, url))).chat.completions.create(
        model="fake", messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "How?"}]
    )
    plain = answer.model_dump(exclude_none=True)
    ChatCompletion.model_validate(plain, strict=True)
    assert not {"token_ids", "weight_versions", "logprobs"} & plain["choices"][0].keys()
    assert "prompt_token_ids" not in plain


async def test_text_completions(opened: Any, closing: AsyncExitStack) -> None:
    session, url, _ = await opened("three")
    client = await closing.enter_async_context(openai_client(session, url))
    whole = await client.completions.create(model="fake", prompt="one two", max_tokens=8)
    pieces = [chunk async for chunk in await client.completions.create(model="fake", prompt="one two ", stream=True)]
    assert whole.choices[0].text == "".join(chunk.choices[0].text for chunk in pieces) == "three"
    assert pieces[-1].choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="give one text"):
        await client.completions.create(model="fake", prompt=["a", "b"])


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_continue_by_items_and_by_id(opened: Any, closing: AsyncExitStack, stream: bool) -> None:
    session, url, server = await opened([CALLS, "It is 2.", "Yes."])
    client = await closing.enter_async_context(openai_client(session, url))

    async def ask(**arguments: Any) -> Any:
        if not stream:
            return await client.responses.create(model="fake", **arguments)
        async with client.responses.stream(model="fake", **arguments) as events:
            async for _ in events:
                pass
            return await events.get_final_response()

    tools: Any = [{"type": "function", "strict": False, **TOOL}]
    first = await ask(input="1 + 1?", instructions="Add.", tools=tools)
    call = next(item for item in first.output if item.type == "function_call")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    second = await ask(
        input=[
            {"role": "user", "content": "1 + 1?"},
            *(item.model_dump(exclude_none=True) for item in first.output),
            output,
        ],
        instructions="Add.",
        tools=tools,
    )
    assert second.output_text == "It is 2."
    third = await ask(input="Sure?", previous_response_id=second.id)
    assert third.output_text == "Yes."
    assert third.usage.output_tokens > 0
    roles = [[message["role"] for message in request.body["messages"]] for request in server.requests]
    assert roles[1] == ["system", "user", "assistant", "tool"]
    # instructions are of one call
    assert roles[2] == [*roles[1][1:], "assistant", "user"]
    # the policy's own message again: its text and its calls in one, to the letter
    assert server.requests[1].body["messages"][2] == {"role": "assistant", **CALLS}


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages(opened: Any, closing: AsyncExitStack, stream: bool) -> None:
    session, url, server = await opened([CALLS, "It is 2."])
    client = await closing.enter_async_context(anthropic_client(session, url))

    async def ask(messages: list[Any]) -> Any:
        arguments: dict[str, Any] = {
            "model": "fake",
            "max_tokens": 64,
            "system": [{"type": "text", "text": "Add."}],
            "messages": messages,
            "tools": [{"name": "add", "description": "Add.", "input_schema": TOOL["parameters"]}],
        }
        if not stream:
            return await client.messages.create(**arguments)
        async with client.messages.stream(**arguments) as events:
            return await events.get_final_message()

    asked = {"role": "user", "content": "1 + 1?"}
    first = await ask([asked])
    assert first.stop_reason == "tool_use"
    assert first.content[1].input == {"a": 1}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "2"}]}
    said = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
    second = await ask([asked, said, {"role": "user", "content": [result]}])
    assert (second.content[0].text, second.stop_reason) == ("It is 2.", "end_turn")
    # the arguments as the policy wrote them, space for space, though Anthropic's format carries an object
    assert server.requests[1].body["messages"][2] == {"role": "assistant", **CALLS}
    assert server.requests[1].body["max_completion_tokens"] == 64


async def test_the_base_url_serves_anthropics_sdk_as_it_is(opened: Any, closing: AsyncExitStack) -> None:
    session, url, _ = await opened("hello")
    client = await closing.enter_async_context(
        anthropic.AsyncAnthropic(base_url=url, auth_token=session.key, api_key=None)
    )
    answer = await client.messages.create(model="fake", max_tokens=9, messages=[{"role": "user", "content": "hi"}])
    assert answer.content[0].type == "text"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"messages": [{"role": "user"}]}, "messages.0.user.content: Field required"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "messages.0"),
        ({"messages": [], "n": 2}, "n=2 is not supported here"),
        ({"messages": [], "audio": {"voice": "x"}}, "audio"),
        ({"messages": [], "model": "gpt-9"}, "there is no model 'gpt-9' here; ask for fake"),
    ],
)
async def test_what_cannot_be_had_is_refused_in_openais_shape(
    opened: Any, closing: AsyncExitStack, arguments: Any, text: str
) -> None:
    session, url, server = await opened()
    with pytest.raises(openai.APIStatusError) as caught:
        await (await closing.enter_async_context(openai_client(session, url))).post(
            "/chat/completions", body={"model": "fake", **arguments}, cast_to=ChatCompletion
        )
    assert text in caught.value.body["message"]  # type: ignore[index]
    assert not server.requests


async def test_what_cannot_be_had_is_refused_in_anthropics_shape(opened: Any, closing: AsyncExitStack) -> None:
    session, url, _ = await opened()
    client = await closing.enter_async_context(anthropic_client(session, url))
    given: Any = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    clearing = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    prefilled = [*given["messages"], {"role": "assistant", "content": "I"}]
    for more, text in (
        ({"extra_body": {"context_management": clearing}}, "the edit {'type': 'clear_tool_uses_20250919'}"),
        ({"messages": prefilled}, "the last message is the assistant's"),
    ):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(**{**given, **more})
        error = caught.value.body["error"]  # type: ignore[index]
        assert error["type"] == "invalid_request_error"
        assert text in error["message"]


async def test_what_claude_code_sends_is_taken_and_said_once_to_the_policy(
    opened: Any, closing: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    session, url, server = await opened("ok")
    client = await closing.enter_async_context(anthropic_client(session, url))
    note_left_out.cache_clear()
    header = "x-anthropic-billing-header: cc_version=2.1.100; cch={};"
    own: Any = {"name": "add", "input_schema": {"type": "object"}}
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    failed = {"type": "tool_result", "tool_use_id": "call_1", "content": "no such file", "is_error": True}
    call = {"type": "tool_use", "id": "call_1", "name": "add", "input": {}}
    for changing in ("aaaaa", "bbbbb"):
        given: Any = {
            "model": "fake",
            "max_tokens": 9,
            "system": [{"type": "text", "text": header.format(changing)}, {"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": "one"},
                {"role": "user", "content": "two"},
                {"role": "system", "content": "a reminder"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [failed]},
            ],
            "tools": [own, search],
            "extra_body": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        }
        await client.messages.create(**given)
        sent = server.requests[-1].body
        assert [(message["role"], message["content"]) for message in sent["messages"]] == [
            ("system", "Be brief.\n\na reminder"),
            ("user", "one\n\ntwo"),
            ("assistant", ""),
            ("tool", "Error: no such file"),
        ]
        assert [tool["function"]["name"] for tool in sent["tools"]] == ["add"]
    assert caplog.text.count("web_search_20250305' are left out") == 1
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.messages.create(**{**given, "extra_body": {"thread": {"type": "create"}}})
    assert caught.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}  # type: ignore[index]
    assert (await client.models.retrieve("fake")).id == "fake"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_codex_sends_is_taken_and_its_tools_answered_by_their_own_names(
    opened: Any, closing: AsyncExitStack, stream: bool
) -> None:
    made = [("n__add", '{"a": 1}'), ("patch", '{"input": "*** Begin"}'), ("n__edit", '{"input": "s/a/b/"}')]
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(made)
    ]
    session, url, server = await opened([{"content": "", "tool_calls": calls}, "done"], require_tokens=False)
    client = await closing.enter_async_context(openai_client(session, url))
    add = {"type": "function", **TOOL}
    tools: Any = [
        {**add, "name": "plain"},
        {"type": "namespace", "name": "n", "description": "d", "tools": [add, {"type": "custom", "name": "edit"}]},
        {"type": "custom", "name": "patch", "description": "Patch.", "format": {"type": "text"}},
        {"type": "web_search"},
        {"type": "local_shell"},
    ]
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}]},
    ]

    async def ask(given: list[Any]) -> Any:
        arguments: Any = {"model": "fake", "input": given, "tools": tools}
        arguments["extra_body"] = {"client_metadata": {"x-codex-turn-metadata": "{}"}}
        if not stream:
            return await client.responses.create(**arguments)
        async with client.responses.stream(**arguments) as events:
            async for _ in events:
                pass
            return await events.get_final_response()

    answer = await ask(items)
    sent = server.requests[-1].body
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["plain", "n__add", "n__edit", "patch"]
    assert sent["messages"][0] == {"role": "system", "content": "A\n\nB"}
    called = [item for item in answer.output if item.type != "message"]
    named = [("function_call", "add"), ("custom_tool_call", "patch"), ("custom_tool_call", "edit")]
    assert [(item.type, item.name) for item in called] == named
    assert (called[0].namespace, called[1].input) == ("n", "*** Begin")
    assert (called[2].namespace, called[2].input) == ("n", "s/a/b/")
    said = [item.model_dump(exclude_none=True) for item in answer.output]
    results = [
        {"type": "function_call_output", "call_id": "call_0", "output": "2"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "ok"},
    ]
    assert (await ask([*items, *said, *results])).output_text == "done"
    repeated = server.requests[-1].body["messages"][2]["tool_calls"]
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in repeated] == made


async def test_a_stream_is_kept_alive_and_ends_with_the_refusal_in_its_shape(
    opened: Any, closing: AsyncExitStack
) -> None:
    session, url, _ = await opened(latency_s=0.3, faults=[Fault(500)])
    http = await closing.enter_async_context(aiohttp.ClientSession())
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with http.post(
        f"{url}/chat/completions", json=body, headers={"Authorization": f"bearer {session.key}"}
    ) as response:
        lines = (await response.text()).split("\n\n")
    assert response.status == 200
    assert lines[0] == ": generating"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "upstream_error"
    client = await closing.enter_async_context(openai_client(session, url))
    with pytest.raises(openai.APIError, match="not supported"):
        async for _ in await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi again"}], stream=True, extra_body={"n": 3}
        ):
            pass


async def test_what_the_server_says_of_the_call_reaches_the_agent_with_its_status(
    opened: Any, closing: AsyncExitStack
) -> None:
    session, url, _ = await opened(faults=[Fault(422), Fault(429), Fault(503)])
    client = await closing.enter_async_context(openai_client(session, url))
    found = []
    for text in "abc":
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": text}])
        found.append(caught.value.status_code)
    assert found == [422, 429, 502]


async def test_bodies_that_are_no_call_are_refused_and_never_a_server_error(
    opened: Any, closing: AsyncExitStack
) -> None:
    session, url, server = await opened(sampling_args={"max_tokens": 8})
    http = await closing.enter_async_context(
        aiohttp.ClientSession(headers={"x-api-key": "other", "Authorization": f"Bearer {session.key}"})
    )
    deep: Any = {}
    for _ in range(600):
        deep = {"properties": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    bodies = {
        "chat/completions": [[], {"model": "fake", "messages": 5}, {"model": "fake", "messages": [3]}],
        "responses": [{"model": "fake", "input": 5}, {"model": "fake", "input": ["a"]}],
        "messages": [{"model": "fake", "max_tokens": "many", "messages": []}],
    }
    asked = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
    for value in ("x", [3], {"edits": 3}, {"edits": [None]}):
        bodies["messages"].append({**asked, "context_management": value})
    bodies["chat/completions"] += [{**asked, "chat_template_kwargs": value} for value in (True, "x", [3])]
    bodies["chat/completions"].append({"model": "fake", "messages": [], "tools": [tool], "stream": "yes"})
    for path, refused in bodies.items():
        for body in refused:
            async with http.post(f"{url}/{path}", json=body) as response:
                assert response.status == 400, (path, body, await response.text())
    assert not server.requests


async def test_messages_that_repeat_an_answer_with_what_clients_keep_of_it_are_taken(
    opened: Any, closing: AsyncExitStack
) -> None:
    session, url, server = await opened(["one", "two"])
    client = await closing.enter_async_context(openai_client(session, url))
    asked: Any = {"role": "user", "content": "?"}
    first = await client.chat.completions.create(model="fake", messages=[asked])
    again: Any = {**first.choices[0].message.model_dump(), "provider_specific_fields": {"refusal": None}}
    assert None in again.values()
    second = await client.chat.completions.create(model="fake", messages=[asked, again, asked])
    assert second.choices[0].message.content == "two"
    assert server.requests[1].body["messages"][1] == {"role": "assistant", "content": "one"}


async def test_models_are_listed_in_the_shape_of_the_sdk_that_asks(opened: Any, closing: AsyncExitStack) -> None:
    session, url, _ = await opened()
    openais = await (await closing.enter_async_context(openai_client(session, url))).models.list()
    anthropics = await (await closing.enter_async_context(anthropic_client(session, url))).models.list()
    assert [model.id for model in openais.data] == [model.id for model in anthropics.data] == ["fake"]
    assert (anthropics.data[0].type, anthropics.has_more) == ("model", False)
    other = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="sk-other")
    with pytest.raises(anthropic.AuthenticationError):
        await (await closing.enter_async_context(other)).models.list()


async def test_a_server_that_counts_no_tokens_is_named(opened: Any, closing: AsyncExitStack) -> None:
    for body in (None, {"count": "many"}, {"tokens": [1]}):
        session, url, _ = await opened(faults=None if body is None else Fault(200, body=body, times=9))
        client = await closing.enter_async_context(anthropic_client(session, url))
        with pytest.raises(anthropic.APIStatusError, match="does not count tokens") as caught:
            await client.messages.count_tokens(model="fake", messages=[{"role": "user", "content": "1 + 1?"}])
        assert caught.value.status_code == 501


IMAGE = "data:image/png;base64,iVBORw0KGgo="
IMAGE_OUTPUTS: dict[str, dict[str, Any]] = {
    "responses": {
        "input": [
            {"role": "user", "content": "Look."},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_text", "text": "here"},
                {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
            ]},
        ]
    },
    "messages": {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
                {"type": "text", "text": "here"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IMAGE[22:]}},
            ]}]},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", IMAGE_OUTPUTS)
@pytest.mark.parametrize("trains", [False, True])
async def test_images_of_tools_are_passed_on_in_evaluation_and_refused_in_training(
    opened: Any, closing: AsyncExitStack, path: str, trains: bool
) -> None:
    session, url, server = await opened(require_tokens=trains)
    http = await closing.enter_async_context(aiohttp.ClientSession(headers={"x-api-key": session.key}))
    async with http.post(f"{url}/{path}", json={"model": "fake", **IMAGE_OUTPUTS[path]}) as response:
        answer = await response.json()
    if trains:
        assert response.status == 400
        assert "more images than max_images=0" in answer["error"]["message"]
        # the agent's mistake, not every rollout's
        assert session.client.fatal_error is None
        assert not server.requests
    else:
        output = server.requests[0].body["messages"][-1]
        image = {"type": "image_url", "image_url": {"url": IMAGE}}
        assert output == {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "here"}, image]}


async def test_arguments_that_an_agent_writes_in_other_words_are_the_policys_again(
    opened: Any, closing: AsyncExitStack
) -> None:
    session, url, server = await opened([CALLS, "2", "2", "2"])
    client = await closing.enter_async_context(openai_client(session, url))
    asked: Any = {"role": "user", "content": "1 + 1?"}
    await client.chat.completions.create(model="fake", messages=[asked])
    result: Any = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
    output: Any = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
    for written in ('{"a":1}', '{"a": 2}'):
        function = {"name": "add", "arguments": written}
        made: Any = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
        await client.chat.completions.create(model="fake", messages=[asked, made, result])
        item: Any = {"type": "function_call", "call_id": "call_1", **function}
        await client.responses.create(model="fake", input=[asked, item, output])
    sent = [request.body["messages"][1]["tool_calls"][0]["function"] for request in server.requests[1:]]
    # other arguments are another call, which the agent made itself
    assert [made["arguments"] for made in sent] == ['{ "a":1}', '{ "a":1}', '{"a": 2}', '{"a": 2}']


ASKED: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "max_tokens": 9}
PATHS = {"messages": ASKED, "responses": {"model": "fake", "input": "?"}, "chat/completions": ASKED}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_what_a_provider_leaves_out_or_sends_as_no_json_reaches_the_agent_as_json(
    opened: Any, closing: AsyncExitStack, path: str, stream: bool
) -> None:
    made = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": NaN}'}}
    bare = {"index": 0, "message": {"role": "assistant", "content": "x", "tool_calls": [made]}}
    odd = {**bare, "finish_reason": float("nan"), "logprob": float("inf")}
    faults = [Fault(200, body={"id": "a", "created": float("nan"), "choices": [choice]}) for choice in (bare, odd)]
    session, url, _ = await opened(faults=faults, require_tokens=False)
    http = await closing.enter_async_context(
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"})
    )
    for _ in faults:
        async with http.post(f"{url}/{path}", json={**PATHS[path], "stream": stream}) as response:
            text = await response.text()
            assert response.status == 200, text
        events = text.split("\n") if stream else [f"data: {text}"]
        for line in events:
            if line.startswith("data: {"):
                json.loads(line.removeprefix("data: "), parse_constant=pytest.fail)


async def test_a_providers_refusal_is_one_in_each_dialect(opened: Any, closing: AsyncExitStack) -> None:
    refused = {
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": None, "refusal": "I may not."}}]
    }
    session, url, server = await opened(faults=[Fault(200, body=refused, times=3)], require_tokens=False)
    client = await closing.enter_async_context(anthropic_client(session, url))
    said = await client.messages.create(model="fake", max_tokens=9, messages=[{"role": "user", "content": "?"}])
    assert (said.stop_reason, said.content[0].text) == ("refusal", "I may not.")  # type: ignore[union-attr]
    openai_sdk = await closing.enter_async_context(openai_client(session, url))
    answer = await openai_sdk.responses.create(model="fake", input="?")
    (part,) = answer.output[0].content  # type: ignore[union-attr]
    assert (part.type, part.refusal) == ("refusal", "I may not.")  # type: ignore[union-attr]
    async with openai_sdk.responses.stream(model="fake", input="?") as events:
        kinds = [event.type async for event in events]
    assert "response.refusal.delta" in kinds
    before = [{"role": "user", "content": "?"}, answer.output[0].model_dump(exclude_none=True)]
    await openai_sdk.responses.create(model="fake", input=[*before, {"role": "user", "content": "Please."}])  # type: ignore[list-item]
    assert server.requests[-1].body["messages"][1]["content"] == "I may not."
