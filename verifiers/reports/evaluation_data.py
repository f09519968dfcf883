"""Rows of results.jsonl as the page's script reads them: columns of small values, and blocks of transcripts.

The page reads the columns when it opens and a block when one of its rollouts is looked at, so that opening a page of
10,000 rollouts does not wait for 10,000 transcripts.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verifiers.evals.results import RolloutResults
from verifiers.evals.statistics import Estimate, mean_and_stderr_clustered, paired_difference
from verifiers.evals.store import metrics_of
from verifiers.evals.summary import RIGHT_FROM, at_k, rollouts_planned
from verifiers.notebook import as_text, messages_of
from verifiers.reports.page import json_text

__all__ = [
    "ROWS_PER_BLOCK",
    "Entry",
    "columns_of",
    "difference_of",
    "entry_of",
    "example_of",
    "groups_by_prompt",
    "json_block",
    "last_words",
    "numbers_of",
    "sampled_examples",
    "sampled_groups",
    "summary_of",
]

ROWS_PER_BLOCK = 100

_PROMPT_WORDS = 140
_LAST_WORDS = 160
"""Characters of a rollout's last words."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Entry:
    """One rollout without its transcript.

    Attributes:
        run: 0, or 1 for the second of two runs.
        offset: of its row in results.jsonl, in bytes.
        asked: a hash of its prompt, answer and task; "" where prompts are not compared.
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
    offset: int = 0
    asked: str = ""


def entry_of(row: Mapping[str, Any], run: int = 0, offset: int = 0, asked: str = "") -> Entry:
    """Return the small values of a row; what is missing or of another type counts as absent."""
    milliseconds = _number(row.get("generation_ms"))
    said = next(_newest_first(row.get("prompt"), "prompt"), {}).get("text", "")
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
        offset=offset,
        asked=sys.intern(asked),
    )


def example_of(row: Mapping[str, Any]) -> str:
    """Return the example id of a row as the page has it."""
    return sys.intern(as_text(row.get("example_id"))[:200])


def numbers_of(rows: Iterable[Mapping[str, Any]], into: RolloutResults | None = None) -> RolloutResults:
    """Return the numbers of rows of any shape; example ids are those of `example_of`, and no transcript is looked at.

    Args:
        into: numbers that these are added to.
    """
    numbers = RolloutResults() if into is None else into
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
    """Return the entries as lists of equal length, and each example's prompt once."""
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
    """Return the transcripts of some rows as JSON; a prompt that several of them share stands once.

    `{"prompts": [messages, ...], "rows": [{"prompt": place in prompts, "completion": messages, ...}, ...]}`
    """
    places: dict[str, int] = {}
    shown = []
    for row in rows:
        transcript = _transcript(row)
        prompt = json_text(transcript["prompt"])
        transcript["prompt"] = places.setdefault(prompt, len(places))
        shown.append(json_text(transcript))
    return f'{{"prompts":[{",".join(places)}],"rows":[{",".join(shown)}]}}'


