"""report.html: an evaluation in one file that needs nothing else, or two evaluations side by side.

The page's script reads columns of small values when it opens, and a block of transcripts when one of its rollouts is
looked at, so that opening a page of 10,000 rollouts does not wait for 10,000 transcripts.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verifiers.evals.comparison import prompt_digest
from verifiers.evals.results import RolloutResults
from verifiers.evals.statistics import Estimate, paired_difference
from verifiers.evals.store import RESULTS, finite, iter_lines, metrics_of, parse_row, read_metadata, run_at
from verifiers.evals.summary import RIGHT_FROM, metric_bounds, rollouts_planned, summarize
from verifiers.notebook import as_text, messages_of
from verifiers.reports.page import json_text, page_text, write_page

MOST_ROLLOUTS = 10_000
"""Rollouts that a file holds; of more it shows a sample of whole prompts, and says so."""

MOST_BYTES = 48 << 20
"""Bytes of transcripts that a file holds."""

ROWS_PER_BLOCK = 100

_PROMPT_CHARACTERS = 140
_LAST_CHARACTERS = 160

_Item = TypeVar("_Item")


def write_evaluation_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page that shows an evaluation: its numbers, charts, and rollouts to read; return its path.

    Over `MOST_ROLLOUTS` rollouts, or `MOST_BYTES` of transcripts, the page shows the rollouts of a sample of prompts,
    evenly spaced, and says so; its numbers are those of all. The same rows give the same bytes.

    Args:
        run_dir: directory with results.jsonl and metadata.json; it may still be growing.
        out: the file to write; default report.html in `run_dir`.

    Raises:
        ConfigError: `run_dir` holds no results, or damaged ones.
    """
    directory = run_at(run_dir)
    entries, numbers = read_entries(directory)
    summary = summary_of(numbers, read_metadata(directory), run_name(directory))
    return write_page(out or directory / "report.html", _page([directory], [summary], entries, None))


def write_comparison_report(before: Path, after: Path, out: Path) -> Path:
    """Write one page that shows two evaluations side by side, with the differences prompt by prompt.

    Prompts are the same where example ids, texts, answers and tasks are; the page says which have the same id alone.
    """
    return write_page(out, comparison_text(before, after))


def comparison_text(before: Path, after: Path, *, home: str | None = None) -> str:
    """Return the page of `write_comparison_report`, with a link to `home` where a server has a list of runs."""
    summaries, entries, settings = [], [], []
    directories = [run_at(before), run_at(after)]
    for run, directory in enumerate(directories):
        found, numbers = read_entries(directory, run)
        entries.append(found)
        settings.append(read_metadata(directory))
        summaries.append(summary_of(numbers, settings[run], run_name(directory)))
    difference = difference_of(entries[0], entries[1], settings)
    return _page(directories, summaries, entries[0] + entries[1], difference, home)


def run_name(directory: Path) -> str:
    """Return the last two parts of a run's path, by which people find the run again."""
    return "/".join(Path(os.path.abspath(directory)).parts[-2:])


def _page(
    directories: Sequence[Path],
    summaries: Sequence[dict[str, Any]],
    entries: Sequence[Entry],
    difference: dict[str, Any] | None,
    home: str | None = None,
) -> str:
    # rows of two runs are grouped together, so that a sample holds both sides of a prompt
    shown = sampled_groups(groups_by_prompt(entries), MOST_ROLLOUTS)
    while True:
        flat = [entry for group in shown for entry in group]
        parts = (flat[at : at + ROWS_PER_BLOCK] for at in range(0, len(flat), ROWS_PER_BLOCK))
        blocks = [transcripts(directories, part) for part in parts]
        size = sum(len(block.encode("utf-8", "backslashreplace")) for block in blocks)
        if size <= MOST_BYTES or len(flat) <= 1:
            break
        shown = sampled_groups(shown, max(1, int(len(flat) * 0.95 * MOST_BYTES / size)))
    data = {
        "live": False,
        "home": home,
        "runs": summaries,
        "difference": difference,
        "columns": columns_of(flat),
        "rowsPerBlock": ROWS_PER_BLOCK,
        "total": sum(summary["rollouts"] for summary in summaries),
    }
    title = " against ".join(summary["title"] for summary in summaries)
    return page_text(title, data, blocks)


