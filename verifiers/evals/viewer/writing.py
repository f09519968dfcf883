"""report.html: an evaluation in one file that needs nothing else, or two evaluations side by side."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.store import RESULTS, iter_rows, read_metadata
from verifiers.evals.viewer.data import (
    ROWS_PER_BLOCK,
    Entry,
    columns_of,
    entry_of,
    groups_by_prompt,
    json_block,
    sampled_groups,
)
from verifiers.evals.viewer.page import page_text
from verifiers.evals.viewer.runs import run_name
from verifiers.evals.viewer.summary import difference_of, summary_of

__all__ = ["MOST_BYTES", "MOST_ROLLOUTS", "comparison_text", "write_comparison_report", "write_evaluation_report"]

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
    metadata, entries = _read(directory, 0)
    summary = summary_of(entries, metadata, run_name(directory))
    return _write(out or directory / "report.html", _page([directory], [summary], entries, None))


def write_comparison_report(before: Path, after: Path, out: Path) -> Path:
    """Write one page that shows two evaluations side by side, with the differences prompt by prompt.

    Args:
        before, after: run directories; prompts are the same where their example ids are.
        out: the file to write.

    Returns:
        The path written to.

    Raises:
        ConfigError: one of them holds no results, or damaged ones.
        OSError: the file cannot be written.
    """
    return _write(out, comparison_text(before, after))


def comparison_text(before: Path, after: Path) -> str:
    """The page of `write_comparison_report`."""
    summaries, entries = [], []
    for run, directory in enumerate((Path(before), Path(after))):
        metadata, found = _read(directory, run)
        entries.append(found)
        summaries.append(summary_of(found, metadata, run_name(directory)))
    difference = difference_of(entries[0], entries[1])
    return _page([Path(before), Path(after)], summaries, entries[0] + entries[1], difference)


def _read(directory: Path, run: int) -> tuple[dict[str, Any], list[Entry]]:
    """What was run, and the entries that count: of a rollout that was done again, the last."""
    if not (directory / RESULTS).is_file():
        raise ConfigError(f"{str(directory)!r} holds no {RESULTS}; give the directory of a run.")
    last: dict[tuple[str, int], Entry] = {}
    for place, row in enumerate(iter_rows(directory)):
        entry = entry_of(row, run, place)
        last[entry.example, entry.generation] = entry
    return read_metadata(directory), list(last.values())


def _page(
    directories: Sequence[Path],
    summaries: Sequence[dict[str, Any]],
    entries: Sequence[Entry],
    difference: dict[str, Any] | None,
) -> str:
    # rows of two runs are grouped together, so that a sample holds both sides of a prompt
    shown = sampled_groups(groups_by_prompt(entries), MOST_ROLLOUTS)
    rows = _chosen_rows(directories, {(entry.run, entry.place) for group in shown for entry in group})
    while True:
        flat = [entry for group in shown for entry in group]
        parts = (flat[at : at + ROWS_PER_BLOCK] for at in range(0, len(flat), ROWS_PER_BLOCK))
        blocks = [json_block([rows.get((entry.run, entry.place), {}) for entry in part]) for part in parts]
        size = sum(len(block.encode("utf-8", "backslashreplace")) for block in blocks)
        if size <= MOST_BYTES or len(flat) <= 1:
            break
        shown = sampled_groups(shown, max(1, int(len(flat) * 0.95 * MOST_BYTES / size)))
    data = {
        "live": False,
        "runs": summaries,
        "difference": difference,
        "columns": columns_of(flat),
        "rowsPerBlock": ROWS_PER_BLOCK,
        "total": len(entries),
    }
    title = " against ".join(summary["title"] for summary in summaries)
    return page_text(title, data, blocks)


def _chosen_rows(directories: Sequence[Path], chosen: set[tuple[int, int]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows by run and place. They are read a second time, so that memory holds a sample and never the whole run."""
    return {
        (run, place): row
        for run, directory in enumerate(directories)
        for place, row in enumerate(iter_rows(directory))
        if (run, place) in chosen
    }


def _write(target: Path, text: str) -> Path:
    """In one step: readers see the file as it was before, or whole."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        # lone surrogates stand in JSON alone, where backslash escapes are how they are written
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target
