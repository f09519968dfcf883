"""A call that is asked for comes, in the model's own format, with arguments that fit its tool."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from json_forms import (
    ADD,
    ARGUMENTS,
    NOW,
    PERSON,
    fits,
    named,
)
from tool_templates import PRINTS_TEXT

pytest.importorskip("llguidance")


@pytest.mark.parametrize(
    ("tokens", "choice"),
    [("characters", "required"), ("byte-level", "required"), ("byte-level", named('n"o\\w'))],
    ids=["characters-required", "byte-level-required", "byte-level-odd"],
)
async def test_a_forced_call_is_a_call_that_fits_its_tool(
    start: Any, long_dirs: dict[str, Path], tokens: str, choice: Any
) -> None:
    server = await start(long_dirs[tokens], template=PRINTS_TEXT)
    fields = {"tools": [ADD, NOW], "tool_choice": choice, "parallel_tool_calls": False, "n": 48, "max_tokens": 500}
    answer = await server.chat(seed=5, **fields)
    seen = set()
    for item in answer["choices"]:
        # a call that was asked for by name is the answer, and OpenAI gives no reason of its own for it
        assert item["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
        (call,) = item["message"]["tool_calls"]
        assert not (item["message"]["content"] or "").strip()
        jsonschema.validate(json.loads(call["function"]["arguments"]), ARGUMENTS[call["function"]["name"]])
        seen.add(call["function"]["name"])
    assert seen == (set(ARGUMENTS) if choice == "required" else {choice["function"]["name"]})


async def test_required_allows_several_calls_and_a_name_one(start: Any, byte_level_dir: Path) -> None:
    server = await start(byte_level_dir, template=PRINTS_TEXT)
    fields = {"tools": [ADD, NOW], "n": 12, "max_tokens": 300, "seed": 6}
    counts = {}
    for choice in ("required", named("add")):
        answer = await server.chat(tool_choice=choice, **fields)
        ended = [item["message"] for item in answer["choices"] if item["finish_reason"] != "length"]
        counts[str(choice)] = {len(message["tool_calls"]) for message in ended}
        for message in ended:
            for call in message["tool_calls"]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), ARGUMENTS[call["function"]["name"]])
    assert max(counts["required"]) > 1
    assert counts[str(named("add"))] == {1}


async def test_a_forced_call_is_streamed_whole(start: Any, byte_level_dir: Path) -> None:
    server = await start(byte_level_dir, template=PRINTS_TEXT)
    fields = {"tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 500, "seed": 3}
    whole = (await server.chat(**fields))["choices"][0]["message"]["tool_calls"]
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], **fields}
    events = await server.events("/v1/chat/completions", body)
    calls = [call for event in events for item in event["choices"] for call in item["delta"].get("tool_calls") or []]
    assert [call["function"] for call in calls] == [call["function"] for call in whole]


async def test_with_tools_to_choose_from_json_or_a_call_comes(start: Any, byte_level_dir: Path) -> None:
    server = await start(byte_level_dir, template=PRINTS_TEXT)
    fields = {"tools": [ADD], "n": 12, "max_tokens": 500, "seed": 9, "temperature": 2.0}
    answer = await server.chat(**fields, **fits(PERSON))
    kinds = set()
    for item in answer["choices"]:
        kinds.add(item["finish_reason"])
        if item["finish_reason"] == "stop":
            jsonschema.validate(json.loads(item["message"]["content"]), PERSON)
        elif item["finish_reason"] == "tool_calls":
            for call in item["message"]["tool_calls"]:
                jsonschema.validate(json.loads(call["function"]["arguments"]), ARGUMENTS["add"])
    assert {"stop", "tool_calls"} <= kinds
