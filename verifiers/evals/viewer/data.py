"""Rows of results.jsonl as the page's script reads them: columns of small values, and blocks of transcripts.

The page reads the columns when it opens and a block when one of its rollouts is looked at, so that opening a page of
10,000 rollouts does not wait for 10,000 transcripts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verifiers.evals.columns import RolloutColumns
from verifiers.evals.store import metrics_of
from verifiers.evals.viewer.transcripts import as_text, last_words, newest_first, transcript_of

__all__ = [
    "ROWS_PER_BLOCK",
    "Entry",
    "columns_of",
    "entry_of",
    "example_of",
    "groups_by_prompt",
    "json_block",
    "numbers_of",
    "sampled_examples",
    "sampled_groups",
]

ROWS_PER_BLOCK = 100

_PROMPT_WORDS = 140
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Entry:
    """One rollout without its transcript.

    Attributes:
        run: 0, or 1 for the second of two runs.
        place: of its row among the rows of its run, in order of arrival.
        asked: a hash of its prompt, answer and task; "" where nobody compares prompts.
        reward: None where it was not scored.
        metrics: each reward function's value, where it is a finite number.
        seconds: of generation; None where the row does not say.
        words: its last words, on one line.
        prompt: the end of its prompt, on one line.
    """

    example: str
    generation: int
    run: int
    outcome: str
    reward: float | None
    metrics: Mapping[str, float]
    prompt_tokens: int
    completion_tokens: int
    seconds: float | None
    words: str
    prompt: str
    place: int = 0
    asked: str = ""


def entry_of(row: Mapping[str, Any], run: int = 0, place: int = 0, asked: str = "") -> Entry:
    """The small values of a row; what is missing or of another type counts as absent."""
    milliseconds = _number(row.get("generation_ms"))
    said = next(newest_first(row.get("prompt"), "prompt"), {}).get("text", "")
    return Entry(
        # the rollouts of a prompt share these texts, which would otherwise be most of what many entries take
        example=example_of(row),
        generation=_count(row.get("generation")),
        run=run,
        outcome=_outcome(row),
        reward=_number(row.get("reward")),
        metrics=_metrics(row),
        prompt_tokens=_count(row.get("prompt_tokens")),
        completion_tokens=_count(row.get("completion_tokens")),
        seconds=None if milliseconds is None else milliseconds / 1000,
        words=last_words(row),
        prompt=sys.intern(" ".join(said[: 4 * _PROMPT_WORDS].split())[:_PROMPT_WORDS]),
        place=place,
        asked=sys.intern(asked),
    )


def example_of(row: Mapping[str, Any]) -> str:
    """The example id of a row as the page has it."""
    return sys.intern(as_text(row.get("example_id"))[:200])


def numbers_of(rows: Iterable[Mapping[str, Any]], into: RolloutColumns | None = None) -> RolloutColumns:
    """The numbers of rows of any shape; example ids are those of `example_of`, and no transcript is looked at.

    Args:
        rows: read once and not kept.
        into: numbers that these are added to.
    """
    numbers = RolloutColumns() if into is None else into
    for row in rows:
        numbers.add(
            {
                "example_id": example_of(row),
                "generation": _count(row.get("generation")),
                "outcome": _outcome(row),
                "reward": _number(row.get("reward")),
                "metrics": _metrics(row),
                "prompt_tokens": _count(row.get("prompt_tokens")),
                "completion_tokens": _count(row.get("completion_tokens")),
            }
        )
    return numbers


def columns_of(entries: Sequence[Entry]) -> dict[str, Any]:
    """The entries as lists of equal length, and each example's prompt once."""
    names = sorted({name for entry in entries for name in entry.metrics})
    prompts: dict[str, str] = {}
    for entry in entries:
        prompts.setdefault(entry.example, entry.prompt)
    return {
        "example": [entry.example for entry in entries],
        "generation": [entry.generation for entry in entries],
        "run": [entry.run for entry in entries],
        "outcome": [entry.outcome for entry in entries],
        "reward": [_rounded(entry.reward) for entry in entries],
        "metrics": {name: [_rounded(entry.metrics.get(name)) for entry in entries] for name in names},
        "promptTokens": [entry.prompt_tokens for entry in entries],
        "completionTokens": [entry.completion_tokens for entry in entries],
        "seconds": [_rounded(entry.seconds) for entry in entries],
        "words": [entry.words for entry in entries],
        "prompts": prompts,
    }


def json_block(rows: Sequence[Mapping[str, Any]]) -> str:
    """Transcripts of some rows as JSON; a prompt that several of them share stands once.

    `{"prompts": [messages, ...], "rows": [{"prompt": place in prompts, "completion": messages, ...}, ...]}`
    """
    places: dict[str, int] = {}
    shown = []
    for row in rows:
        transcript = transcript_of(row)
        prompt = json_text(transcript["prompt"])
        transcript["prompt"] = places.setdefault(prompt, len(places))
        shown.append(json_text(transcript))
    return f'{{"prompts":[{",".join(places)}],"rows":[{",".join(shown)}]}}'


def json_text(value: Any) -> str:
    """JSON for a script element: compact, and without a character that could end the element.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def groups_by_prompt(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Entries by prompt, in order of their example ids, each by generation and run; whatever the order of arrival."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.example, []).append(entry)
    return [
        sorted(groups[example], key=lambda entry: (entry.run, entry.generation))
        for example in sorted(groups, key=_order)
    ]


def sampled_examples(numbers: RolloutColumns, most: int) -> set[str]:
    """The examples whose rollouts are in a sample of at most `most`, as `sampled_groups` draws it."""
    sizes = numbers.sizes
    groups = [[example] * sizes[example] for example in sorted(sizes, key=_order)]
    return {group[0] for group in sampled_groups(groups, most)}


def sampled_groups(groups: Sequence[Sequence[_Item]], most: int) -> list[list[_Item]]:
    """At most `most` items: whole groups, evenly spaced over all; of a single group too large, its first."""
    total = sum(map(len, groups))
    if total <= most:
        return [list(group) for group in groups]
    count = max(1, len(groups) * most // total)
    kept: list[list[_Item]] = []
    room = most
    for place in range(count):
        group = list(groups[place * len(groups) // count])[:room]
        room -= len(group)
        if group:
            kept.append(group)
    return kept


def _outcome(row: Mapping[str, Any]) -> str:
    outcome = row.get("outcome")
    if outcome is None:
        # runs of before outcomes were told
        return "?" if _number(row.get("reward")) is None else "completed"
    return sys.intern(str(outcome)[:40])


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    return {str(name)[:200]: value for name, value in metrics_of(row).items() if math.isfinite(value)}


def _order(example: str) -> tuple[int, int, str]:
    return (0, int(example), "") if example.isdecimal() and len(example) < 20 else (1, 0, example)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _count(value: Any) -> int:
    number = _number(value)
    return 0 if number is None else int(number)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