def transcripts(directories: Sequence[Path], entries: Sequence[Entry]) -> str:
    """Return the block of some entries' rows, read from their runs' files: memory never holds a run."""
    rows = []
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context((directory / RESULTS).open("rb")) for directory in directories]
        for entry in entries:
            files[entry.run].seek(entry.offset)
            rows.append(shown_row(files[entry.run].readline()) or {})
    return json_block(rows)


def shown_row(line: bytes) -> dict[str, Any] | None:
    """Return a line's row; None for one that a crash cut off."""
    try:
        return parse_row(line.decode("utf-8", "replace").encode())
    except ValueError:
        return None


def read_entries(directory: Path, run: int = 0) -> tuple[list[Entry], RolloutResults]:
    """Return a run's rollouts without transcripts, of one that was done again the last, and the numbers of all."""
    last: dict[tuple[str, int], Entry] = {}
    asked: dict[str, str] = {}
    numbers, offset = RolloutResults(), 0
    for line, row in iter_lines(directory):
        if (example := example_of(row)) not in asked:
            asked[example] = prompt_digest(row)
        entry = entry_of(row, run, offset, asked[example])
        last[entry.example, entry.generation] = entry
        numbers.add(entry.counted())
        offset += len(line)
    return list(last.values()), numbers


@dataclass(frozen=True, slots=True)
class Entry:
    """One rollout without its transcript.

    Attributes:
        run: 0, or 1 for the second of two runs.
        metrics: each reward function's value, where it is a finite number.
        seconds: of generation; None where the row does not say.
        prompt: the end of its prompt, on one line.
        offset: of its row in results.jsonl, in bytes.
        asked: a hash of its prompt, answer and task.
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

    def counted(self) -> dict[str, Any]:
        """Return what `RolloutResults` counts, whatever shape the row had."""
        names = ("generation", "outcome", "reward", "metrics", "prompt_tokens", "completion_tokens")
        return {"example_id": self.example, **{name: getattr(self, name) for name in names}}


def entry_of(row: Mapping[str, Any], run: int = 0, offset: int = 0, asked: str = "") -> Entry:
    """Return the small values of a row; what is missing or of another type counts as absent."""
    milliseconds = finite(row.get("generation_ms"))
    said = next(_newest_first(row.get("prompt"), "prompt"), {}).get("text", "")
    return Entry(
        # the rollouts of a prompt share these texts, which would otherwise be most of what many entries take
        example=example_of(row),
        generation=_count(row.get("generation")),
        run=run,
        outcome=sys.intern(str(row.get("outcome", "?"))[:40]),
        reward=finite(row.get("reward")),
        metrics=_metrics(row),
        prompt_tokens=_count(row.get("prompt_tokens")),
        completion_tokens=_count(row.get("completion_tokens")),
        seconds=None if milliseconds is None else milliseconds / 1000,
        words=last_words(row),
        prompt=sys.intern(" ".join(said[: 4 * _PROMPT_CHARACTERS].split())[:_PROMPT_CHARACTERS]),
        offset=offset,
        asked=sys.intern(asked),
    )


def example_of(row: Mapping[str, Any]) -> str:
    return sys.intern(as_text(row.get("example_id"))[:200])


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


def _metrics(row: Mapping[str, Any]) -> dict[str, float]:
    return {str(name)[:200]: value for name, value in metrics_of(row).items()}


def _order(example: str) -> tuple[int, int, str]:
    return (0, int(example), "") if example.isdecimal() and len(example) < 20 else (1, 0, example)


def _count(value: Any) -> int:
    number = finite(value)
    return 0 if number is None else int(number)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def summary_of(numbers: RolloutResults, metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one run's numbers, ready for JSON; null stands for what the data cannot tell.

    `name` is what the run is called where it stands beside another.
    """
    summary = metadata.get("summary")
    seconds = summary.get("seconds") if isinstance(summary, Mapping) else None
    right_from = finite(summary.get("right_from")) if isinstance(summary, Mapping) else None
    found = summarize(numbers, metadata, right_from=RIGHT_FROM if right_from is None else right_from)
    counts = found.counts
    return {
        "name": name,
        "title": " / ".join(as_text(metadata[key])[:120] for key in ("env", "model") if metadata.get(key)) or name,
        "started": as_text(metadata.get("started"))[:80],
        "metadata": as_text(dict(metadata)),
        "rollouts": counts.rollouts,
        "expected": rollouts_planned(metadata) or None,
        # runs of before it have no status, but got their summary at the end
        "finished": metadata.get("status", "finished" if isinstance(summary, Mapping) else "") == "finished",
        "prompts": counts.prompts,
        "promptsTrainedOn": finite(metadata.get("prompts_trained_on")),
        "scored": counts.scored,
        "outcomes": dict(counts.outcomes),
        "measures": [{"name": name, **_numbers(one)} for name, one in found.measures.items()],
        "promptTokens": found.prompt_tokens,
        "completionTokens": found.completion_tokens,
        "seconds": finite(seconds),
        "passAtK": [{"k": row.k, **_numbers(row.pass_at)} for row in found.at_k],
        "rightFrom": found.right_from,
    }


