"""A constraint that cannot be obeyed is refused with its reason, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_forms import (
    ADD,
    LETTERS_SCHEMA,
    byte_level_tokenizer,
    fits,
    named,
)
from tokenizers import Tokenizer, decoders
from tool_templates import PRINTS_TEXT
from transformers import PreTrainedTokenizerFast
from verifiers_embedded.engine import constraints
from verifiers_embedded.engine.constraints import GrammarCompiler, token_bytes
from verifiers_embedded.errors import ApiError

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
    assert "error" in (await server.events("/v1/chat/completions", {**body, **failing}))[-1]
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
