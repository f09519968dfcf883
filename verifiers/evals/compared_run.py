"""What a comparison needs of a run: its numbers, and a hash of what each prompt asked. Transcripts are not kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.columns import RolloutColumns
from verifiers.evals.contents import ContentReader
from verifiers.evals.store import RESULTS, iter_rows, read_metadata

__all__ = ["ComparedRun", "prompt_digest", "read_compared_run"]


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        directory: of the run.
        metadata: what was run; empty where the file is missing.
        columns: the numbers of its rollouts.
        asked: for each example id, a hash of its prompt, answer and task.
    """

    directory: Path
    metadata: Mapping[str, Any]
    columns: RolloutColumns
    asked: Mapping[Any, str]

    @classmethod
    def of_rows(
        cls,
        directory: Path,
        metadata: Mapping[str, Any],
        rows: Iterable[dict[str, Any]],
        restored: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: row,
    ) -> ComparedRun:
        """The run that these rows make; they are read once and not kept.

        Args:
            restored: puts large texts back into a row; asked for one row of each prompt.
        """
        columns, asked = RolloutColumns(), dict[Any, str]()
        for row in rows:
            columns.add(row)
            if row["example_id"] not in asked:
                asked[row["example_id"]] = prompt_digest(restored(row))
        return cls(directory, metadata, columns, asked)


def read_compared_run(directory: str | Path) -> ComparedRun:
    """Read a run directory row by row.

    Raises:
        ConfigError: there is no run there, or it is damaged.
    """
    path = Path(directory)
    if not (path / RESULTS).is_file():
        raise ConfigError(f"{str(directory)!r} holds no {RESULTS}; give the directory of a run.")
    rows = iter_rows(path, contents=False)
    return ComparedRun.of_rows(path, read_metadata(path), rows, ContentReader(path).restored)


def prompt_digest(row: Mapping[str, Any]) -> str:
    """A hash of what a row's rollout was asked: prompt, answer and task."""
    asked = [row.get("prompt"), row.get("answer"), row.get("task")]
    text = json.dumps(asked, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
