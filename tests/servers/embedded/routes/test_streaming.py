"""A stream adds up to the answer that would have come whole, and gives its slot back when nobody reads it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from step_gate import StepGate
from tool_templates import PRINTS_TEXT, TOOL
from verifiers_embedded.engine import batch as batch_module
from verifiers_embedded.engine.sampling import Draw
from verifiers_embedded.engine.stopping import GrowingText, SendableText
from yarl import URL


def chat_body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 40,
        "seed": 3,
        "logprobs": True,
        "return_token_ids": True,
        **fields,
    }


def choice_of(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """Return the choice that a client puts together from its events."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "token_ids": [], "log_probs": [], "calls": []}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice.get("delta") or {"content": choice.get("text")}
            whole["content"] += delta.get("content") or ""
            whole["reasoning_content"] += delta.get("reasoning_content") or ""
            whole["calls"] += delta.get("tool_calls") or []
            whole["token_ids"] += choice.get("token_ids") or []
            if choice["logprobs"]:
                entries = choice["logprobs"].get("content")
                whole["log_probs"] += (
                    [entry["logprob"] for entry in entries] if entries else choice["logprobs"]["token_logprobs"]
                )
            whole["finish_reason"] = choice["finish_reason"] or whole.get("finish_reason")
            whole["weight_versions"], whole["stop_reason"] = choice.get("weight_versions"), choice.get("stop_reason")
    return whole


@pytest.mark.parametrize(
    "fields", [{}, {"stop": "STOP", "ignore_eos": True}, {"n": 3, "temperature": 0.8}, {"ignore_eos": True}]
)
async def test_the_events_of_a_chat_add_up_to_the_whole_answer(start: Any, fields: dict[str, Any]) -> None:
    server = await start()
    body = chat_body(**fields)
    if fields.get("stop"):
        free = await server.chat(**{**body, "stop": None})
        body["stop"] = free["choices"][0]["message"]["content"][5:9]
    whole = await server.chat(**body)
    events = await server.events("/v1/chat/completions", body)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    for expected in whole["choices"]:
        choice = choice_of(events, expected["index"])
        assert choice["content"] == expected["message"]["content"]
        assert choice["token_ids"] == expected["token_ids"]
        assert choice["log_probs"] == pytest.approx([e["logprob"] for e in expected["logprobs"]["content"]], abs=1e-4)
        assert choice["finish_reason"] == expected["finish_reason"]
        assert choice["weight_versions"] == expected["weight_versions"]


async def test_text_comes_while_it_is_made(start: Any) -> None:
    server = await start()
    events = await server.events("/v1/chat/completions", chat_body(ignore_eos=True, max_tokens=100))
    assert sum(bool(event["choices"][0]["delta"].get("content")) for event in events) > 5


async def test_usage_comes_last_and_only_where_asked_for(start: Any) -> None:
    server = await start()
    body = chat_body(n=2)
    whole = await server.chat(**body)
    events = await server.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert (events[-1]["choices"], events[-1]["usage"]) == ([], whole["usage"])
    assert all("usage" not in event for event in await server.events("/v1/chat/completions", body))


async def test_the_events_of_a_completion_add_up(start: Any) -> None:
    server = await start()
    body = {"model": "m", "prompt": ["ab", "cd"], "n": 2, "seed": 1, "logprobs": 2, "echo": False, "max_tokens": 20}
    _, free = await server.post("/v1/completions", body)
    body["stop"] = free["choices"][0]["text"][5:8]
    _, whole = await server.post("/v1/completions", body)
    events = await server.events("/v1/completions", body)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    for expected in whole["choices"]:
        choice = choice_of(events, expected["index"])
        assert choice["content"] == expected["text"]
        assert choice["stop_reason"] == expected["stop_reason"]
        assert choice["log_probs"] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-4)
        offsets = [o for e in events for c in e["choices"] if c["index"] == expected["index"] and c["logprobs"]
                   for o in c["logprobs"]["text_offset"]]  # fmt: skip
        assert offsets == expected["logprobs"]["text_offset"]


