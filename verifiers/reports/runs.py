"""Run directories: found under a folder, or followed while they grow."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.results import RolloutResults
from verifiers.evals.store import RESULTS, parse_row, read_metadata
from verifiers.monitoring.run_log import METRICS, is_training_run
from verifiers.reports.evaluation_data import ROWS_PER_BLOCK, Entry, entry_of, json_block, numbers_of, summary_of

__all__ = ["GrowingRun", "find_runs", "known_metadata", "newest_metrics", "run_name"]

_DEEPEST = 4
_CHUNK_BYTES = 8 << 20
_TAIL_BYTES = 64 << 10


def known_metadata(directory: Path) -> dict[str, Any]:
    """Return what metadata.json holds; empty where it is missing or damaged, since the results can still be shown."""
    try:
        return read_metadata(directory)
    except (ConfigError, OSError, RecursionError):
        return {}


def run_name(directory: Path) -> str:
    """Return the last two parts of a run's path, by which people find the run again."""
    return "/".join(Path(os.path.abspath(directory)).parts[-2:])


def find_runs(root: Path) -> dict[str, Path]:
    """Return the directories under `root` that hold an evaluation or a training run, by their path, newest first.

    Where `root` is a run itself, it has the name of its directory. Links that lead out of `root` are not followed.
    """
    real_root = root.resolve()
    found: list[tuple[float, str, Path]] = []
    for parent, names, _ in os.walk(root):
        path = Path(parent)
        depth = len(path.relative_to(root).parts)
        names[:] = [] if depth >= _DEEPEST else [name for name in names if not name.startswith(".")]
        file = _record_of(path)
        if file is not None and file.resolve().is_relative_to(real_root):
            key = path.relative_to(root).as_posix() if depth else real_root.name or "run"
            found.append((-file.stat().st_mtime, key, path))
    return {key: path for _, key, path in sorted(found)}


def newest_metrics(directory: Path) -> dict[str, Any]:
    """Return the newest value of each metric of a training run, of its last lines alone."""
    with (directory / METRICS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    newest: dict[str, Any] = {}
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            newest.update(json.loads(line))
    return newest


def _record_of(directory: Path) -> Path | None:
    """Return the file that grows while a run is in progress; None where the directory holds no run."""
    if (directory / RESULTS).is_file():
        return directory / RESULTS
    return directory / METRICS if is_training_run(directory) else None


class GrowingRun:
    """A run that is read as it grows: each refresh reads what was appended since the last.

    Not for several threads at once. Only small values are kept; transcripts are read again from the file.

    Attributes:
        entries: one a row, in order of arrival.
        epoch: counts how often the file was replaced or cut, which makes row numbers mean something else.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entries: list[Entry] = []
        self.epoch = 0
        self._numbers = RolloutResults()
        self._spans: list[tuple[int, int]] = []
        self._offset = 0
        self._file_id: tuple[int, int] | None = None
        self._summary: tuple[int, int, dict[str, Any], dict[str, Any]] | None = None

    def refresh(self) -> int:
        """Read what is new; the number of rows now. A last line without its end waits for the next time.

        Raises:
            OSError: the file is gone.
        """
        with (self.directory / RESULTS).open("rb") as file:
            status = os.fstat(file.fileno())
            file_id = (status.st_dev, status.st_ino)
            if self._file_id not in (None, file_id) or status.st_size < self._offset:
                self.entries, self._spans, self._offset, self.epoch = [], [], 0, self.epoch + 1
                self._numbers = RolloutResults()
            self._file_id = file_id
            file.seek(self._offset)
            while lines := file.readlines(_CHUNK_BYTES):
                for line in lines:
                    if not line.endswith(b"\n"):
                        return len(self.entries)
                    row = self._row(line)
                    if row is not None:
                        self.entries.append(entry_of(row))
                        numbers_of([row], self._numbers)
                        self._spans.append((self._offset, len(line)))
                    self._offset += len(line)
        return len(self.entries)

    def summary(self) -> dict[str, Any]:
        """Return the run's numbers as of the last refresh; computed again only where rows or metadata changed."""
        metadata = known_metadata(self.directory)
        if self._summary is None or self._summary[:3] != (self.epoch, len(self.entries), metadata):
            numbers = summary_of(self._numbers, metadata, run_name(self.directory))
            self._summary = (self.epoch, len(self.entries), metadata, numbers)
        return self._summary[3]

    def block(self, number: int) -> str:
        """Return the transcripts of the rows from `number * ROWS_PER_BLOCK` on as JSON; fewer at the end, or none."""
        start = number * ROWS_PER_BLOCK
        rows: list[Mapping[str, Any]] = []
        with (self.directory / RESULTS).open("rb") as file:
            for offset, size in self._spans[start : start + ROWS_PER_BLOCK] if start >= 0 else ():
                file.seek(offset)
                rows.append(self._row(file.read(size)) or {})
        return json_block(rows)

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """Return a line's row; None for one that a crash cut off."""
        try:
            return parse_row(line.decode("utf-8", "replace").encode())
        except (ValueError, RecursionError):
            return None
