"""Where an evaluation's results go: one line a rollout as it finishes, and what was run beside it.

A run directory holds `results.jsonl` (a line a rollout, append-only, handed to the operating system one by one),
`contents.jsonl` (large texts that those lines refer to, each once), `failures.jsonl` (the full text and traceback of
what went wrong) and `metadata.json` (what was run, with which versions, and the summary). Where a rollout was done
again, the later line counts. What is promised: a process that is killed loses nothing finished. What is not: that the
disk keeps it when the machine loses power.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from verifiers.errors import ConfigError
from verifiers.evals.contents import CONTENTS, ContentReader, ContentWriter, has_references
from verifiers.evals.json_lines import json_line, mend_last_line, plain
from verifiers.rollouts.rollout import Rollout

__all__ = [
    "COLUMNS",
    "CONTENTS",
    "FAILURES",
    "METADATA",
    "RESULTS",
    "ResultStore",
    "StoredRun",
    "iter_rows",
    "json_line",
    "mend_last_line",
    "metrics_of",
    "new_run_directory",
    "read_metadata",
    "read_run",
    "result_row",
]

RESULTS, FAILURES, METADATA = "results.jsonl", "failures.jsonl", "metadata.json"

COLUMNS = (
    "example_id",
    "generation",
    "prompt",
    "completion",
    "answer",
    "task",
    "info",
    "outcome",
    "reward",
    "error",
    "generation_ms",
    "scoring_ms",
    "prompt_tokens",
    "completion_tokens",
    "turns",
    "attempts",
    "metrics",
)
"""Columns of results.jsonl; every further one is a reward function's value."""

_LONGEST_ERROR = 1000


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it lies on disk.

    Attributes:
        directory: of the run.
        metadata: what was run; empty where the file is missing.
        rows: one for each rollout, by example and generation; where one was done again, its last.
    """

    directory: Path
    metadata: dict[str, Any]
    rows: list[dict[str, Any]]

    def metrics(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Each reward function's value in one of the rows."""
        return metrics_of(row)


def read_run(directory: str | Path) -> StoredRun:
    """Read a run directory, also one that is being written or was killed: a torn last line is left out.

    Raises:
        ConfigError: there is no run there, or a line before the last is damaged.
    """
    path = Path(directory)
    if not (path / RESULTS).is_file():
        raise ConfigError(f"{str(directory)!r} holds no {RESULTS}; give the directory of a run.")
    last: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in iter_rows(path):
        last[row.get("example_id"), row.get("generation")] = row
    rows = [last[key] for key in sorted(last, key=lambda key: (str(type(key[0])), key))]
    return StoredRun(path, read_metadata(path), rows)


def read_metadata(directory: Path) -> dict[str, Any]:
    """What metadata.json says; empty where it is missing.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        found = json.loads((directory / METADATA).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{str(directory / METADATA)!r} is no JSON ({error}); mend or delete it.") from None
    return found if isinstance(found, dict) else {}


def iter_rows(directory: Path, *, contents: bool = True) -> Iterator[dict[str, Any]]:
    """The lines of results.jsonl in the order in which they were written, one at a time; none where there is no file.

    Args:
        contents: put large texts back where a row refers to them; False for whoever reads numbers alone.

    Raises:
        ConfigError: a line before the last is damaged, or a large text is missing.
    """
    path = directory / RESULTS
    if not path.is_file():
        return
    reader = ContentReader(directory)
    torn: tuple[int, Exception] | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                raise ConfigError(f"line {torn[0]} of {str(path)!r} is damaged ({torn[1]}); mend or delete it.")
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no JSON object")
            except ValueError as error:
                torn = number, error
            else:
                yield reader.restored(row) if contents and has_references(line) else row


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Each reward function's value in a row: its column `metrics`, or else every column that is not one of ours."""
    found = row.get("metrics")
    if not isinstance(found, Mapping):
        found = {name: value for name, value in row.items() if name not in COLUMNS}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def new_run_directory(env_id: str, model: str, root: str | Path = "outputs/evals") -> Path:
    """A fresh directory `<root>/<env>--<model>/<run id>`; slashes in the names become `--`.

    Raises:
        ConfigError: it cannot be made there.
    """
    directory = Path(root) / f"{env_id}--{model}".replace("/", "--") / uuid.uuid4().hex[:8]
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"results cannot be written under {str(root)!r}: {error}.") from error
    return directory


