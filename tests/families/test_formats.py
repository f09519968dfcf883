"""Dialogues in every family's format go by token ids without a fork, calls and their results included."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from checks import TOOLS, check_reasoning, check_tools
from families import FAMILIES, Family
from verifiers_embedded.text.prompts import ChatText

from verifiers.inference.token_in import TurnRenderer

ONE_OF_EACH = [
    next(family for family in FAMILIES if family.format is format_)
    for format_ in {id(each.format): each.format for each in FAMILIES}.values()
]
DIALOGUES = 200


def said(draw: random.Random) -> str:
    return "".join(draw.choices("abc .\n{}<", k=1 + draw.randrange(8)))


def answer_of(family: Family, text: ChatText, draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return what a policy samples, and the message that is read from it."""
    format_ = family.format
    if draw.random() < 0.5:
        # the call alone: thoughts of earlier turns are what templates leave out
        call = format_.call.partition("<|start|>assistant")[2] or format_.call
        sampled = call + (format_.call_ends or format_.special[0])
        arguments = json.dumps({"city": "Paris", "days": 2})
        made = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        return sampled, {"role": "assistant", "content": "", "tool_calls": [made]}
    plain = said(draw)
    mark = "<|channel|>final<|message|>" if format_.tool_format == "openai" else ""
    return mark + plain + format_.special[0], {"role": "assistant", "content": plain}


@pytest.mark.parametrize("family", ONE_OF_EACH, ids=lambda family: family.format.tool_format + " of " + family.name)
async def test_no_dialogue_forks_by_token_ids(family: Family) -> None:
    tokenizer = family.tokenizer()
    text = ChatText(tokenizer)

    async def render(messages: Sequence[Mapping[str, Any]], tools: Any, options: Mapping[str, Any]) -> list[int]:
        return text.render([dict(message) for message in messages], dict(options), tools)

    renderer = TurnRenderer(render)
    draw = random.Random(3)
    for _ in range(DIALOGUES):
        messages: list[dict[str, Any]] = [{"role": "user", "content": said(draw)}]
        ids = text.render(messages, {}, TOOLS)
        for _ in range(3):
            sampled, answer = answer_of(family, text, draw)
            if "tool_calls" in answer:
                new = [{"role": "tool", "tool_call_id": "abcdefghi", "content": said(draw)}]
            else:
                new = [{"role": "user", "content": said(draw)}]
            ids = ids + tokenizer.encode(sampled, add_special_tokens=False)
            ids = ids + await renderer.extend(ids, answer, new, TOOLS, {})
            messages += [answer, *new]
        # gpt-oss ends what it says to a user by a token that its template does not print
        unprinted = tokenizer.convert_tokens_to_ids("<|return|>") if "<|return|>" in family.format.special else None
        printed = [token for token in ids if token != unprinted]
        assert tokenizer.decode(printed) == tokenizer.decode(text.render(messages, {}, TOOLS))


@pytest.mark.parametrize("family", [one for one in ONE_OF_EACH if one.calls_are_read], ids=lambda one: one.name)
def test_calls_and_reasoning_are_read(family: Family, tmp_path: Path) -> None:
    check_tools(family, tmp_path)
    check_reasoning(family, tmp_path)
