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
    parameters_of,
    parse_glm,
    parse_harmony,
    parse_qwen3_coder,
)

# -- formats ----------------------------------------------------------------------------------------------------


CALLS: list[tuple[str, str, str, dict[str, str]]] = [
    # the bytes of the arguments are the model's
    (
        "hermes",
        'x\n<tool_call>\n{"arguments":  {"a":1,  "b":"\\u00e9"}, "name":"f"}\n</tool_call>',
        "x",
        {"f": '{"a":1,  "b":"\\u00e9"}'},
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "note": {"arguments": {"x": 1}}, "arguments": {"x":2}}</tool_call>',
        "",
        {"f": '{"x":2}'},
    ),
    # the end mark of the last one was the stop string
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}',
        "",
        {"f": "{}", "g": "{}"},
    ),
    (
        "olmo3",
        'go\n<function_calls>\nf(a="x, (y)", b=[1, true, null], c={"k": -2.5})\ng.h()\n</function_calls>',
        "go",
        {"f": '{"a": "x, (y)", "b": [1, true, null], "c": {"k": -2.5}}', "g.h": "{}"},
    ),
    (
        "gemma4",
        'go<|tool_call>call:f{a:<|"|>x, b:"y"<|"|>,n:[1,{k:true}]}<tool_call|><|tool_call>call:g{}<tool_call|>',
        "go",
        {"f": '{"a": "x, b:\\"y\\"", "n": [1, {"k": true}]}', "g": "{}"},
    ),
    ("glm4", 'f\n{"a":  1}<|assistant|>g\n{}', "", {"f": '{"a":  1}', "g": "{}"}),
    ("phi4_mini_json", 'go<|tool_call|>[{"name": "f", "arguments": {"a":1}}]<|/tool_call|>', "go", {"f": '{"a":1}'}),
    ("phi4_mini_json", 'gofunctools[{"name": "f", "arguments": {"a":1}}]', "go", {"f": '{"a":1}'}),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "",
        {"f": '{"a": 1}', "g": "{}"},
    ),
    (
        "mistral",
        'well [TOOL_CALLS][{"name": "f", "arguments": {"a":1}}, {"name": "g", "arguments": {}}]',
        "well ",
        {"f": '{"a":1}', "g": "{}"},
    ),
    # since its eleventh tokenizer
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a":1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}', "", {"f": '{"a":1}', "g": "{}"}),
]


@pytest.mark.parametrize(("format_", "text", "content", "calls"), CALLS)
def test_calls_are_read_as_each_format_writes_them(
    format_: str, text: str, content: str, calls: dict[str, str]
) -> None:
    answer = FORMATS[format_](text, {"f": {}, "g": {}})
    assert (answer.content, [(call.name, call.arguments) for call in answer.calls]) == (content, [*calls.items()])


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
        "<function_calls>f(1)</function_calls>",
        "<function_calls>f(**a)</function_calls>",
        "<function_calls>f(a=g())</function_calls>",
        "<function_calls>f(a=b)</function_calls>",
        "<function_calls>f</function_calls>",
        "<function_calls>f(a=1</function_calls>",
        "<function_calls>" + "[" * 100_000 + "</function_calls>",
        '<|tool_call>call:f{a:<|"|>x}<tool_call|>',
        'h\n{"a": 1}',
        "functools are useful",
        'I call {"name": "f", "parameters": {}}',
        "[TOOL_CALLS]f[ARGS]{",
        "",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for parse in FORMATS.values():
        answer = parse(text, {})
        assert (answer.content, answer.calls) == (text, ())


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


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "chat template does not mention tools"),
        ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "--tool-call-parser none"),
    ],
)
async def test_tools_that_would_not_be_seen_or_whose_calls_would_not_be_read_are_refused(
    start: Any, template: str | None, words: str
) -> None:
    server = await start(template=template)
    status, error = await server.refused(tools=[TOOL])
    assert (status, error["param"], words in error["message"]) == (400, "tools", True)
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