def difference_of(
    before: Sequence[Entry],
    after: Sequence[Entry],
    settings: Sequence[Mapping[str, Any]] = ({}, {}),
) -> dict[str, Any]:
    """Return the second run's gain, paired by prompt: one estimate of each measure that both have.

    A prompt that asks something else in the second run, under the same example id, is in no pair, and is named.
    """
    asked = {entry.example: entry.asked for entry in before}
    other = {entry.example for entry in after if asked.get(entry.example, entry.asked) != entry.asked}
    both = [RolloutResults(each.counted() for each in side if each.example not in other) for side in (before, after)]
    rows = {}
    for name in ["reward", *sorted({name for results in both for name in results.metrics} - {"reward"})]:
        one, two = (results.values(name) for results in both)
        bounds = metric_bounds(name, settings, [*one.values(), *two.values()])
        rows[name] = _numbers(paired_difference(one, two, bounds=bounds))
    # a prompt that one side never scored has nothing to be compared with
    scored = [{example for example, rewards in results.values().items() if rewards} for results in both]
    return {
        "measures": rows,
        "shared": len(scored[0] & scored[1]),
        "onlyBefore": len(scored[0] - scored[1]),
        "onlyAfter": len(scored[1] - scored[0]),
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


def _numbers(estimate: Estimate) -> dict[str, Any]:
    shown = {name: getattr(estimate, name) for name in ("mean", "stderr", "low", "high")}
    numbers = {name: None if math.isnan(value) else float(f"{value:.6g}") for name, value in shown.items()}
    return {**numbers, "prompts": estimate.prompts, "rollouts": estimate.rollouts}


def _transcript(row: Mapping[str, Any]) -> dict[str, Any]:
    info = row.get("info")
    return {
        "prompt": messages_of(row.get("prompt"), "prompt"),
        "completion": messages_of(row.get("completion"), "completion"),
        "answer": as_text(row.get("answer")),
        "task": as_text(row.get("task")),
        "info": as_text(info) if info else "",
        "error": _why(row),
    }


def _newest_first(messages: Any, role: str) -> Iterator[dict[str, Any]]:
    """Yield messages like `messages_of`, the last one first, so that the end of a long conversation is cheap."""
    if isinstance(messages, list):
        return (messages_of([message], role)[0] for message in reversed(messages))
    return iter(messages_of(messages, role))


def _why(row: Mapping[str, Any]) -> str | None:
    """Return why a rollout failed, or else why its last answer is a refusal or was filtered."""
    if error := row.get("error"):
        return as_text(error)
    return f"refused: {as_text(row['refusal'])}" if row.get("refusal") else None


def last_words(row: Mapping[str, Any]) -> str:
    """Return the end of a rollout on one line: why it failed or was refused, or else the last thing that was said."""
    if why := _why(row):
        return _one_line(why, _LAST_CHARACTERS)
    for message in _newest_first(row.get("completion"), "completion"):
        calls = ", ".join(call["name"] for call in message.get("calls", ()))
        words = _one_line(_after_thinking(message.get("text", "")), _LAST_CHARACTERS) or (
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
