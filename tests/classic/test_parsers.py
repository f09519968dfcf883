"""Section "Parsers"."""

from __future__ import annotations

from typing import Any

import pytest

import verifiers as vf


def say(text: str, role: str = "assistant") -> dict[str, str]:
    return {"role": role, "content": text}


TALK = [say("s", "system"), say("u", "user"), say("first"), say("t", "tool"), say("last")]


def test_a_parser_reads_the_last_message_by_its_function() -> None:
    assert vf.Parser().parse("x") == "x"
    assert vf.Parser(extract_fn=str.upper).parse_answer(TALK) == "LAST"
    assert vf.Parser(str.upper).parse("x") == "X"


@pytest.mark.parametrize("kind", ["dicts", "records", "objects"])
def test_messages_are_found_by_role_whatever_they_are(kind: str) -> None:
    from types import SimpleNamespace

    from verifiers.parsers.messages import as_message

    make: Any = {"dicts": dict, "records": as_message, "objects": lambda m: SimpleNamespace(**m)}[kind]
    talk = [make(message) for message in TALK]
    parser = vf.Parser()
    assert parser.get_assistant_messages(talk) == [talk[2], talk[4]]
    assert parser.get_system_messages(talk) == [talk[0]]
    assert parser.get_user_messages(talk) == [talk[1]]
    assert parser.get_tool_messages(talk) == [talk[3]]
    assert parser.parse_answer(talk) == "last"
    assert parser.get_format_reward_func()(talk) == 1.0


def test_a_think_parser_takes_what_follows_the_last_closing_tag_and_nothing_without_one() -> None:
    parser = vf.ThinkParser(extract_fn=vf.extract_boxed_answer)
    assert parser.parse(r"<think>a</think> x </think> \boxed{4}") == "4"
    assert parser.parse(r"\boxed{4}") == ""
    assert vf.MaybeThinkParser().parse("4") == "4"


@pytest.mark.parametrize(
    ("text", "reward"),
    [("<think>a</think>b", 1.0), ("b", 0.0), ("<think>a</think>", 0.0), ("<think><think></think>b", 0.0)],
)
def test_the_think_format_is_rewarded_over_assistant_messages(text: str, reward: float) -> None:
    func = vf.ThinkParser().get_format_reward_func()
    assert func([say(text)]) == reward
    assert func(completion=[say(text), say("x", "user"), say("<think>a</think>b")]) == (reward + 1) / 2


def test_an_xml_parser_has_every_alternative_as_an_attribute() -> None:
    parser = vf.XMLParser(["reasoning", ("code", "answer")], answer_field="answer")
    parsed = parser.parse("<reasoning> why </reasoning>\n<answer>\n4\n</answer>")
    assert (parsed.reasoning, parsed.code, parsed.answer) == ("why", None, "4")
    assert parser.parse("nothing").reasoning is None
    assert parser.parse("<answer>1</answer><answer>2</answer>").answer == "1"
    assert parser.parse("<answer>1</answer><answer>2</answer>", last=True).answer == "2"
    assert parser.parse("<answer> 1 </answer>", strip=True).answer == "1"


def test_an_xml_parser_takes_the_answer_from_the_last_assistant_message_that_has_it() -> None:
    parser = vf.XMLParser(["answer"])
    assert parser.parse_answer([say("<answer>1</answer>"), say("<answer>9</answer>", "user"), say("hm")]) == "1"
    assert parser.parse_answer([say("hm")]) is None


def test_an_xml_parser_writes_its_format() -> None:
    parser = vf.XMLParser(["reasoning", ("code", "answer")])
    assert parser.get_fields() == ["reasoning", "code"]
    assert "<reasoning>\n...\n</reasoning>" in parser.get_format_str()
    text = parser.format(reasoning="why", answer="4")
    assert text == "<reasoning>\nwhy\n</reasoning>\n<code>\n4\n</code>"
    assert parser.parse(text).code == "4"
    with pytest.raises(ValueError, match="Missing value"):
        parser.format(reasoning="why")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<a>1</a><b>2</b>", 1.0),
        ("no tags", 0.2),
        ("<a>1</a>", 0.2 + 0.2 + 0.2),
        ("x <a>1</a><b>2</b> y", 0.4 + 0.2),
        ("<a>1</a><b >2</b>", 0.4 + 0.2 + 0.2),
    ],
)
def test_the_xml_format_reward_is_the_classic_mixture(text: str, reward: float) -> None:
    func = vf.XMLParser(["a", "b"]).get_format_reward_func()
    assert func([say(text)]) == pytest.approx(reward)
    assert func([say(text), say("<a>1</a><b>2</b>")]) == pytest.approx((reward + 1) / 2)


def test_boxed_and_hash_answers() -> None:
    assert vf.extract_boxed_answer(r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert vf.extract_boxed_answer("plain") == "plain"
    assert vf.extract_hash_answer("so #### 7") == "7"
    assert vf.extract_hash_answer("42") == "42"
