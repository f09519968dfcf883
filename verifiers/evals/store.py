"""Where an evaluation's results go: one line a rollout as it finishes, and what was run beside it."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout

__all__ = ["ResultStore", "new_run_directory", "result_row"]


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
        "error": None if rollout.failure is None else str(rollout.failure),
        "generation_ms": round(rollout.timing.generation_s * 1000, 3),
        "scoring_ms": round(rollout.timing.scoring_s * 1000, 3),
        "prompt_tokens": rollout.usage.prompt_tokens,
        "completion_tokens": rollout.usage.completion_tokens,
    }
    # a reward function must not overwrite a column of ours
    row.update({name: value for name, value in rollout.metrics.items() if name not in row})
    return row


class ResultStore:
    """Appends rollouts to `results.jsonl` as they finish, and writes `metadata.json` at the start.

    Args:
        directory: an existing directory.
        metadata: what was run; never a key or its value.
    """

    def __init__(self, directory: Path, metadata: Mapping[str, Any]) -> None:
        self.directory = directory
        self._metadata = dict(metadata)
        self._file: IO[str] | None = None

    def __enter__(self) -> ResultStore:
        self.write_metadata()
        self._file = (self.directory / "results.jsonl").open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, rollout: Rollout) -> None:
        """Write one rollout and hand it to the operating system, so that a killed run loses nothing finished."""
        assert self._file is not None
        self._file.write(json.dumps(result_row(rollout), ensure_ascii=False, default=str) + "\n")
        self._file.flush()

    def write_metadata(self, **more: Any) -> None:
        """Write metadata.json anew, with `more` added."""
        self._metadata.update(more)
        partial = self.directory / ".metadata.json.partial"
        partial.write_text(
            json.dumps(self._metadata, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8"
        )
        os.replace(partial, self.directory / "metadata.json")
