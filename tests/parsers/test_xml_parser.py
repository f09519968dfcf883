"""XMLParser."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.parsers import XMLParser

FIELDS: list[Any] = ["reasoning", ("code", "answer")]


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_fields_are_read_and_absent_ones_are_none() -> None:
    parsed = XMLParser(["reasoning", "answer"]).parse("<reasoning>\n think \n</reasoning>")
    assert parsed == SimpleNamespace(reasoning="think", answer=None)
    assert XMLParser(["answer"]).parse("<answer></answer>").answer == ""


def test_every_alternative_is_an_attribute() -> None:
    parsed = XMLParser(FIELDS).parse("<reasoning>r</reasoning><answer>a\nb</answer>")
    assert (parsed.reasoning, parsed.code, parsed.answer) == ("r", None, "a\nb")


def test_the_first_occurrence_is_read_unless_the_last_is_asked_for() -> None:
    parser = XMLParser(["answer"])
    text = "<answer>1</answer> no, <answer>2</answer>"
    assert parser.parse(text).answer == "1"
    assert parser.parse(text, last=True).answer == "2"


def test_white_space_around_a_field_never_belongs_to_it() -> None:
    assert XMLParser(["answer"]).parse("<answer>  4 2  </answer>", strip=False).answer == "4 2"


def test_the_answer_is_the_last_one_that_any_assistant_message_has() -> None:
    parser = XMLParser(["reasoning", "answer"])
    completion = [
        say("<answer>1</answer>"),
        {"role": "user", "content": "<answer>9</answer>"},
        say("<answer>2</answer><answer>3</answer>"),
        say("<reasoning>nothing to add</reasoning>"),
    ]
    assert parser.parse_answer(completion) == "3"
    assert parser.parse_answer(completion[1:2]) is None
    assert parser.parse_answer("<answer>5</answer>") == "5"
    assert parser.parse_answer([SimpleNamespace(role="assistant", content="<answer>6</answer>")]) == "6"
    assert XMLParser(FIELDS, answer_field="code").parse_answer("<code>7</code>") == "7"


def test_the_format_can_be_shown_and_written() -> None:
    parser = XMLParser(FIELDS)
    assert parser.get_fields() == ["reasoning", "code"]
    assert parser.get_format_str() == (
        "<reasoning>\n...\n</reasoning>\n<[ code | answer ]>\n...\n</[ code | answer ]>"
    )
    written = "<reasoning>\nr\n</reasoning>\n<code>\nc\n</code>"
    assert parser.format(reasoning="r", code="c") == written
    assert parser.format(reasoning="r", answer="c") == written
    with pytest.raises(ValueError, match="Missing value for field 'code'"):
        parser.format(reasoning="r")


def test_fields_must_be_distinct_names() -> None:
    with pytest.raises(ValueError, match="Duplicate field name: 'answer'"):
        XMLParser(["answer", "answer"])
    with pytest.raises(ValueError, match="empty tuple"):
        XMLParser([()])
    with pytest.raises(TypeError, match="123"):
        XMLParser([123])  # type: ignore[list-item]
    assert XMLParser([]).get_fields() == []


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<reasoning>r</reasoning><answer>a</answer>", 1.0),
        ("no tags", 0.2),
        ("<reasoning>r</reasoning>", 0.4 * 0.5 + 0.2 + 0.2),
        ("well: <reasoning>r</reasoning><answer>a</answer>", 0.8),
        ("<reasoning>r", 0.2 + 0.2),
        ("<reasoning>r</reasoning>< answer>a</answer>", 0.4 + 0.2 + 0.2),
    ],
)
def test_the_format_reward_weighs_presence_spacing_start_and_end(text: str, reward: float) -> None:
    parser = XMLParser(["reasoning", "answer"])
    assert parser.get_format_reward_func()([say(text)]) == pytest.approx(reward)


def test_the_format_reward_is_a_mean_over_assistant_messages() -> None:
    reward = XMLParser(["answer"]).get_format_reward_func()
    assert reward([say("<answer>a</answer>"), say("no tags")]) == pytest.approx(0.6)
    assert reward([{"role": "user", "content": "<answer>a</answer>"}]) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I put it into <answer> tags: <answer>tac</answer>", "tac"),
        ("<answer>\nWait, again.\n<answer>tac</answer>", "tac"),
        ("<answer><answer>tac</answer></answer>", "tac"),
        ("<think>into <answer> tags</think><answer>tac</answer>", "tac"),
        ("<think><answer>draft</answer></think><answer>tac</answer>", "tac"),
        ("<answer>draft</answer></think><answer>tac</answer>", "tac"),
        ("<answer>tac</answer><think>or <answer>cat</answer>?</think>", "tac"),
        ("<think><answer>draft</answer></think>", None),
        ("<think>is it <answer>tac</answer>", None),
    ],
)
def test_the_answer_is_in_the_innermost_tags_outside_of_thoughts(text: str, answer: str | None) -> None:
    assert XMLParser(["think", "answer"]).parse_answer([say(text)]) == answer


def test_a_thought_can_be_a_field() -> None:
    assert XMLParser(["think", "answer"]).parse("<think>so</think><answer>tac</answer>").think == "so"


def test_nasty_texts_are_read_in_no_time() -> None:
    parser = XMLParser(["think", "answer"])
    for part in ("<think>", "</think>", "<answer>", "< ", "<answer> "):
        text = part + (part + " ") * 20_000
        assert parser.parse(text).answer is None
        parser.get_format_reward_func()([say("< " + " " * 20_000 + text)])


def test_a_text_in_place_of_the_fields_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"give \['answer'\]"):
        XMLParser("answer")
