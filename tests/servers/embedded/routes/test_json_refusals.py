"""A constraint that cannot be obeyed is refused with its reason, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
import string
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_forms import (
    ADD,
    LETTERS_SCHEMA,
    PERSON,
    byte_level_tokenizer,
    events_of,
    fits,
    named,
)
from tokenizers import Tokenizer, decoders, models, normalizers
from tool_templates import PRINTS_TEXT
from transformers import PreTrainedTokenizerFast
from verifiers_embedded.engine import constraints
from verifiers_embedded.engine.constraints import GrammarCompiler, token_bytes
from verifiers_embedded.errors import ApiError
from verifiers_embedded.text import grammars
from verifiers_embedded.text.prompts import ChatText

pytest.importorskip("llguidance")


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nope"}, "nope"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "http://127.0.0.1:1/x.json"}, "127.0.0.1:1"),
        ({"$ref": "#"}, "no text"),
        ({"enum": []}, "Unsatisfiable"),
        ({"enum": ["x" * 300_000]}, "characters"),
        ({"enum": [json.loads("[" * 99 + "]" * 99)]}, "101 levels"),
        ({"$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(999)}}, "$ref"),
        ({"allOf": [{"anyOf": [{"required": [f"{k}{i}"]} for k in "ab"]} for i in range(18)]}, "large"),
        ({"type": "integer", "multipleOf": 1_000_000_007}, "fuel"),
    ],
)
async def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(
    start: Any, schema: Any, reason: str
) -> None:
    server = await start()
    status, error = await server.refused(**fits(schema))
    assert (status, error["param"]) == (400, "response_format")
    assert reason in error["message"]
    assert "\n" not in error["message"]
    assert (await server.get("/health"))[0] == 200


@pytest.mark.parametrize(
    "value",
    [
        "json",
        {"type": "grammar"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": True}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "lenient": True}},
        {"type": "json_object", "schema": {}},
    ],
)
async def test_a_response_format_of_no_known_form_is_refused(start: Any, value: Any) -> None:
    server = await start()
    status, error = await server.refused(response_format=value)
    assert (status, error["param"]) == (400, "response_format")
    assert "response_format" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tool_choice": named("mul"), "tools": [ADD]}, "tool_choice", "the tools are add"),
        ({"tool_choice": {"type": "function"}, "tools": [ADD]}, "tool_choice", "must be"),
        ({"tool_choice": "required", "tools": [ADD], "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"tool_choice": "required", "tools": [ADD], **fits({})}, "tool_choice", "response_format"),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools",
            "'object'",
        ),
        (
            {"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"not": {}}}}]},
            "tool_choice",
            "not",
        ),
    ],
)
async def test_a_choice_that_cannot_be_obeyed_is_refused(
    start: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    server = await start(template=PRINTS_TEXT)
    status, error = await server.refused(**fields)
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]


async def test_calls_in_a_format_without_a_grammar_are_not_forced(start: Any) -> None:
    server = await start(template=PRINTS_TEXT)
    for tool_format in ("mistral", None):
        server.text.tool_format = tool_format
        status, error = await server.refused(tools=[ADD], tool_choice="required")
        assert (status, error["param"]) == (400, "tool_choice")
        assert "'hermes'" in error["message"]


async def test_without_the_library_the_refusal_names_the_extra(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    server = await start(template=PRINTS_TEXT)
    for fields in (fits({}), {"tools": [ADD], "tool_choice": "required"}):
        status, error = await server.refused(**fields)
        assert status == 400
        assert "verifiers-embedded[json]" in error["message"]
    assert (await server.chat())["usage"]["completion_tokens"] > 0


async def test_a_schema_that_takes_too_long_is_refused_while_others_are_answered(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await start()
    released, compile_now = threading.Event(), GrammarCompiler._compile

    def slow(self: Any, lark: str, param: str) -> Any:
        if "slow" in lark:
            released.wait(10)
        return compile_now(self, lark, param)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    monkeypatch.setattr(constraints, "COMPILE_S", 0.2)
    task = asyncio.create_task(server.refused(**fits({"enum": ["slow 1"]})))
    await server.chat(max_tokens=5)
    status, error = await task
    assert (status, "0.2 s" in error["message"]) == (400, True)
    assert (await server.chat(max_tokens=99, **fits(LETTERS_SCHEMA)))["choices"][0]["finish_reason"] == "stop"
    assert (await server.refused(**fits({"enum": ["slow 2"]})))[0] == 400
    assert (await server.refused(**fits({"enum": ["slow 3"]})))[0] == 503
    released.set()


async def test_a_grammar_that_fails_in_mid_generation_fails_its_request_alone(start: Any) -> None:
    # the tokenizer of these tests has no token for this letter
    server = await start()
    failing = fits({"const": "aé"})
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    other, (status, answer) = await asyncio.gather(
        server.chat(max_tokens=99, **fits(LETTERS_SCHEMA)),
        server.post("/v1/chat/completions", {**body, **failing}),
    )
    assert other["choices"][0]["finish_reason"] == "stop"
    assert (status, "beyond token 2" in answer["error"]["message"]) == (500, True), answer
    assert "error" in (await events_of(server, {**body, **failing}))[-1]
    assert (await server.get("/health"))[1]["running"] == 0


# -- tokenizers -------------------------------------------------------------------------------------------------


def spaced(tokenizer: PreTrainedTokenizerFast) -> None:
    # what a WordLevel tokenizer without a decoder does: spaces between all tokens
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece(prefix="##")


def cleaned(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(" ,", ",")])


def without_braces(tokenizer: PreTrainedTokenizerFast) -> None:
    specification = json.loads(tokenizer.backend_tokenizer.to_str())
    specification["model"]["vocab"]["(("] = specification["model"]["vocab"].pop("{")
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(specification))


@pytest.mark.parametrize(
    ("spoil", "words"), [(spaced, "'{' alone"), (cleaned, "where tokens meet"), (without_braces, "'{' alone")]
)
def test_tokenizers_whose_texts_do_not_add_up_are_refused(
    model_dir: Path, spoil: Callable[[Any], None], words: str
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    spoil(tokenizer)
    with pytest.raises(ApiError, match=words):
        token_bytes(tokenizer, len(tokenizer), "response_format")


def test_the_bytes_of_tokens_are_what_they_add_to_a_text() -> None:
    tokenizer = byte_level_tokenizer()
    texts = token_bytes(tokenizer, len(tokenizer) + 9, "response_format")
    ids = tokenizer.encode("zoë 🙂 \ufffd", add_special_tokens=False)
    assert b"".join(texts[token] for token in ids).decode() == "zoë 🙂 \ufffd"
    assert texts[tokenizer.convert_tokens_to_ids("<tool_call>")] == b"<tool_call>"
    assert texts[tokenizer.eos_token_id] == texts[len(tokenizer)] == b""


def byte_fallback_tokenizer(*, strips: bool) -> PreTrainedTokenizerFast:
    """As SentencePiece's: marks for spaces, names for bytes; Llama's drops a space at the beginning of a text."""
    names = ["<unk>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), "▁", *string.printable.strip(), "▁the"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("strips", [True, False])
def test_bytes_that_stand_for_themselves_have_their_values(strips: bool) -> None:
    tokenizer = byte_fallback_tokenizer(strips=strips)
    texts = token_bytes(tokenizer, len(tokenizer), "response_format")
    assert texts[2 : 2 + 256] == [bytes([value]) for value in range(256)]
    assert texts[tokenizer.convert_tokens_to_ids("▁the")] == b" the"
    assert ChatText(tokenizer).token(2 + 0xC3)[1] == [0xC3]


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ApiError, match="fast"):
        token_bytes(object(), 9, "response_format")


async def test_a_schema_is_compiled_once_for_all_that_send_it(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start()
    compile_now, count = GrammarCompiler._compile, 0

    def counted(self: Any, lark: str, param: str) -> Any:
        nonlocal count
        count += 1
        return compile_now(self, lark, param)

    monkeypatch.setattr(GrammarCompiler, "_compile", counted)
    await asyncio.gather(*(server.chat(seed=seed, max_tokens=5, **fits(PERSON)) for seed in range(20)))
    assert count == 1
    for place in range(constraints._KEPT + 5):
        await server.chat(max_tokens=1, **fits({"const": place}))
    assert count == 1 + constraints._KEPT + 5


def test_the_bounds_on_schemas_leave_room_for_real_ones() -> None:
    real = {"$defs": {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(200)}}
    assert json.loads(grammars.schema_text(real, "response_format")) == real
