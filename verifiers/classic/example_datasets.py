"""A few well-known datasets in the columns that environments take."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from verifiers.errors import ConfigError
from verifiers.parsers.parser import extract_boxed_answer, extract_hash_answer

if TYPE_CHECKING:
    from datasets import Dataset

Row = Mapping[str, Any]


class _Source(NamedTuple):
    """The source of an example dataset; its rows are those of all `configs`, one after the other."""

    path: str
    split: str
    question: str | Callable[[Row], str] = "problem"
    answer: str | Callable[[Row], str] = "answer"
    configs: tuple[str | None, ...] = (None,)
    keep: Callable[[Row], bool] | None = None


def _choices(question: str, options: list[str]) -> str:
    return "\n".join([f"Question: {question}\n", *(f"{'ABCDEFGHIJ'[n]}: {text}" for n, text in enumerate(options))])


_GPQA_OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def _gpqa_order(row: Row) -> list[str]:
    # drawn by the question, so that every load gives the same rows
    return random.Random(row["Question"]).sample(_GPQA_OPTIONS, len(_GPQA_OPTIONS))


def _gpqa(config: str) -> _Source:
    return _Source(
        "Idavidrein/gpqa",
        "train",
        lambda row: _choices(row["Question"], [row[name] for name in _gpqa_order(row)]),
        lambda row: "ABCD"[_gpqa_order(row).index("Correct Answer")],
        (config,),
    )


def _openbookqa_question(row: Row) -> str:
    choices = zip(row["choices"]["label"], row["choices"]["text"], strict=True)
    return "\n".join(
        [f"Question: {row['question_stem']}\n\nChoices:", *(f"{label}. {text}" for label, text in choices)]
    )


def _open_rs(level: str | None = None) -> _Source:
    return _Source("knoveleng/open-rs", "train", keep=None if level is None else lambda row: row["level"] == level)


_PYTHON_PROBLEM = "Solve the following coding problem using the programming language python:"
_SOURCES = {
    "gsm8k": _Source(
        "openai/gsm8k", "test", "question", lambda row: extract_hash_answer(row["answer"]), configs=("main",)
    ),
    "math": _Source("chiayewken/competition_math", "train", answer=lambda row: extract_boxed_answer(row["solution"])),
    "math500": _Source("HuggingFaceH4/MATH-500", "test"),
    "aime2024": _Source("HuggingFaceH4/aime_2024", "train", answer=lambda row: str(int(row["answer"]))),
    "aime2025": _Source(
        "opencompass/AIME2025",
        "test",
        "question",
        lambda row: "".join(character for character in row["answer"] if character.isdigit() or character == "."),
        configs=("AIME2025-I", "AIME2025-II"),
    ),
    "amc2023": _Source("knoveleng/AMC-23", "train"),
    "gpqa_diamond": _gpqa("gpqa_diamond"),
    "gpqa_main": _gpqa("gpqa_main"),
    "mmlu": _Source(
        "cais/mmlu",
        "dev",
        lambda row: _choices(row["question"], row["choices"]),
        lambda row: "ABCD"[row["answer"]],
        ("all",),
    ),
    "mmlu_pro": _Source("TIGER-Lab/MMLU-Pro", "validation", lambda row: _choices(row["question"], row["options"])),
    "openbookqa": _Source("allenai/openbookqa", "train", _openbookqa_question, "answerKey", ("main",)),
    "openrs": _open_rs(),
    "openrs_easy": _open_rs("Easy"),
    "openrs_hard": _open_rs("Hard"),
    "prime_code": _Source(
        "PrimeIntellect/verifiable-coding-problems",
        "train",
        "prompt",
        "verification_info",
        keep=lambda row: bool(row["prompt"].startswith(_PYTHON_PROBLEM)),
    ),
}


def load_example_dataset(
    name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0
) -> Dataset:
    """Return a well-known dataset as columns `question` and `answer`, from the Hugging Face hub.

    Args:
        name: gsm8k, math, math500, aime2024, aime2025, amc2023, gpqa_diamond, gpqa_main, mmlu, mmlu_pro, openbookqa,
            openrs, openrs_easy, openrs_hard or prime_code.
        split: the split that the classic package chose when left out: test for gsm8k, math500 and aime2025, dev for
            mmlu, validation for mmlu_pro, and train for the others.
        n: this many rows of a shuffle by `seed`; all rows, in order, when left out or not positive.

    Raises:
        ConfigError: an unknown name.
    """
    source = _SOURCES.get(name)
    if source is None:
        raise ConfigError(
            f"There is no example dataset {name!r}, only {', '.join(_SOURCES)}; "
            "load others with datasets.load_dataset."
        )
    import datasets

    parts = [datasets.load_dataset(source.path, config, split=split or source.split) for config in source.configs]
    dataset: Any = parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    if source.keep is not None:
        dataset = dataset.filter(source.keep)
    if n is not None and n > 0:
        dataset = dataset.shuffle(seed=seed).select(range(min(n, len(dataset))))

    def to_question(row: Row) -> dict[str, Any]:
        return {"question": _read(row, source.question), "answer": _read(row, source.answer)}

    formatted: Dataset = dataset.map(to_question, remove_columns=dataset.column_names)
    return formatted


def _read(row: Row, field: str | Callable[[Row], str]) -> Any:
    return row[field] if isinstance(field, str) else field(row)
