"""Answers in the conventions of maths datasets."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from verifiers.errors import ConfigError
from verifiers.utils.data_utils import (
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
        (r"\boxed{4} and \boxed{5", "4"),
        (r"\boxed 4.", "4"),
        (r"\fbox{4}", "4"),
        ("", ""),
    ],
)
def test_the_last_box_is_read_with_its_inner_braces(text: str, answer: str) -> None:
    assert extract_boxed_answer(text) == answer


def test_the_hash_answer_follows_the_marker_or_is_the_text() -> None:
    assert extract_hash_answer("2 + 2 = 4\n#### 4 ") == "4"
    assert extract_hash_answer("#### 3\nno\n#### 4\nthat is it") == "4"
    assert extract_hash_answer("4") == "4"


@pytest.mark.parametrize("text", ["42", "\\boxed{42"])
def test_a_strict_extractor_gives_nothing_without_a_box(text: str) -> None:
    assert extract_boxed_answer(text, strict=True) == ""
    assert extract_boxed_answer("\\boxed{42}", strict=True) == "42"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record which repository, configuration and split were loaded; each gives five rows of all columns."""
    seen: list[tuple[Any, ...]] = []

    def load_dataset(path: str, config: str | None, split: str) -> datasets.Dataset:
        seen.append((path, config, split))
        answer: Any = {"openai/gsm8k": "work\n#### 7", "cais/mmlu": 2, "HuggingFaceH4/aime_2024": "007"}.get(
            path, "7^o"
        )
        row = {
            **dict.fromkeys(("question", "problem", "prompt", "question_stem", "Question"), f"q of {config}"),
            "answer": answer,
            "solution": r"so \boxed{7}",
            "verification_info": "{}",
            "choices": {"label": ["A", "B"], "text": ["one", "two"]} if "openbook" in path else list("stuv"),
            "options": list("stuv"),
            "answerKey": "B",
            "level": "Easy",
            "Correct Answer": "right",
            **{f"Incorrect Answer {number}": f"wrong {number}" for number in (1, 2, 3)},
        }
        return datasets.Dataset.from_list([row] * 5)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return seen


SOURCES = {
    "gsm8k": ("openai/gsm8k", "main", "test", "7"),
    "math": ("chiayewken/competition_math", None, "train", "7"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", "7^o"),
    "aime2024": ("HuggingFaceH4/aime_2024", None, "train", "7"),
    "aime2025": ("opencompass/AIME2025", "AIME2025-I", "test", "7"),
    "amc2023": ("knoveleng/AMC-23", None, "train", "7^o"),
    "mmlu": ("cais/mmlu", "all", "dev", "C"),
    "mmlu_pro": ("TIGER-Lab/MMLU-Pro", None, "validation", "7^o"),
    "openbookqa": ("allenai/openbookqa", "main", "train", "B"),
    "openrs": ("knoveleng/open-rs", None, "train", "7^o"),
    "openrs_easy": ("knoveleng/open-rs", None, "train", "7^o"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_example_dataset_comes_from_where_the_classic_package_took_it(
    name: str, asked: list[tuple[Any, ...]]
) -> None:
    path, config, split, answer = SOURCES[name]
    rows = load_example_dataset(name)
    assert asked[0] == (path, config, split)
    assert rows.column_names == ["question", "answer"]
    assert rows["answer"][0] == answer
    assert len(rows) == (10 if name == "aime2025" else 5)


def test_the_number_of_rows_is_all_of_them_unless_it_is_positive(asked: list[tuple[Any, ...]]) -> None:
    counts = [len(load_example_dataset("math", "train", n=n)) for n in (-1, 0, 2, 9)]
    assert counts == [5, 5, 2, 5]
    assert len(load_example_dataset("openrs_hard")) == 0
    assert asked[0] == ("chiayewken/competition_math", None, "train")


def test_the_right_letter_of_gpqa_is_the_same_at_every_load(asked: list[tuple[Any, ...]]) -> None:
    row, again = (load_example_dataset("gpqa_diamond")[0] for _ in range(2))
    assert row == again
    assert f"{row['answer']}: right" in row["question"]


def test_an_unknown_example_dataset_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match="'gsm9k', only gsm8k, math"):
        load_example_dataset("gsm9k")
