"""The built-in graders, and how they become one reward."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from verifiers_dataserver.scores import BUILTIN
from verifiers_dataserver.tasks import Completion, Row, answer_part, is_answer_from

from verifiers.errors import ConfigError, GradingError


def score(name: str, text: str, answer: Any = "", tokens: int | None = None, **options: Any) -> float:
    info = options.pop("info", {})
    row = Row("d:0", [{"role": "user", "content": "?"}], answer, info=info)
    return BUILTIN[name](**options).score(Completion(text, tokens), row)


@pytest.mark.parametrize(
    ("name", "text", "answer", "options", "expected"),
    [
        ("exact", " 42\n", "42", {}, 1.0),
        ("exact", "42", 42, {}, 1.0),
        ("exact", "Yes", "yes", {}, 0.0),
        ("exact", "Yes", "yes", {"ignore_case": True}, 1.0),
        ("exact", "<think>7</think> 42", "42", {"answer_from": "after_think"}, 1.0),
        ("exact", "so \\boxed{42}.", "42", {"answer_from": "boxed"}, 1.0),
        ("exact", "42", "42", {"answer_from": "boxed"}, 0.0),
        ("exact", "<answer>1</answer><answer> 42 </answer>", "42", {"answer_from": "xml:answer"}, 1.0),
        ("number_only", "-1,234.5e3", "", {}, 1.0),
        ("number_only", "12 apples", "", {}, 0.0),
        ("number_only", "", "", {}, 0.0),
        ("number_only", ".", "", {}, 0.0),
        ("number_only", "1" * 100_000, "", {}, 0.0),
        ("json_valid", '{"a": [1, null]}', "", {}, 1.0),
        ("json_valid", "{'a': 1}", "", {}, 0.0),
        ("json_valid", "NaN", "", {}, 0.0),
        ("json_valid", "[" * 100_000, "", {}, 0.0),
        ("json_valid", "9" * 100_000, "", {}, 1.0),
        ("json_schema", '{"a": 1}', "", {"schema": {"required": ["a"]}}, 1.0),
        ("json_schema", '{"b": 1}', "", {"schema": {"required": ["a"]}}, 0.0),
        ("json_schema", '{"a": 1}', "", {"info": {"schema": {"properties": {"a": {"type": "string"}}}}}, 0.0),
        ("json_schema", "no json", "", {"schema": {}}, 0.0),
        ("xml_fields", "<reasoning>a</reasoning>\n<answer>b</answer>", "", {}, 1.0),
        ("xml_fields", "<answer>b</answer><reasoning>a</reasoning>", "", {}, 0.0),
        ("xml_fields", "<reasoning> </reasoning><answer>b</answer>", "", {}, 0.0),
        ("xml_fields", "<a>1</a><a>2</a>", "", {"fields": ["a"]}, 0.0),
        ("category", ' "Positive". ', "positive", {}, 1.0),
        ("category", "not  really", "Not really", {"categories": ["yes", "not really"]}, 1.0),
        ("category", "positive, I think", "positive", {}, 0.0),
        ("length_cap", "abcd", "", {"max_chars": 4}, 1.0),
        ("length_cap", "abcde", "", {"max_chars": 4}, 0.0),
        ("length_cap", "abcde", "", {"max_chars": 4, "zero_at": 8}, 0.75),
        ("reasoning_format", "<think>a</think>b", "", {}, 1.0),
        ("reasoning_format", "<think>a</think>", "", {}, 0.0),
        ("reasoning_format", "a</think>b", "", {}, 0.0),
        ("reasoning_format", "<think><think>a</think>b", "", {}, 0.0),
    ],
)
def test_a_built_in_grader_scores(name: str, text: str, answer: Any, options: Any, expected: float) -> None:
    assert score(name, text, answer, **options) == pytest.approx(expected)


def test_length_in_tokens_is_the_clients_and_one_that_is_missing_is_nobodys_zero() -> None:
    assert score("length_cap", "x", tokens=15, max_tokens=10, zero_at=20) == pytest.approx(0.5)
    with pytest.raises(GradingError, match="completion_tokens is missing"):
        score("length_cap", "x", max_tokens=10)


async def test_what_a_row_lacks_is_an_error_and_not_a_wrong_answer(serve: Any, tmp_path: Path) -> None:
    with pytest.raises(GradingError):
        score("category", "a", "c", categories=["a", "b"])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "answer": "a"}))
    server = await serve({"datasets": {"d": {"jsonl": "rows.jsonl", "graders": ["json_schema"]}}})
    (failed,) = await server.grade(("d:0", "{}"))
    assert (failed["reward"], "no info['schema']" in failed["error"]) == (None, True)


@pytest.mark.parametrize("name", sorted(set(BUILTIN) - {"json_schema"}))
def test_hostile_text_costs_time_in_proportion_to_its_length(name: str) -> None:
    options = {"max_chars": 5} if name == "length_cap" else {}
    for part in ("<answer>", "</answer>", "<reasoning>", "<think>", "</think>", "1,", "{[", "\\boxed{", " "):
        text = part * (400_000 // len(part))
        started = time.process_time()
        score(name, text, "a", **options)
        for how in ("after_think", "boxed", "xml:answer"):
            answer_part(text, how)
        assert time.process_time() - started < 1.0, part


def test_options_that_cannot_be_are_config_errors() -> None:
    for name, options in (
        ("length_cap", {}),
        ("length_cap", {"max_tokens": 1, "max_chars": 1}),
        ("length_cap", {"max_tokens": 5, "zero_at": 5}),
        ("xml_fields", {"fields": []}),
        ("xml_fields", {"fields": ["a b"]}),
    ):
        with pytest.raises(ConfigError):
            BUILTIN[name](**options)
    assert [is_answer_from(how) for how in ("text", "xml:a", "xml:", "last")] == [True, True, False, False]


async def test_weighted_graders_and_a_gate_give_the_numbers_of_the_example(
    serve: Any, python: Any, tmp_path: Path
) -> None:
    """Weights 2, 1, 1 scoring 1, 0.5, 1 -> 0.875; times a gate of 0.2 -> 0.175."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "answer": "right"}))
    three = [{"use": "exact", "weight": 2}, "half", {"use": "length_cap", "max_chars": 50}]
    gate = {"use": "length_cap", "name": "short", "max_chars": 1, "zero_at": 6, "gate": True, "weight": 9}
    datasets = {
        "three": {"jsonl": "rows.jsonl", "graders": three},
        "gated": {"jsonl": "rows.jsonl", "graders": [*three, gate]},
    }
    server = await serve({"datasets": datasets, "graders": {"half": python("half")}})
    plain, gated = await server.grade(("three:0", "right"), ("gated:0", "right"))
    assert plain["reward"] == pytest.approx(0.875)
    assert plain["metrics"] == {"exact": 1.0, "half": 0.5, "length_cap": 1.0}
    assert gated["reward"] == pytest.approx(0.175)
    assert gated["metrics"]["short"] == pytest.approx(0.2)


async def test_a_grader_of_the_user_gets_what_it_names_and_its_options(
    serve: Any, python: Any, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "answer": "a", "extra": 2}))
    datasets = {
        "options": {"jsonl": "rows.jsonl", "graders": [{"use": "options", "bonus": 0.25}]},
        "later": {"jsonl": "rows.jsonl", "graders": ["later"]},
    }
    server = await serve({"datasets": datasets, "graders": {name: python(name) for name in datasets}})
    results = await server.grade(("options:0", "<think>x</think>a"), ("options:0", "b"), ("later:0", "four"))
    assert [result["reward"] for result in results] == [3.25, 2.25, 4.0]


async def test_mathematics_is_compared_as_mathematics(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "q", "answer": "\\frac{1}{2}"}))
    graders = [{"use": "math", "answer_from": "boxed"}]
    server = await serve({"datasets": {"maths": {"jsonl": "rows.jsonl", "graders": graders}}})
    texts = ["\\boxed{0.5}", "\\boxed{\\frac{2}{4}}", "\\boxed{0.6}", "0.5"]
    results = await server.grade(*(("maths:0", text) for text in texts))
    assert [result["reward"] for result in results] == [1.0, 1.0, 0.0, 0.0]
