"""Tools: shown to the model by its chat template, and its calls read from its text without changing a byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_templates import PRINTS_TEXT, TOOL, WANTS_OBJECTS
from verifiers_embedded.errors import StartError
from verifiers_embedded.text.prompts import ChatText
from verifiers_embedded.text.tool_calls import (
    FORMATS,
    ToolCall,
    call_id,
    format_of_template,
    parse_hermes,
    parse_llama3_json,
    parse_mistral,
    parse_qwen3_coder,
)

# -- formats ----------------------------------------------------------------------------------------------------


def test_arguments_keep_the_bytes_that_the_model_wrote() -> None:
    answer = parse_hermes('x\n<tool_call>\n{"arguments":  {"a":1,  "b":"\\u00e9"}, "name":"f"}\n</tool_call>')
    assert answer.content == "x"
    assert answer.calls == (ToolCall("f", '{"a":1,  "b":"\\u00e9"}'),)


def test_the_key_arguments_inside_the_arguments_is_not_mistaken_for_them() -> None:
    text = '<tool_call>{"name": "f", "note": {"arguments": {"x": 1}}, "arguments": {"x":2}}</tool_call>'
    assert parse_hermes(text).calls == (ToolCall("f", '{"x":2}'),)


def test_several_calls_keep_their_order() -> None:
    text = "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>\n' for i in range(3))
    assert [call.name for call in parse_hermes(text).calls] == ["f0", "f1", "f2"]


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}} and on without an end',
        "",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for parse in FORMATS.values():
        answer = parse(text)
        assert (answer.content, answer.calls) == (text, ())


def test_a_call_whose_end_mark_was_the_stop_string_is_still_a_call() -> None:
    assert parse_hermes('<tool_call>{"name": "f", "arguments": {}}').calls == (ToolCall("f", "{}"),)


def test_qwen3_coder_values_are_json_where_they_can_be() -> None:
    answer = parse_qwen3_coder(
        "go\n<tool_call>\n<function=run>\n<parameter=code>\nprint(1)\nprint(2)\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    assert answer.content == "go"
    assert [call.name for call in answer.calls] == ["run"]
    assert json.loads(answer.calls[0].arguments) == {"code": "print(1)\nprint(2)", "n": 3}


def test_llama_calls_are_the_whole_answer_or_none() -> None:
    two = parse_llama3_json('<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}')
    assert two.calls == (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"))
    assert parse_llama3_json('I call {"name": "f", "parameters": {}}').calls == ()


def test_mistral_calls_are_a_list_behind_the_mark() -> None:
    answer = parse_mistral('well [TOOL_CALLS][{"name": "f", "arguments": {"a":1}}, {"name": "g", "arguments": {}}]')
    assert answer.content == "well "
    assert answer.calls == (ToolCall("f", '{"a":1}'), ToolCall("g", "{}"))


def test_the_format_is_read_off_the_template() -> None:
    assert format_of_template(PRINTS_TEXT) == "hermes"
    assert format_of_template("{{ tools }}<tool_call><function=x>") == "qwen3_coder"
    assert format_of_template("{{ tools }}[TOOL_CALLS]") == "mistral"
    assert format_of_template('{{ tools }}{"name": n, "parameters": p}') == "llama3_json"
    assert format_of_template("{{ messages }}") is None


def test_names_of_calls_are_reproducible_and_differ_between_turns_and_places() -> None:
    names = {call_id(prompt, [5, 6], place) for prompt in ([1], [1, 5, 6, 2]) for place in range(3)}
    assert len(names) == 6
    assert call_id([1], [5, 6], 0) in names
    assert all(len(name) == 9 and name.isalnum() for name in names)


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(StartError, match=r"'hermos'.*hermes"):
        ChatText(None, "hermos")


# -- over HTTP --------------------------------------------------------------------------------------------------


def say(server: Any, text: str) -> None:
    """Make the served tokenizer read every completion as `text`: a random model calls no tools by itself."""
    server.text.decode = lambda ids: text


async def chat_with_tools(server: Any, **fields: Any) -> dict[str, Any]:
    return await server.chat(**{"tools": [TOOL], "max_tokens": 4, **fields})


async def test_calls_stand_apart_from_the_content_and_end_the_turn(start: Any) -> None:
    server = await start(template=PRINTS_TEXT)
    say(server, 'hm\n<tool_call>{"name": "add", "arguments": {"a":1}}</tool_call>')
    answer = await chat_with_tools(server, ignore_eos=False, stop=["q"], max_tokens=200, return_token_ids=True)
    message = answer["choices"][0]["message"]
    assert message["content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert message["tool_calls"][0]["type"] == "function"
    again = await chat_with_tools(server, stop=["q"], max_tokens=200)
    assert again["choices"][0]["finish_reason"] in ("tool_calls", "length")


async def test_without_tools_in_the_request_text_stays_text(start: Any) -> None:
    server = await start(template=PRINTS_TEXT)
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    say(server, text)
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        message = (await chat_with_tools(server, **fields))["choices"][0]["message"]
        assert message == {"role": "assistant", "content": text}


async def test_parallel_calls_can_be_switched_off(start: Any) -> None:
    server = await start(template=PRINTS_TEXT)
    say(server, '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2)
    for parallel, count in ((True, 2), (False, 1)):
        message = (await chat_with_tools(server, parallel_tool_calls=parallel))["choices"][0]["message"]
        assert len(message["tool_calls"]) == count


async def test_a_cut_off_answer_is_truncated_even_with_a_call_in_it(start: Any) -> None:
    server = await start(template=PRINTS_TEXT)
    say(server, '<tool_call>{"name": "add", "arguments": {}}</tool_call>')
    answer = await chat_with_tools(server, ignore_eos=True, max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("template", [PRINTS_TEXT, WANTS_OBJECTS])
async def test_a_conversation_with_calls_is_rendered_by_the_template(start: Any, template: str) -> None:
    server = await start(template=template)
    arguments = '{"a":   1}' if template is PRINTS_TEXT else '{"a": 1}'
    messages = [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "abc", "type": "function", "function": {"name": "add", "arguments": '{"a":   1}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "abc"},
    ]
    answer = await chat_with_tools(server, messages=messages, return_token_ids=True)
    rendered = server.loaded.tokenizer.decode(answer["prompt_token_ids"])
    tools = f"<tools>{json.dumps(TOOL)}</tools>"
    call = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert rendered == f"{tools}<user>u<bot>{call}<eos><user>2<bot>"


async def test_tools_that_the_model_would_not_see_are_refused(start: Any) -> None:
    server = await start()
    status, error = await server.refused(tools=[TOOL])
    assert (status, error["param"]) == (400, "tools")
    assert "chat template" in error["message"]