def result_row(rollout: Rollout) -> dict[str, Any]:
    """One line of results.jsonl: a rollout without its state."""
    row: dict[str, Any] = {
        "example_id": rollout.key.example_id,
        "generation": rollout.key.generation,
        "prompt": rollout.prompt,
        "completion": rollout.completion,
        "answer": rollout.answer,
        "task": rollout.task,
        "info": rollout.info,
        "outcome": str(rollout.outcome),
        "reward": rollout.reward,
        "error": None if rollout.failure is None else _shortened(str(rollout.failure)),
        "generation_ms": round(rollout.timing.generation_s * 1000, 3),
        "scoring_ms": round(rollout.timing.scoring_s * 1000, 3),
        "prompt_tokens": rollout.usage.prompt_tokens,
        "completion_tokens": rollout.usage.completion_tokens,
        "turns": rollout.turns,
        "attempts": rollout.attempts,
        "metrics": dict(rollout.metrics),
    }
    # a reward function must not overwrite a column of ours
    row.update({name: value for name, value in rollout.metrics.items() if name not in row})
    return row


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]} ... ({len(text)} characters)"


def _failure_row(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    assert failure is not None
    trace = None if failure.exception is None else "".join(traceback.format_exception(failure.exception))
    return {
        "example_id": rollout.key.example_id,
        "generation": rollout.key.generation,
        "outcome": str(rollout.outcome),
        "kind": failure.kind,
        "text": failure.text,
        "traceback": trace,
    }


class ResultStore:
    """Appends rollouts to `results.jsonl` as they finish, and writes `metadata.json` at the start.

    Args:
        directory: an existing directory, empty or of the run that goes on.
        metadata: what was run; never a key or its value.
        hide: applied to every line and text before it is written; takes secrets out.

    Raises:
        ConfigError: on entering, when another process writes to the directory.
    """

    def __init__(
        self, directory: Path, metadata: Mapping[str, Any], hide: Callable[[str], str] | None = None
    ) -> None:
        self.directory = directory
        self.metadata = dict(metadata)
        self._hide = hide or (lambda text: text)
        self._file: IO[str] | None = None
        self._failures: IO[str] | None = None
        self._contents: ContentWriter | None = None
        self._lock: IO[str] | None = None

    def __enter__(self) -> ResultStore:
        self._lock = (self.directory / ".lock").open("w")
        try:
            # the kernel lets go of it when the process dies, however it dies
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"another process is writing to {str(self.directory)!r}; wait for it, or start anew with --fresh."
            ) from None
        try:
            for name in (RESULTS, FAILURES):
                mend_last_line(self.directory / name)
            self.write_metadata()
            self._contents = ContentWriter(self.directory, self._hide)
            self._file = (self.directory / RESULTS).open("a", encoding="utf-8")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as closing:
            # a full disk may refuse the last bytes of one; the others are closed all the same, the lock last
            for file in (self._lock, self._failures, self._contents, self._file):
                if file is not None:
                    closing.callback(file.close)

    def append(self, rollout: Rollout) -> None:
        """Write one rollout and hand it to the operating system, so that a killed run loses nothing finished."""
        assert self._file is not None
        assert self._contents is not None
        if rollout.failure is not None:
            if self._failures is None:
                self._failures = (self.directory / FAILURES).open("a", encoding="utf-8")
            # before the row: whoever sees the row finds its failure
            self._failures.write(self._hide(json_line(_failure_row(rollout))) + "\n")
            self._failures.flush()
        # its large contents before the row as well
        self._file.write(self._hide(self._contents.line(result_row(rollout))) + "\n")
        self._file.flush()

    def write_metadata(self, **more: Any) -> None:
        """Write metadata.json anew, with `more` added."""
        self.metadata.update(more)
        partial = self.directory / ".metadata.json.partial"
        text = json.dumps(plain(self.metadata), indent=2, ensure_ascii=False)
        partial.write_text(self._hide(text) + "\n", encoding="utf-8", errors="replace")
        os.replace(partial, self.directory / METADATA)
