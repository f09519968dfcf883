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
    parameters_of,
    parse_gemma4,
    parse_glm,
    parse_glm4,
    parse_harmony,
    parse_hermes,
    parse_llama3_json,
    parse_mistral,
    parse_olmo3,
    parse_phi4_mini,
    parse_qwen3_coder,
)

# -- formats ----------------------------------------------------------------------------------------------------


def test_arguments_keep_the_bytes_that_the_model_wrote() -> None:
    answer = parse_hermes('x\n<tool_call>\n{"arguments":  {"a":1,  "b":"\\u00e9"}, "name":"f"}\n</tool_call>', {})
    assert answer.content == "x"
    assert answer.calls == (ToolCall("f", '{"a":1,  "b":"\\u00e9"}'),)


def test_the_key_arguments_inside_the_arguments_is_not_mistaken_for_them() -> None:
    text = '<tool_call>{"name": "f", "note": {"arguments": {"x": 1}}, "arguments": {"x":2}}</tool_call>'
    assert parse_hermes(text, {}).calls == (ToolCall("f", '{"x":2}'),)


def test_several_calls_keep_their_order() -> None:
    text = "".join(f'<tool_call>{{"name": "f{i}", "arguments": {{}}}}</tool_call>\n' for i in range(3))
    assert [call.name for call in parse_hermes(text, {}).calls] == ["f0", "f1", "f2"]


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
        answer = parse(text, {})
        assert (answer.content, answer.calls) == (text, ())


def test_a_call_whose_end_mark_was_the_stop_string_is_still_a_call() -> None:
    assert parse_hermes('<tool_call>{"name": "f", "arguments": {}}', {}).calls == (ToolCall("f", "{}"),)


SCHEMA = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "on": {"type": "boolean"},
    "rows": {"type": "array"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "null"]},
    "choice": {"enum": ["1", "2"]},
    "free": {},
}


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        *(("text", text, text) for text in ("42", "true", "null", '{"a": 1}', "[1, 2]", '"quoted"', "1e5", "plain")),
        ("text", "print(1)\nprint(2)", "print(1)\nprint(2)"),
        ("n", "3", 3),
        ("n", "three", "three"),
        ("on", "True", True),
        ("rows", '[{"a": 1}]', [{"a": 1}]),
        ("maybe", "null", None),
        ("maybe", "7", "7"),
        ("either", "null", None),
        ("either", "7", 7),
        ("choice", "1", "1"),
        ("free", "7", 7),
        ("unknown", "7", "7"),
    ],
)
def test_values_between_tags_convert_by_the_tools_schema(name: str, written: str, value: Any) -> None:
    coder = parse_qwen3_coder(
        f"go\n<tool_call>\n<function=run>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n</tool_call>",
        {"run": SCHEMA},
    )
    glm = parse_glm(
        f"go\n<tool_call>run\n<arg_key>{name}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>",
        {"run": SCHEMA},
    )
    for answer in (coder, glm):
        assert answer.content == "go"
        assert [call.name for call in answer.calls] == ["run"]
        assert json.loads(answer.calls[0].arguments) == {name: value}


def test_olmo_calls_are_lines_of_python_or_none() -> None:
    answer = parse_olmo3(
        'go\n<function_calls>\nf(a="x, (y)", b=[1, true, null], c={"k": -2.5})\ng.h()\n</function_calls>', {}
    )
    assert answer.content == "go"
    assert [call.name for call in answer.calls] == ["f", "g.h"]
    assert json.loads(answer.calls[0].arguments) == {"a": "x, (y)", "b": [1, True, None], "c": {"k": -2.5}}
    for text in ("f(1)", "f(**a)", "f(a=g())", "f(a=b)", "f", "f(a=1", "[" * 100_000):
        assert parse_olmo3(f"<function_calls>{text}</function_calls>", {}).calls == ()


def test_gemma_calls_have_keys_without_quotes_and_texts_between_marks() -> None:
    text = '<|tool_call>call:f{a:<|"|>x, b:"{y}"<|"|>,n:[1,{k:true}]}<tool_call|><|tool_call>call:g{}<tool_call|>'
    first, second = parse_gemma4(f"go{text}", {}).calls
    assert (first.name, json.loads(first.arguments)) == ("f", {"a": 'x, b:"{y}"', "n": [1, {"k": True}]})
    assert second == ToolCall("g", "{}")
    assert parse_gemma4('<|tool_call>call:f{a:<|"|>x}<tool_call|>', {}).calls == ()


def test_glm_4_calls_name_a_tool_of_the_request() -> None:
    text = 'f\n{"a":  1}<|assistant|>g\n{}'
    assert parse_glm4(text, {"f": {}, "g": {}}).calls == (ToolCall("f", '{"a":  1}'), ToolCall("g", "{}"))
    assert parse_glm4(text, {"h": {}}).calls == ()