def groups_by_prompt(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Group entries by prompt, in order of example ids, each by run and generation; whatever the order of arrival."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.example, []).append(entry)
    return [
        sorted(groups[example], key=lambda entry: (entry.run, entry.generation))
        for example in sorted(groups, key=_order)
    ]


def sampled_examples(numbers: RolloutResults, most: int) -> set[str]:
    """Return the examples whose rollouts are in a sample of at most `most`, as `sampled_groups` draws it."""
    sizes = numbers.sizes
    groups = [[example] * sizes[example] for example in sorted(sizes, key=_order)]
    return {group[0] for group in sampled_groups(groups, most)}


def sampled_groups(groups: Sequence[Sequence[_Item]], most: int) -> list[list[_Item]]:
    """Return at most `most` items: whole groups, evenly spaced over all; of a single group too large, its first."""
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
    return sys.intern(str(row.get("outcome", "?"))[:40])


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


def summary_of(numbers: RolloutResults, metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one run's numbers, ready for JSON; null stands for what the data cannot tell.

    Args:
        numbers: of all rollouts of the run so far.
        name: what the run is called where it stands beside another.
    """
    summary = metadata.get("summary")
    seconds = summary.get("seconds") if isinstance(summary, Mapping) else None
    chosen = summary.get("right_from") if isinstance(summary, Mapping) else None
    right_from = float(chosen) if isinstance(chosen, (int, float)) and math.isfinite(chosen) else RIGHT_FROM
    counts = numbers.counts()
    return {
        "name": name,
        "title": _title(metadata, name),
        "started": as_text(metadata.get("started"))[:80],
        "metadata": as_text(dict(metadata)),
        "rollouts": counts.rollouts,
        "expected": rollouts_planned(metadata) or None,
        "finished": _is_finished(metadata),
        "prompts": counts.prompts,
        "promptsTrainedOn": _count(metadata.get("prompts_trained_on")),
        "scored": counts.scored,
        "outcomes": dict(counts.outcomes),
        "measures": _measures(numbers),
        "promptTokens": numbers.prompt_tokens,
        "completionTokens": numbers.completion_tokens,
        "seconds": seconds if isinstance(seconds, (int, float)) and math.isfinite(seconds) else None,
        "passAtK": _pass_curve(numbers, right_from),
        "rightFrom": right_from,
    }


def difference_of(
    before: Sequence[Entry],
    after: Sequence[Entry],
    settings: Sequence[Mapping[str, Any]] = ({}, {}),
) -> dict[str, Any]:
    """Return the second run's gain, paired by prompt: one estimate of each measure that both have.

    A prompt that asks something else in the second run, under the same example id, is in no pair, and is named.

    Args:
        before: entries of the first run; `asked` tells prompts apart.
    """
    asked = {entry.example: entry.asked for entry in before}
    other = {entry.example for entry in after if asked.get(entry.example, entry.asked) != entry.asked}
    before, after = ([entry for entry in entries if entry.example not in other] for entries in (before, after))
    rows = {}
    for name in _names([*before, *after]):
        one, two = _by_prompt(before, name), _by_prompt(after, name)
        rows[name] = _numbers(paired_difference(one, two))
    # a prompt that one side never scored has nothing to be compared with
    one, two = _by_prompt(before, "reward"), _by_prompt(after, "reward")
    return {
        "measures": rows,
        "shared": len(one.keys() & two.keys()),
        "onlyBefore": len(one.keys() - two.keys()),
        "onlyAfter": len(two.keys() - one.keys()),
        "askedOtherwise": sorted(other),
        "settings": [
            {
                "name": name,
                "before": as_text(settings[0].get(name))[:200],
                "after": as_text(settings[1].get(name))[:200],
            }
            for name in ("env", "env_args")
            if settings[0].get(name) != settings[1].get(name)
        ],
    }


def _is_finished(metadata: Mapping[str, Any]) -> bool:
    status = metadata.get("status")
    # older runs have no status, but got their summary at the end
    return status == "finished" if isinstance(status, str) else isinstance(metadata.get("summary"), Mapping)


def _title(metadata: Mapping[str, Any], name: str) -> str:
    parts = [as_text(metadata[key])[:120] for key in ("env", "model") if metadata.get(key)]
    return " / ".join(parts) or name


def _names(entries: Sequence[Entry]) -> list[str]:
    return ["reward", *sorted({name for entry in entries for name in entry.metrics} - {"reward"})]


def _by_prompt(entries: Sequence[Entry], name: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for entry in entries:
        # what was not scored has no part in any mean, whichever of its functions did answer
        value = None if entry.reward is None else entry.reward if name == "reward" else entry.metrics.get(name)
        if value is not None:
            found.setdefault(entry.example, []).append(value)
    return found


def _measures(numbers: RolloutResults) -> list[dict[str, Any]]:
    return [
        {"name": name, **_numbers(mean_and_stderr_clustered(list(numbers.values(name).values())))}
        for name in numbers.metrics
    ]


def _pass_curve(numbers: RolloutResults, right_from: float) -> list[dict[str, Any]]:
    """Return pass@k over prompts for the k of `at_k`, with 95 % intervals."""
    rows = at_k(list(numbers.values().values()), right_from=right_from)
    return [{"k": row.k, **_numbers(row.pass_at)} for row in rows]


def _numbers(estimate: Estimate) -> dict[str, Any]:
    shown = {name: getattr(estimate, name) for name in ("mean", "stderr", "low", "high")}
    numbers = {name: None if math.isnan(value) else float(f"{value:.6g}") for name, value in shown.items()}
    return {**numbers, "prompts": estimate.prompts, "rollouts": estimate.rollouts}


def _transcript(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts that the page shows of one row.

    Returns:
        "prompt" and "completion" (lists of messages as in `messages_of`), "answer" as text, "task", "info" as JSON
        text or "", and "error" or None.
    """
    info, error = row.get("info"), row.get("error")
    return {
        "prompt": messages_of(row.get("prompt"), "prompt"),
        "completion": messages_of(row.get("completion"), "completion"),
        "answer": as_text(row.get("answer")),
        "task": as_text(row.get("task")),
        "info": as_text(info) if info else "",
        "error": as_text(error) if error else None,
    }


def _newest_first(messages: Any, role: str) -> Iterator[dict[str, Any]]:
    """Yield messages like `messages_of`, the last one first, so that the end of a long conversation is cheap."""
    if isinstance(messages, list):
        return (messages_of([message], role)[0] for message in reversed(messages))
    return iter(messages_of(messages, role))


def last_words(row: Mapping[str, Any]) -> str:
    """Return the end of a rollout on one line: why it failed, or else the last thing that was said."""
    if row.get("error"):
        return _one_line(as_text(row["error"]), _LAST_WORDS)
    for message in _newest_first(row.get("completion"), "completion"):
        calls = ", ".join(call["name"] for call in message.get("calls", ()))
        words = _one_line(_after_thinking(message.get("text", "")), _LAST_WORDS) or (
            f"calls {calls}" if calls else ""
        )
        if words:
            return words
    return ""


def _one_line(text: str, characters: int) -> str:
    # only the end is looked at: splitting a text of megabytes for a line of it takes seconds over many rows
    return " ".join(text[-4 * characters :].split())[-characters:]


def _after_thinking(text: str) -> str:
    """Return the text after the reasoning; the reasoning itself where nothing follows."""
    head, end, rest = text.rpartition("</think>")
    return rest if end and rest.strip() else head or rest
