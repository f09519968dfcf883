"""Tokens that plain decoding changes: marks of calls that are special, bytes beside bytes, words with their space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from verifiers_embedded.engine.generation import Generation
from verifiers_embedded.engine.stopping import GrowingText, StopMatcher
from verifiers_embedded.routes.answers import text_logprobs
from verifiers_embedded.routes.events import ChatWriter
from verifiers_embedded.routes.requests import ChatRequest
from verifiers_embedded.text.prompts import ChatText
from verifiers_embedded.text.tool_calls import ToolCall, parameters_of

TAGS = ("<tool_call>", "</tool_call>")
TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


def tokenizer_of(pieces: Sequence[str], special: Sequence[str] = (), template: str = "") -> Any:
    """Return a tokenizer with byte fallback, as Llama 2, Mistral and Gemma have it."""
    names = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    space = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("</s>", *special)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    "pieces",
    [
        ["o", "k", "<0xC3>", "<0xA9>", "<0xFF>", "\u2581then", "n"],
        ["o", "<0x45>", "<0x4E>", "<0x44>", "<0xFF>", "X"],
        ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "o"],
        ["o", "</s>", "\u2581then", "</s>", "</s>", "\u2581then"],
        ["\u2581", "</s>", "\u2581then", "\u2581", "<unk>", "\u2581then"],
    ],
)
def test_a_text_grows_to_the_whole_one_where_bytes_are_no_character_and_tokens_no_text(pieces: list[str]) -> None:
    text = ChatText(tokenizer_of(["\u2581then", "\u2581", *"oknX"]))
    ids = text._tokenizer.convert_tokens_to_ids(pieces)
    growing = GrowingText(text.decode, text.is_byte)
    assert "".join(growing.push(token)[0] for token in ids) == text.decode(ids)


def test_a_long_run_of_spaces_is_decoded_a_few_tokens_at_a_time() -> None:
    text = ChatText(tokenizer_of(["\u2581then", "\u2581"]))
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return text.decode(ids)

    ids = text._tokenizer.convert_tokens_to_ids(["\u2581then", *["\u2581"] * 50, "\u2581then"])
    for starts in (0, 1):
        growing = GrowingText(decode)
        assert "".join(growing.push(token)[0] for token in ids[starts:]) == text.decode(ids[starts:])
    assert max(lengths) <= 4


def test_a_stop_string_is_found_in_bytes_as_they_come() -> None:
    text = ChatText(tokenizer_of([*"oknX"]))
    matcher = StopMatcher(text.decode, ["END"], text.is_byte)
    ids = text._tokenizer.convert_tokens_to_ids(["o", "<0x45>", "<0x4E>", "<0x44>"])
    assert [matcher.push(token) for token in ids] == [False, False, False, True]


def test_words_keep_their_space_and_offsets_point_at_them() -> None:
    text = ChatText(tokenizer_of(["\u2581it", "\u2581is", "\u2581true", "true"]))
    ids = text._tokenizer.convert_tokens_to_ids(["\u2581it", "\u2581is", "\u2581true"])
    others = [(token, -1.0) for token in text._tokenizer.convert_tokens_to_ids(["\u2581true", "true"])]
    told = text_logprobs(text, ids, [-0.5] * 3, [others] * 3)
    assert (told["tokens"], told["text_offset"]) == ([" it", " is", " true"], [0, 2, 5])
    assert told["top_logprobs"][0] == {" true": -1.0, "true": -1.0, " it": -0.5}
    assert b"".join(bytes(text.token(token)[1]) for token in ids).decode().strip() == text.decode(ids)


@pytest.mark.parametrize(
    ("template", "special", "said"),
    [
        ("{{ tools }}<tool_call>", TAGS, '<tool_call>{"name": "f", "arguments": {"a":1}}</tool_call>'),
        ('{{ tools }}"parameters"', ("<|eom_id|>",), '{"name": "f", "parameters": {"a":1}}<|eom_id|>'),
        (
            '{{ tools }}"parameters"',
            ("<|eom_id|>", "<|python_tag|>"),
            '<|python_tag|>{"name": "f", "parameters": {"a":1}}<|eom_id|>',
        ),
        ("{{ tools }}[TOOL_CALLS]", ("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]f[ARGS]{"a":1}</s>'),
        (
            "{{ tools }}<tool_call><arg_key>",
            (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call></s>",
        ),
    ],
    ids=["hermes", "llama", "llama-python", "mistral", "glm"],
)
def test_calls_are_read_where_their_marks_and_ends_are_special_tokens(
    template: str, special: tuple[str, ...], said: str
) -> None:
    letters = sorted(set(said) | {"\u2581"})
    text = ChatText(tokenizer_of(letters, special, template))
    ids = text._tokenizer.encode(said, add_special_tokens=False)
    answer = text.divide(text.decode_with_marks(ids), text.decode(ids), TOOLS)
    assert [ToolCall(call.name, call.arguments.replace(" ", "")) for call in answer.calls] == [
        ToolCall("f", '{"a":1}')
    ]


def test_a_stream_leaves_out_a_special_mark_without_a_call_as_the_whole_answer_does() -> None:
    said = "so</tool_call>then"
    text = ChatText(tokenizer_of(sorted({*said, "\u2581"}), TAGS, "{{ tools }}<tool_call>"))
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS)
    ids = text._tokenizer.encode(said, add_special_tokens=False)
    writer = ChatWriter(request, [2], text)
    events = [writer.more(0, [token], [-1.0], [[]]) for token in ids]
    events += writer.last(0, Generation(ids, [-1.0] * len(ids), "stop", []))
    sent = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert sent == text.decode(ids) == "so then"


def test_parameters_are_found_in_tools_with_and_without_a_schema() -> None:
    assert parameters_of([*TOOLS, {"function": {"name": "g"}}]) == {"f": {"a": {"type": "integer"}}, "g": {}}
