"""A few well-known datasets in the columns that environments take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from verifiers.errors import ConfigError
from verifiers.parsers.parser import extract_boxed_answer, extract_hash_answer

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["load_example_dataset"]


class _Source(NamedTuple):
    """The source of an example dataset, and the meaning of its columns."""

    path: str
    config: str | None
    split: str
    question: str = "problem"
    answer: str = "answer"


_SOURCES = {
    "gsm8k": _Source("openai/gsm8k", "main", "train", question="question"),
    "math": _Source("DigitalLearningGmbH/MATH-lighteval", "default", "train", answer="solution"),
    "math500": _Source("HuggingFaceH4/MATH-500", None, "test"),
    "aime2024": _Source("HuggingFaceH4/aime_2024", None, "train"),
    "aime2025": _Source("yentinglin/aime_2025", None, "train"),
}


def load_example_dataset(
    name: str = "gsm8k", split: str | None = None, n: int | None = None, seed: int = 0
) -> Dataset:
    """Return a well-known dataset as columns `question` and `answer`, from the Hugging Face hub.

    Args:
        name: gsm8k, math, math500, aime2024 or aime2025.
        split: the dataset's main split when left out.
        n: this many rows of a shuffle by `seed`; all rows, in order, when left out.

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

    dataset: Any = datasets.load_dataset(source.path, source.config, split=split or source.split)
    if n is not None:
        dataset = dataset.shuffle(seed=seed).select(range(min(n, len(dataset))))
    extract = {"gsm8k": extract_hash_answer, "math": extract_boxed_answer}.get(name, str)

    def to_question(row: dict[str, Any]) -> dict[str, Any]:
        return {"question": row[source.question], "answer": extract(row[source.answer])}

    formatted: Dataset = dataset.map(to_question, remove_columns=dataset.column_names)
    return formatted
