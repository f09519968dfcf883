"""Run directories: found under a folder, read whole, or followed while they grow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.columns import RolloutColumns
from verifiers.evals.contents import ContentReader, has_references
from verifiers.evals.store import RESULTS, read_metadata
from verifiers.evals.viewer.data import ROWS_PER_BLOCK, Entry, entry_of, json_block, numbers_of
from verifiers.evals.viewer.summary import summary_of

__all__ = ["GrowingRun", "find_runs", "known_metadata", "run_name"]

_DEEPEST = 4
_CHUNK_BYTES = 8 << 20


def known_metadata(directory: Path) -> dict[str, Any]:
    """What metadata.json holds; empty where it is missing or damaged, since the results can be shown all the same."""
    try:
        return read_metadata(directory)
    except (ConfigError, OSError, RecursionError):
        return {}


def run_name(directory: Path) -> str:
    """How people find the run again: the last two parts of its path."""
    return "/".join(Path(os.path.abspath(directory)).parts[-2:])


def find_runs(root: Path) -> dict[str, Path]:
    """Directories under `root` that hold results, by their path below it, newest first; a run itself by its name.

    Links that lead out of `root` are not followed.
    """
    if (root / RESULTS).is_file():
        return {root.resolve().name or "run": root}
    real_root = root.resolve()
    found: list[tuple[float, str, Path]] = []
    for parent, names, files in os.walk(root):
        path = Path(parent)
        depth = len(path.relative_to(root).parts)
        names[:] = [] if depth >= _DEEPEST else [name for name in names if not name.startswith(".")]
        results = path / RESULTS
        if RESULTS in files and results.resolve().is_relative_to(real_root):
            found.append((-results.stat().st_mtime, path.relative_to(root).as_posix(), path))
    return {key: path for _, key, path in sorted(found)}


class GrowingRun:
    """A run that is read as it grows: each refresh reads what was appended since the last.

    Not for several threads at once. Only small values are kept; transcripts are read again from the file.

    Args:
        directory: of the run.

    Attributes:
        entries: one a row, in order of arrival.
        epoch: counts how often the file was replaced or cut, which makes row numbers mean something else.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entries: list[Entry] = []
        self.epoch = 0
        self._numbers = RolloutColumns()
        self._spans: list[tuple[int, int]] = []
        self._offset = 0
        self._file_id: tuple[int, int] | None = None
        self._contents = ContentReader(directory, strict=False)
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
                self._numbers = RolloutColumns()
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
        """The run's numbers as of the last refresh; reckoned again only where rows or metadata changed."""
        metadata = known_metadata(self.directory)
        if self._summary is None or self._summary[:3] != (self.epoch, len(self.entries), metadata):
            numbers = summary_of(self._numbers, metadata, run_name(self.directory))
            self._summary = (self.epoch, len(self.entries), metadata, numbers)
        return self._summary[3]

    def block(self, number: int) -> str:
        """Transcripts of rows `number * ROWS_PER_BLOCK` and following, as JSON; fewer at the end, or none."""
        start = number * ROWS_PER_BLOCK
        rows: list[Mapping[str, Any]] = []
        with (self.directory / RESULTS).open("rb") as file:
            for offset, size in self._spans[start : start + ROWS_PER_BLOCK] if start >= 0 else ():
                file.seek(offset)
                rows.append(self._row(file.read(size)) or {})
        return json_block(rows)

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """A line's row with its large texts; None for one that was torn by a crash."""
        try:
            row = json.loads(line.decode("utf-8", "replace"))
            if not isinstance(row, dict):
                return None
            return self._contents.restored(row) if has_references(line) else row
        except (ValueError, RecursionError):
            return None
