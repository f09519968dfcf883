"""The record of a training run: its numbers, some rollouts, and its settings. The report is made of it alone.

    run.json        settings, plan, versions, when it was started and resumed, how it ended
    metrics.jsonl   a line a log: step, optimizer steps since the line before, every metric, failures by error
    samples.jsonl   a line a prompt: some of its rollouts at one step

All lines are appended, and a run that is resumed from a checkpoint removes those after it: the files always have the
lineage of the weights, each step once and in order.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiers.evals.json_lines import json_line, plain
from verifiers.log import Redactor

__all__ = [
    "METRICS",
    "OTHER_ERRORS",
    "RUN",
    "SAMPLES",
    "ErrorCounts",
    "RunRecord",
    "error_key",
    "is_training_run",
    "read_lines",
    "read_run",
]

RUN = "run.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"

logger = logging.getLogger("verifiers.train")


def is_training_run(directory: str | Path) -> bool:
    """Return True for a directory that holds the record of a training run."""
    return (Path(directory) / RUN).is_file() and (Path(directory) / METRICS).is_file()


def read_run(directory: str | Path) -> dict[str, Any]:
    """Return the content of run.json; empty where it is missing or damaged."""
    try:
        run = json.loads((Path(directory) / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return run if isinstance(run, dict) else {}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; a line that was cut off while it was written is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), (int, float)):
                yield row


class RunRecord:
    """Writes a run's record. A file that cannot be written is warned of once, and costs the run nothing else.

    Args:
        directory: of the run.
        resume_step: the optimizer step that the run is resumed from; None for a new run, which removes what an
            earlier run left there.
        owes_evaluation: that step's evaluation is repeated or resumed, and will be logged then.
        redact: takes secrets out of every text.

    Attributes:
        redact: the same, for texts that are cut or changed before they come here.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        resume_step: int | None,
        owes_evaluation: bool = False,
        redact: Redactor | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.redact = redact or Redactor([])
        self._warned = False
        self._run = read_run(directory) if resume_step is not None else {}
        with self._warning():
            self.directory.mkdir(parents=True, exist_ok=True)
            for name in (METRICS, SAMPLES):
                self._keep_until(self.directory / name, resume_step, owes_evaluation)

    @property
    def run(self) -> Mapping[str, Any]:
        """Content of run.json."""
        return self._run

    def describe(self, **fields: Any) -> None:
        """Put fields into run.json, beside those that are there."""
        self._run.update(fields)
        with self._warning():
            self._replace(RUN, self.redact(json.dumps(plain(self._run), indent=1)) + "\n")

    def write_metrics(self, step: int, steps: int, logs: Mapping[str, Any], failures: Mapping[str, int]) -> None:
        """Append the numbers of one log.

        Args:
            step: the optimizer step of the log.
            logs: metrics by name.
            steps: optimizer steps since the last one; 0 for an evaluation, and for failures between two logs.
            failures: rollouts that failed meanwhile, by error.
        """
        line: dict[str, Any] = {"step": step, "steps": steps, "at": round(time.time(), 1)}
        for name, value in logs.items():
            if isinstance(value, (int, float)) and name not in line:
                line[name] = float(f"{value:.6g}") if math.isfinite(value) else None
        if failures:
            line["failures"] = dict(failures)
        self._append(METRICS, [line])

    def write_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rollouts as of `samples.py`."""
        self._append(SAMPLES, rows)

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._warning(), (self.directory / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write("".join(self.redact(json_line(row)) + "\n" for row in rows))

    def _keep_until(self, path: Path, step: int | None, owes_evaluation: bool) -> None:
        if not path.exists():
            return

        def stays(row: Mapping[str, Any]) -> bool:
            if step is None or row["step"] > step:
                return False
            owed = owes_evaluation and row["step"] == step
            return not (owed and any(name.startswith("eval_") for name in row))

        kept = [json_line(row) + "\n" for row in read_lines(path) if stays(row)]
        self._replace(path.name, "".join(kept))

    def _replace(self, name: str, text: str) -> None:
        partial = self.directory / f".{name}.partial"
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, self.directory / name)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                text = "the record of the run in %s cannot be written, so its report has gaps: %s"
                logger.warning(text, self.directory, error)


OTHER_ERRORS = "other errors"
"""Key under which errors beyond the commonest are counted."""

_MOST_HELD = 1000
_ONE_OF_A_KIND = re.compile(
    r"0x[0-9a-fA-F]+"
    r"|\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b"
    # a request's or a session's name: a word, then letters and digits mixed
    r"|(?<=[-_])(?=[0-9A-Za-z]*\d)(?=[0-9A-Za-z]*[A-Za-z])[0-9A-Za-z]{8,}\b"
    r"|\b\d{5,}\b"
)


def error_key(text: str) -> str:
    """Return the text with addresses, ids and long numbers as "…"."""
    return _ONE_OF_A_KIND.sub("…", text)


class ErrorCounts:
    """Counts of errors by their text; past a number of texts, further ones are counted together."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, texts: Iterable[str]) -> None:
        """Count the failures that these texts tell of."""
        for text in texts:
            error = error_key(text)
            is_known = error in self._counts or len(self._counts) < _MOST_HELD
            self._counts[error if is_known else OTHER_ERRORS] += 1

    def take(self, most: int) -> dict[str, int]:
        """Return the commonest errors, with all others as `OTHER_ERRORS`, and start counting from zero."""
        others = self._counts.pop(OTHER_ERRORS, 0)
        kept = dict(self._counts.most_common(most))
        others += self._counts.total() - sum(kept.values())
        self._counts.clear()
        return {**kept, OTHER_ERRORS: others} if others else kept