async def test_the_events_of_token_generation_add_up(start: Any) -> None:
    server = await start()
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9, "seed": 2, "logprobs": 0}}
    _, whole = await server.post("/inference/v1/generate", body)
    events = await server.events("/inference/v1/generate", body)
    choice = choice_of(events, 0)
    assert choice["token_ids"] == whole["choices"][0]["token_ids"]
    assert choice["weight_versions"] == whole["choices"][0]["weight_versions"]


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ('hm\n<tool_call>{"name": "add", "arguments": {"a":1}}</tool_call>', "hm", "", ["add"]),
        ('hm\n<tool_call>{"name": "add", "', 'hm\n<tool_call>{"name": "add", "', "", []),
        ("a <tool_cal b", "a <tool_cal b", "", []),
        ("<think>so</think>yes", "yes", "so", []),
        (" \n<think>so", "", "so", []),
        ("no <think>so</think>", "no <think>so</think>", "", []),
        ('<think>so</think><tool_call>{"name": "add", "arguments": {}}</tool_call>', "", "so", ["add"]),
    ],
)  # fmt: skip
async def test_calls_and_reasoning_stand_apart_in_a_stream_as_in_the_whole(
    start: Any, monkeypatch: pytest.MonkeyPatch, text: str, content: str, reasoning: str, calls: list[str]
) -> None:
    server = await start(template=PRINTS_TEXT)
    server.text.splits_reasoning = True
    words = [text[place : place + 3] for place in range(0, len(text), 3)]
    first_token = 10
    server.text.decode = lambda ids: "".join(
        words[token - first_token] if first_token <= token < first_token + len(words) else "" for token in ids
    )
    spoken = list(range(first_token, first_token + len(words)))

    positions = iter([*spoken, server.loaded.tokenizer.eos_token_id] * 2)
    # draws the ids of the text, whatever the model says
    draw = lambda self, logits, noise: Draw([next(positions)], [-0.5], [[]], [[]])  # noqa: E731
    monkeypatch.setattr(batch_module.BatchSampler, "sample", draw)
    body = chat_body(tools=[TOOL], max_tokens=100)
    message = (await server.chat(**body))["choices"][0]["message"]
    choice = choice_of(await server.events("/v1/chat/completions", body), 0)
    assert (message["content"] or "") == content
    assert (message.get("reasoning_content") or "") == reasoning
    assert [call["function"]["name"] for call in message.get("tool_calls") or []] == calls
    assert choice["content"] == content
    assert choice["reasoning_content"] == reasoning
    assert [call["function"]["name"] for call in choice["calls"]] == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


async def test_clients_that_hang_up_in_mid_stream_free_their_slots_with_the_next_step(start: Any) -> None:
    server = await start(slots=256)

    async def hang_up() -> None:
        body = chat_body(ignore_eos=True, max_tokens=240, stream=True)
        async with server.session.post(server.base + "/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0].get("token_ids"):
                    break
            response.close()

    await server.post("/pause?mode=keep")
    async with asyncio.TaskGroup() as clients:
        for _ in range(200):
            clients.create_task(hang_up())
        await server.until(lambda: server.engine.counts["waiting"] == 200)
        sequences = list(server.engine._waiting)
        StepGate(server.engine, tokens=1, until=lambda: all(row.future.cancelled() for row in sequences))
        await server.post("/resume")
    await server.until(lambda: server.engine.counts == {"running": 0, "waiting": 0})
    # far from the 240 with which they would have ended by themselves
    assert {len(row.log_probs) for row in sequences} <= {1, 2}
    assert (await server.chat(max_tokens=2))["usage"]["completion_tokens"] > 0


async def test_a_client_that_hangs_up_before_its_stream_begins_is_no_failure(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start()
    address = URL(server.base)
    body = json.dumps(chat_body(stream=True))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.authority}\r\nContent-Length: {len(body)}\r\n"
    _, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(f"{head}\r\n{body}".encode())
    writer.close()
    await writer.wait_closed()
    assert (await server.chat(max_tokens=2))["usage"]["completion_tokens"] > 0
    await server.until(lambda: server.engine.counts == {"running": 0, "waiting": 0})
    assert not caplog.records


async def test_a_failure_in_mid_stream_is_an_event(start: Any) -> None:
    server = await start()
    await server.post("/pause?mode=keep")
    body = chat_body(stream=True)
    async with server.session.post(server.base + "/v1/chat/completions", json=body) as response:
        await server.until(lambda: server.engine.counts["waiting"] == 1)
        await asyncio.to_thread(server.engine.stop)
        events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
    assert "shutting down" in events[-1]["error"]["message"]


# -- text that is safe to send ----------------------------------------------------------------------------------


def decode_utf8(ids: Any) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def test_half_characters_are_waited_for() -> None:
    growing, said = GrowingText(decode_utf8), ""
    for token in "aé🙂b".encode():
        certain, perhaps = growing.push(token)
        assert "\ufffd" not in certain + perhaps
        said += certain
    assert said == "aé🙂b"


@pytest.mark.parametrize("text", ["abcSTOPdef", "abSTOSTOP", "abSTO", "", "STOP", "🙂STOP🙂"])
def test_nothing_is_sent_that_a_stop_string_takes_back(text: str) -> None:
    sendable = SendableText(decode_utf8, ["STOP"])
    for token in text.encode():
        sendable.push(token)
        assert text.partition("STOP")[0].startswith(sendable.text)
    if "STOP" in text:
        assert sendable.text == text.partition("STOP")[0]