def test_phi_calls_are_a_list_behind_either_mark() -> None:
    for mark in ("<|tool_call|>", "functools"):
        answer = parse_phi4_mini(f'go{mark}[{{"name": "f", "arguments": {{"a":1}}}}]<|/tool_call|>', {})
        assert (answer.content, answer.calls) == ("go", (ToolCall("f", '{"a":1}'),))
    assert parse_phi4_mini("functools are useful", {}).calls == ()


def test_harmony_tells_analysis_calls_and_what_is_said_apart() -> None:
    answer = parse_harmony(
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>let me see<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}<|call|>',
        {},
    )
    assert (answer.reasoning, answer.content, answer.calls) == ("hm", "let me see", (ToolCall("f", '{"a":1}'),))
    cut = parse_harmony("<|channel|>analysis<|message|>and so", {})
    assert (cut.reasoning, cut.content) == ("and so", "")
    # an address may stand before the channel
    to = parse_harmony(" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", {})
    assert to.calls == (ToolCall("f", "{}"),)


def test_llama_calls_are_the_whole_answer_or_none() -> None:
    two = parse_llama3_json(
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', {}
    )
    assert two.calls == (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"))
    assert parse_llama3_json('I call {"name": "f", "parameters": {}}', {}).calls == ()


def test_mistral_calls_are_a_list_behind_the_mark() -> None:
    text = 'well [TOOL_CALLS][{"name": "f", "arguments": {"a":1}}, {"name": "g", "arguments": {}}]'
    answer = parse_mistral(text, {})
    assert answer.content == "well "
    assert answer.calls == (ToolCall("f", '{"a":1}'), ToolCall("g", "{}"))


def test_mistral_calls_are_names_and_arguments_since_its_eleventh_tokenizer() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a":1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}'
    assert parse_mistral(text, {}).calls == (ToolCall("f", '{"a":1}'), ToolCall("g", "{}"))
    assert parse_mistral("[TOOL_CALLS]f[ARGS]{", {}).calls == ()


def test_the_format_is_read_off_the_template() -> None:
    assert format_of_template(PRINTS_TEXT) == "hermes"
    assert format_of_template("{{ tools }}<tool_call><function=x>") == "qwen3_coder"
    assert format_of_template("{{ tools }}[TOOL_CALLS]") == "mistral"
    assert format_of_template("{{ tools }}<tool_call><arg_key>") == "glm45"
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


async def test_tools_whose_calls_would_not_be_read_are_refused(start: Any) -> None:
    server = await start(template="{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    status, error = await server.refused(tools=[TOOL])
    assert (status, error["param"]) == (400, "tools")
    assert "--tool-call-parser none" in error["message"]
    assert (await server.chat(max_tokens=2))["object"] == "chat.completion"


async def test_a_wish_for_thinking_reaches_a_template_that_knows_it(start: Any) -> None:
    server = await start(template="{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort }}")
    answer = await server.chat(reasoning_effort="high", return_token_ids=True, max_tokens=2)
    assert server.loaded.tokenizer.decode(answer["prompt_token_ids"]).endswith("high")


async def test_a_developers_message_is_a_systems_where_the_template_knows_no_developer(start: Any) -> None:
    template = "{% for m in messages %}{% if m.role in ['system', 'user'] %}{{ m.content }}{% endif %}{% endfor %}"
    server = await start(template=template)
    messages = [{"role": "developer", "content": "say no"}, {"role": "user", "content": "hi"}]
    answer = await server.chat(messages=messages, return_token_ids=True, max_tokens=2)
    assert "say no" in server.loaded.tokenizer.decode(answer["prompt_token_ids"])


async def test_the_stop_string_that_ended_an_answer_is_named(start: Any) -> None:
    server = await start(template=PRINTS_TEXT)
    say(server, "one STOP two")
    for stop, found in ((["two", "STOP"], "STOP"), (["none"], None)):
        answer = await chat_with_tools(server, stop=stop)
        assert answer["choices"][0]["stop_reason"] == found


async def test_tools_that_the_model_would_not_see_are_refused(start: Any) -> None:
    server = await start()
    status, error = await server.refused(tools=[TOOL])
    assert (status, error["param"]) == (400, "tools")
    assert "chat template" in error["message"]


@pytest.mark.parametrize(
    "schema",
    [{"type": "integer", "enum": None, "anyOf": None}, {"type": ["integer", None], "oneOf": 5}, {"anyOf": [5]}],
)
def test_a_schema_with_nulls_and_what_is_none_is_read_as_far_as_it_goes(schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    text = "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
    (call,) = parse_qwen3_coder(text, parameters_of(tools)).calls
    assert json.loads(call.arguments) == {"a": 5}
    assert parameters_of([{"function": {"name": "f", "parameters": {"properties": [1]}}}]) == {"f": {}}
