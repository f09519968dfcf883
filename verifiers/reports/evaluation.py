"""report.html: an evaluation in one file that needs nothing else, or two evaluations side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.comparison import prompt_digest
from verifiers.evals.results import RolloutResults
from verifiers.evals.store import RESULTS, iter_rows, parse_row, read_metadata
from verifiers.reports.evaluation_data import (
    ROWS_PER_BLOCK,
    Entry,
    columns_of,
    difference_of,
    entry_of,
    example_of,
    groups_by_prompt,
    json_block,
    numbers_of,
    sampled_examples,
    sampled_groups,
    summary_of,
)
from verifiers.reports.page import page_text, write_page
from verifiers.reports.runs import run_name

__all__ = [
    "MOST_BYTES",
    "MOST_ROLLOUTS",
    "comparison_text",
    "write_comparison_report",
    "write_evaluation_report",
]

MOST_ROLLOUTS = 10_000
"""Rollouts that a file holds; of more it shows a sample of whole prompts, and says so."""

MOST_BYTES = 48 << 20
"""Bytes of transcripts that a file holds."""


def write_evaluation_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page that shows an evaluation: its numbers, charts, and rollouts to read.

    Over `MOST_ROLLOUTS` rollouts, or `MOST_BYTES` of transcripts, the page shows the rollouts of a sample of prompts,
    evenly spaced, and says so; its numbers are those of all. The same rows give the same bytes.

    Args:
        run_dir: directory with results.jsonl and metadata.json; it may still be growing.
        out: the file to write; default report.html in `run_dir`.

    Returns:
        The path written to.

    Raises:
        ConfigError: `run_dir` holds no results, or damaged ones.
        OSError: the file cannot be written.
    """
    directory = Path(run_dir)
    numbers, metadata = _numbers(directory), read_metadata(directory)
    entries = _entries(directory, sampled_examples(numbers, MOST_ROLLOUTS))
    summary = summary_of(numbers, metadata, run_name(directory))
    return write_page(out or directory / "report.html", _page([directory], [summary], entries, None))


def write_comparison_report(before: Path, after: Path, out: Path) -> Path:
    """Write one page that shows two evaluations side by side, with the differences prompt by prompt.

    Args:
        after: run directory. Prompts are the same where example ids, texts, answers and tasks are; the page says
            which have the same id alone.

    Returns:
        The path written to.

    Raises:
        ConfigError: one of them holds no results, or damaged ones.
        OSError: the file cannot be written.
    """
    return write_page(out, comparison_text(before, after))


def comparison_text(before: Path, after: Path, *, home: str | None = None) -> str:
    """Return the page of `write_comparison_report`, with a link to `home` where a server has a list of runs."""
    summaries, entries, settings = [], [], []
    for run, directory in enumerate((Path(before), Path(after))):
        numbers, metadata = _numbers(directory), read_metadata(directory)
        settings.append(metadata)
        entries.append(_entries(directory, None, run))
        summaries.append(summary_of(numbers, metadata, run_name(directory)))
    difference = difference_of(entries[0], entries[1], settings)
    return _page([Path(before), Path(after)], summaries, entries[0] + entries[1], difference, home)


def _numbers(directory: Path) -> RolloutResults:
    """Return the numbers of a run, without any transcript."""
    if not (directory / RESULTS).is_file():
        raise ConfigError(f"{str(directory)!r} holds no {RESULTS}; give the directory of a run.")
    return numbers_of(iter_rows(directory))


def _entries(directory: Path, examples: set[str] | None, run: int = 0) -> list[Entry]:
    """Return the entries that count: of a rollout that was done again, the last.

    Args:
        examples: of these alone; None stands for all, with a hash of each prompt, for a comparison.
        run: 0, or 1 for the second of two runs.
    """
    last: dict[tuple[str, int], Entry] = {}
    asked: dict[str, str] = {}
    offset = 0
    with (directory / RESULTS).open("rb") as file:
        for line in file:
            try:
                row = parse_row(line)
            except ConfigError:
                raise
            except ValueError:
                break  # the last line, which is half-written: the others were read before
            example = example_of(row)
            if examples is None and example not in asked:
                asked[example] = prompt_digest(row)
            if examples is None or example in examples:
                entry = entry_of(row, run, offset, asked.get(example, ""))
                last[entry.example, entry.generation] = entry
            offset += len(line)
    return list(last.values())


def _page(
    directories: Sequence[Path],
    summaries: Sequence[dict[str, Any]],
    entries: Sequence[Entry],
    difference: dict[str, Any] | None,
    home: str | None = None,
) -> str:
    # rows of two runs are grouped together, so that a sample holds both sides of a prompt
    shown = sampled_groups(groups_by_prompt(entries), MOST_ROLLOUTS)
    rows = _Rows(directories)
    while True:
        flat = [entry for group in shown for entry in group]
        parts = (flat[at : at + ROWS_PER_BLOCK] for at in range(0, len(flat), ROWS_PER_BLOCK))
        blocks = [json_block([rows.row(entry) for entry in part]) for part in parts]
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


class _Rows:
    """Rows of some runs, read when they are asked for, so that memory holds a block of them and never a run."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._paths = [directory / RESULTS for directory in directories]

    def row(self, entry: Entry) -> dict[str, Any]:
        with self._paths[entry.run].open("rb") as file:
            file.seek(entry.offset)
            return parse_row(file.readline())
