"""The small model: exact text, and prompts that extend one another, with tool calls too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the train extra")

from verifiers.train.tiny_model import char_model  # noqa: E402


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    char_model.make_model(path, seed=0)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", [char_model.CHARACTERS, "don't , stop .\n\n  now  ", "a", ""])
def test_decoding_gives_back_the_exact_text_one_token_a_character(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_rendering_one_more_turn_extends_the_rendering_before_it(tokenizer: Any) -> None:
    conversation = [
        {"role": "system", "content": "Spell."},
        {"role": "user", "content": "sun?"},
        {"role": "assistant", "content": "nus"},
        {"role": "user", "content": "cat?"},
    ]

    def render(messages: list[dict[str, str]], prompt: bool) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        return ids

    first_prompt, second_prompt = render(conversation[:2], True), render(conversation, True)
    held = first_prompt + tokenizer("nus<|im_end|>")["input_ids"]
    assert second_prompt[: len(held)] == held
    for turns in range(1, len(conversation)):
        shorter, longer = render(conversation[:turns], False), render(conversation[: turns + 1], False)
        assert longer[: len(shorter)] == shorter


def test_tool_calls_and_results_extend_the_prompt_in_the_syntax_that_servers_read(tokenizer: Any) -> None:
    from verifiers_embedded.text.tool_calls import ToolCall, format_of_template, parse_hermes

    called = '<tool_call>{"name": "add", "arguments": {"a": 2, "b":3}}</tool_call>'
    answer = parse_hermes(called, {})
    assert answer.calls == (ToolCall("add", '{"a": 2, "b":3}'),)
    assert format_of_template(tokenizer.chat_template) == "hermes"
    number = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": number, "b": number}}
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}
    call = {"type": "function", "function": {"name": "add", "arguments": answer.calls[0].arguments}}
    conversation = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]

    def render(messages: list[dict[str, Any]]) -> str:
        text: str = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
        return text

    prompt = render(conversation[:1])
    assert prompt.startswith(
        "<|im_start|>system\nTools:\nadd(a: integer, b: integer): Add.<|im_end|>\n<|im_start|>user"
    )
    assert render(conversation).startswith(f"{prompt}{called}<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n")
    with_system = render([{"role": "system", "content": "Be right."}, *conversation])
    assert with_system.startswith("<|im_start|>system\nBe right.\nTools:\nadd(")


def test_only_the_answer_and_its_end_are_marked_as_the_assistants(tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sun?"}, {"role": "assistant", "content": "nus"}],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    marked = [i for i, mark in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(marked) == "nus<|im_end|>"
