"""Token ids of the token route are read back as the message that the chat route would have answered."""

from __future__ import annotations

from typing import Any

import pytest
from tool_templates import PRINTS_TEXT, TOOL

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("said", "fields", "message"),
    [
        ("plain words", {}, {"content": "plain words"}),
        ("so far. And on", {"stop": ["."]}, {"content": "so far"}),
        ("<think>hm</think>yes", {}, {"content": "yes", "reasoning_content": "hm"}),
    ],
)
async def test_a_message_is_read_from_ids(
    start: Any, said: str, fields: dict[str, Any], message: dict[str, Any]
) -> None:
    server = await start()
    server.text.splits_reasoning = True
    ids = server.loaded.tokenizer.encode(said)
    answer = await derendered(server, ids, {"messages": [{"role": "user", "content": "x"}], **fields})
    assert answer["choices"][0]["message"] == {"role": "assistant", **message}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": len(ids), "total_tokens": len(ids) + 2}


async def test_calls_are_read_and_named_as_the_chat_route_names_them(start: Any) -> None:
    server = await start(template=PRINTS_TEXT)
    chat = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
    answer = await derendered(server, server.loaded.tokenizer.encode(CALL), chat)
    call = answer["choices"][0]["message"]["tool_calls"][0]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_what_generate_answers_derenders_to_what_chat_answers(start: Any) -> None:
    server = await start()
    chat = {"messages": [{"role": "user", "content": "say"}], "max_tokens": 12, "seed": 3, "model": "m"}
    _, said = await server.post("/v1/chat/completions", {**chat, "return_token_ids": True})
    prompt_ids = said["prompt_token_ids"]
    body = {"token_ids": prompt_ids, "sampling_params": {"max_tokens": 12, "seed": 3}}
    _, generated = await server.post("/inference/v1/generate", body)
    answer = await derendered(server, None, chat, generated=generated, prompt_ids=prompt_ids)
    assert generated["choices"][0]["token_ids"] == said["choices"][0]["token_ids"]
    assert answer["choices"][0]["message"] == said["choices"][0]["message"]
    assert answer["usage"] == said["usage"]


async def derendered(
    server: Any, ids: list[int] | None, chat: dict[str, Any], *, generated: Any = None, prompt_ids: Any = (5, 6)
) -> dict[str, Any]:
    response = generated or {"choices": [{"index": 0, "token_ids": ids, "finish_reason": "stop"}]}
    body = {"generate_response": response, "chat_request": chat, "prompt_token_ids": list(prompt_ids)}
    status, answer = await server.post("/v1/chat/completions/derender", body)
    assert status == 200, answer
    return answer
