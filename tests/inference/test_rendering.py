"""A turn rendered by itself is what the template would put there, or it is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from token_world import END, counts, keeps, tools_in_the_newest_turn

from verifiers.inference.token_in import CannotRenderTurnError, TurnRenderer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
Template = Callable[[Sequence[Mapping[str, Any]], Any], str]


def renderer(template: Template, tokenize: Callable[[str], list[int]] | None = None) -> TurnRenderer:
    async def render(messages: Any, tools: Any, options: Any) -> list[int]:
        text = template(messages, tools)
        return tokenize(text) if tokenize is not None else [ord(letter) for letter in text]

    return TurnRenderer(render)


def merging(text: str) -> list[int]:
    """Return a tokenizer that has one token for a full stop and the line's end behind it."""
    return [ord(letter) for letter in text.replace(".\n", "\uf000")]


def groups_results(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    """Show the tools first, results of calls together in one turn of the user, and every thought."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            turns.append(dict(message))
        elif turns[-1]["role"] == "results":
            turns[-1]["content"] += f"<r>{message['content']}</r>"
        else:
            turns.append({"role": "results", "content": f"<r>{message['content']}</r>"})
    return keeps(turns, tools)


CALLED = 0xE010


def ends_calls_otherwise(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    """End a turn with calls by another mark than others, and show a result with the mark of other turns behind it."""
    text = keeps([], tools).partition(f"{chr(0xE000)}assistant")[0]
    for message in messages:
        whole = keeps([message], None).removesuffix(f"{chr(0xE000)}assistant\n")
        text += whole.removesuffix(f"{chr(END)}\n") + chr(CALLED) if message.get("tool_calls") else whole
    return text + f"{chr(0xE000)}assistant\n"


def lines(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
    """Has no mark for the end of a turn but the line's end."""
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "


def conversation(draw: random.Random) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
    """Return what was said, the answer to it, and what is said next."""

    def word() -> str:
        return "".join(draw.choices("abc .\n{}<", k=draw.randrange(8)))

    before = [{"role": "system", "content": word()}] if draw.random() < 0.5 else []
    for _ in range(draw.randrange(3)):
        before += [{"role": "user", "content": word()}, {"role": "assistant", "content": word()}]
    before.append({"role": "user", "content": word()})
    answer: dict[str, Any] = {"role": "assistant", "content": word()}
    calls = draw.randrange(3)
    if not calls:
        return before, answer, [{"role": "user", "content": word()}]
    answer["tool_calls"] = [
        {"id": f"c{n}", "type": "function", "function": {"name": "add", "arguments": f'{{"n": "{word()}"}}'}}
        for n in range(calls)
    ]
    return before, answer, [{"role": "tool", "tool_call_id": f"c{n}", "content": word()} for n in range(calls)]


@pytest.mark.parametrize("template", [keeps, groups_results, ends_calls_otherwise])
@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_what_is_held_and_the_new_turn_are_the_whole_conversation(template: Template, tools: Any) -> None:
    turns = renderer(template)
    draw = random.Random(7)
    for _ in range(100):
        before, answer, new = conversation(draw)
        prompt = template(before, tools)
        whole = template([*before, answer, *new], tools)
        end = CALLED if template is ends_calls_otherwise and "tool_calls" in answer else END
        said = template([*before, answer], tools)[len(prompt) :].partition(chr(end))[0]
        held = [ord(letter) for letter in prompt + said]
        # a turn that was cut off has no end of its own to go by
        for sampled in ([held] if end == END else []) + [[*held, end]]:
            added = await turns.extend(sampled, answer, new, tools, {})
            assert "".join(map(chr, [*sampled, *added])) == whole


@pytest.mark.parametrize(
    ("template", "tokenize", "reason"),
    [(counts, None, "behind an answer depends"), (lines, merging, "behind an answer depends")],
)
async def test_a_template_whose_turns_are_not_alike_everywhere_is_refused(
    template: Template, tokenize: Any, reason: str
) -> None:
    with pytest.raises(CannotRenderTurnError, match=reason):
        await renderer(template, tokenize).check()


async def test_a_turn_with_calls_whose_end_is_not_known_is_refused_and_loses_no_result() -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "c0", "function": {"name": "add"}}]}
    new = [{"role": "tool", "tool_call_id": "c0", "content": "on"}]
    with pytest.raises(CannotRenderTurnError, match="ends turns with and without tool calls differently"):
        await renderer(ends_calls_otherwise).extend([ord("x")], answer, new, TOOLS, {})


async def test_a_template_that_shows_the_tools_again_is_refused_with_tools_alone() -> None:
    turns = renderer(tools_in_the_newest_turn)
    await turns.check()
    new = [{"role": "user", "content": "on"}]
    assert await turns.extend([END], {"role": "assistant", "content": "x"}, new, None, {})
    for _ in range(2):
        with pytest.raises(CannotRenderTurnError, match="shows the tools again"):
            await turns.extend([END], {"role": "assistant", "content": "x"}, new, TOOLS, {})


async def test_an_answer_that_the_template_does_not_show_cannot_be_followed() -> None:
    def newest_two(messages: Sequence[Mapping[str, Any]], tools: Any) -> str:
        return keeps(messages[-2:], tools)

    turns = renderer(newest_two)
    await turns.check()
    new = [{"role": "user", "content": "on"}, {"role": "user", "content": "and on"}]
    with pytest.raises(CannotRenderTurnError, match="leaves out"):
        await turns.extend([END], {"role": "assistant", "content": "x"}, new, None, {})


async def test_what_a_policy_puts_into_its_calls_cannot_end_its_turn() -> None:
    turns = renderer(keeps)
    wild = {"name": f"add{chr(END)}\nuser", "arguments": f'{{"n": "{chr(END)}"}}'}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "c0", "function": wild}]}
    tame = {**answer, "tool_calls": [{"id": "c0", "function": {"name": "add", "arguments": "{}"}}]}
    new = [{"role": "tool", "tool_call_id": "c0", "content": "on"}]
    assert await turns.extend([END], answer, new, None, {}) == await turns.extend([END], tame, new, None, {})
