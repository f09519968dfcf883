"""Answers in the conventions of maths datasets."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from verifiers.errors import ConfigError
from verifiers.utils.data_utils import (
    BOXED_SYSTEM_PROMPT,
    THINK_BOXED_SYSTEM_PROMPT,
    extract_boxed_answer,
    extract_hash_answer,
    load_example_dataset,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x = \left\{ 1 \right.}", r"x = \left\{ 1 \right."),
        (r"\boxed{}", ""),
        ("42", "42"),
        (r"\boxed{42", r"\boxed{42"),
        ("", ""),
    ],
)
def test_the_last_box_is_read_with_its_inner_braces(text: str, answer: str) -> None:
    assert extract_boxed_answer(text) == answer


def test_the_hash_answer_follows_the_marker_or_is_none() -> None:
    assert extract_hash_answer("2 + 2 = 4\n#### 4 ") == "4"
    assert extract_hash_answer("4") is None


def test_the_system_prompts_name_what_the_parsers_look_for() -> None:
    assert "\\boxed{" in BOXED_SYSTEM_PROMPT
    assert all(part in THINK_BOXED_SYSTEM_PROMPT for part in ("<think>", "</think>", "\\boxed{"))


def test_an_example_dataset_has_questions_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(path: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((path, config, split))
        rows = [{"question": f"q{i}", "answer": f"work\n#### {i}"} for i in range(5)]
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = load_example_dataset("gsm8k", split="test")
    assert rows.column_names == ["question", "answer"]
    assert rows["answer"] == ["0", "1", "2", "3", "4"]
    assert len(load_example_dataset("gsm8k", n=2)) == 2
    assert asked == [("openai/gsm8k", "main", "test"), ("openai/gsm8k", "main", "train")]


def test_an_unknown_example_dataset_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match="'gsm9k', only gsm8k, math"):
        load_example_dataset("gsm9k")
