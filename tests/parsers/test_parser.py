"""Parser and ThinkParser."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verifiers.parsers import MaybeThinkParser, Parser, ThinkParser
from verifiers.parsers.parser import extract_boxed_answer

CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "let me ask a tool"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "it is 4"},
]


def say(text: object) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def test_a_plain_parser_takes_the_last_message_as_it_is() -> None:
    assert Parser().parse("x") == "x"
    assert Parser().parse_answer(CONVERSATION) == "it is 4"
    assert Parser().parse_answer("it is 4") == "it is 4"
    assert Parser(extract_fn=str.upper).parse_answer(CONVERSATION) == "IT IS 4"


def test_messages_are_found_by_role() -> None:
    parser = Parser()
    assert parser.get_system_messages(CONVERSATION) == CONVERSATION[:1]
    assert parser.get_user_messages(CONVERSATION) == CONVERSATION[1:2]
    assert parser.get_assistant_messages(CONVERSATION) == [CONVERSATION[2], CONVERSATION[4]]
    assert parser.get_tool_messages(CONVERSATION) == CONVERSATION[3:4]


def test_a_string_counts_as_one_assistant_message() -> None:
    assert Parser().get_assistant_messages("hi") == [say("hi")]
    assert Parser().get_user_messages("hi") == []


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("four", "four"),
        (None, ""),
        ([{"type": "text", "text": "fo"}, {"type": "image_url", "image_url": {"url": "x"}}, "ur"], "four"),
        ([SimpleNamespace(type="text", text="four")], "four"),
    ],
)
def test_every_kind_of_content_is_read_in_dicts_and_in_objects(content: object, text: str) -> None:
    assert Parser().parse_answer([say(content)]) == text
    message = SimpleNamespace(role="assistant", content=content)
    assert Parser().parse_answer([message]) == text
    assert Parser().get_assistant_messages([message]) == [message]


def test_the_answer_is_what_follows_the_last_think_tag() -> None:
    text = "<think>one</think> between <think>two</think>\n  the end \n"
    assert ThinkParser().parse(text) == "the end"
    assert ThinkParser().parse_answer([say(text)]) == "the end"
    assert ThinkParser(extract_boxed_answer).parse(r"<think>x</think> so \boxed{7}") == "7"


def test_without_a_think_tag_there_is_no_answer_unless_it_may_be_missing() -> None:
    assert ThinkParser().parse("just 42") == ""
    assert MaybeThinkParser().parse("just 42") == "just 42"
    assert MaybeThinkParser().parse("<think>hm</think> 42") == "42"


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think>b", 1.0),
        ("b", 0.0),
        ("<think>a</think>", 0.0),
        ("b <think>a</think> c", 0.0),
        ("<think>a</think>b</think>c", 0.0),
    ],
)
def test_the_think_format_is_one_block_first_and_an_answer_after_it(text: str, reward: float) -> None:
    assert ThinkParser().get_format_reward_func()([say(text)]) == reward
    assert ThinkParser().get_format_reward_func()(text) == reward


def test_the_think_format_reward_is_a_mean_over_assistant_messages() -> None:
    reward = ThinkParser().get_format_reward_func()
    good, bad = say("<think>a</think>b"), say("b")
    assert reward([good, {"role": "user", "content": "more"}, bad, good]) == 2 / 3
    assert reward([{"role": "user", "content": "x"}]) == 0.0
    assert reward([good], answer="b", state={}) == 1.0


@pytest.mark.parametrize("parser", [Parser(), ThinkParser(), MaybeThinkParser()], ids=lambda one: type(one).__name__)
def test_behind_a_thought_that_never_ends_there_is_no_answer(parser: Parser) -> None:
    assert parser.parse("<think>is it 4?") == ""
    assert parser.parse("<think>a</think><think>is it 4?").rpartition("</think>")[2] == ""
