"""The stored evaluations of a training run: `evals/step-N` in its directory, each as `vf-eval` writes one.

They tell the lineage of the weights, as blocks.jsonl does: a run that goes on from a checkpoint takes out the
evaluations of later steps, since it trains those again. Storing is a service to whoever reads: where the disk
refuses, a warning says so and the training goes on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.hiding import Hider
from verifiers.evals.provenance import environment_provenance, git_provenance, versions
from verifiers.evals.resume import Finished, finished_rollouts, run_identity
from verifiers.evals.store import ResultStore, read_metadata
from verifiers.evals.tally import Tally
from verifiers.rollouts.rollout import Rollout

__all__ = ["EVALUATIONS", "EvaluationRecord", "EvaluationRecords", "provenance", "tolerated"]

EVALUATIONS = "evals"
"""In a run's directory."""

logger = logging.getLogger("verifiers.train")


@functools.cache
def provenance(env_name: str) -> dict[str, Any]:
    """What an evaluation's metadata says of the environment's source and of the versions; found out once."""
    return {**environment_provenance(env_name), "versions": versions(), "git": git_provenance()}


class EvaluationRecords:
    """The evaluations of one run, on rank 0.

    Args:
        output_dir: of the run.
        hide: takes secrets out of what is written.
        writes: False keeps nothing.
    """

    def __init__(self, output_dir: str | Path, hide: Hider | None = None, *, writes: bool = True) -> None:
        self.root = Path(output_dir) / EVALUATIONS
        self.hide = hide or Hider(())
        self.writes = writes
        self._ours: set[str] = set()

    def begin_run(self, first_step: int) -> None:
        """Keep what is of the lineage that goes on at `first_step`. An earlier run's was put aside with all of it."""
        if not self.writes or first_step == 0:
            return
        with tolerated("evaluations of later steps stay where they are"):
            self._discard_after(first_step)

    def own(self) -> set[Path]:
        """What this process has stored: before it trains, that is of the run that begins."""
        return {self.root / name for name in self._ours}

    def record(
        self, step: int, prefix: str, name: str, metadata: Mapping[str, Any], *, resumes: bool
    ) -> EvaluationRecord:
        """The record of one set's evaluation.

        Args:
            step: the optimizer step whose weights are evaluated.
            prefix: of the metrics; another than "eval" is another evaluation of the same step.
            name: of the set.
            resumes: go on with what is stored of the very same weights, where it is the same evaluation.
        """
        directory = self.root / (f"step-{step}" if prefix == "eval" else f"step-{step}-{prefix}")
        if name:
            directory /= name
        if directory.exists() and not resumes:
            directory = _fresh(directory)
        self._ours.add(directory.relative_to(self.root).parts[0])
        return EvaluationRecord(directory, metadata, self.hide, writes=self.writes)

    def _discard_after(self, step: int) -> None:
        for path in self.root.glob("step-*"):
            number = path.name.split("-")[1]
            if number.isdigit() and int(number) > step:
                shutil.rmtree(path)


class EvaluationRecord:
    """Where one set's evaluation is written; it writes what the disk takes, and never raises for the rest.

    Args:
        directory: of the evaluation.
        metadata: what is run, with every entry of `resume.IDENTITY`.
        hide: takes secrets out of what is written.
        writes: False keeps nothing.
    """

    def __init__(
        self, directory: Path, metadata: Mapping[str, Any], hide: Hider | None = None, *, writes: bool = True
    ) -> None:
        self.directory = directory
        self.writes = writes
        self.metadata = {**metadata, "identity": run_identity(metadata)}
        self.hide = hide or Hider(())
        self._store: ResultStore | None = None

    def finished(self, whole_groups: bool) -> Finished:
        """What is stored of this evaluation already; anything else that lies there is removed."""
        nothing = Finished(Tally(self.hide))
        if not self.writes or not self.directory.is_dir():
            return nothing
        try:
            stored = read_metadata(self.directory)
            if stored.get("identity") == self.metadata["identity"]:
                self.metadata = {**self.metadata, **stored}
                each = self.metadata["rollouts_per_example"]
                return finished_rollouts(self.directory, each, whole_groups=whole_groups, hide=self.hide)
        except (OSError, ConfigError) as error:
            logger.warning("%s cannot be gone on with (%s): it is run again.", self.directory, error)
        with tolerated(f"{self.directory} is written over"):
            shutil.rmtree(self.directory)
        return nothing

    def open(self) -> None:
        """Begin to write."""
        if not self.writes:
            return
        with tolerated(f"{self.directory} is not written", self._give_up):
            self.directory.mkdir(parents=True, exist_ok=True)
            began = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "started_at": time.time()}
            store = ResultStore(self.directory, {**began, **self.metadata, "status": "running"}, self.hide)
            self._store = store.__enter__()

    def append(self, rollout: Rollout) -> None:
        """Write one rollout."""
        if self._store is not None:
            with tolerated(f"the rest of {self.directory} is not written", self._give_up):
                self._store.append(rollout)

    def close(self, summary: Mapping[str, Any], *, finished: bool) -> bool:
        """Write the summary and end; True where all of it is on the disk."""
        store, self._store = self._store, None
        if store is None:
            return False
        written = False
        with tolerated(f"the summary of {self.directory} is not written"):
            store.write_metadata(summary=dict(summary), status="finished" if finished else "stopped")
            written = True
        with tolerated(f"{self.directory} may lack its end"):
            store.__exit__(None, None, None)
        return written

    def _give_up(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with tolerated(f"{self.directory} may lack its end"):
                store.__exit__(None, None, None)


@contextlib.contextmanager
def tolerated(consequence: str, then: Callable[[], None] | None = None) -> Iterator[None]:
    """Say that the disk refused something, and go on."""
    try:
        yield
    except (OSError, ConfigError) as error:  # a ConfigError says that another process writes there
        logger.warning("%s (%s: %s); the training goes on.", consequence, type(error).__name__, error)
        if then is not None:
            then()


def _fresh(directory: Path) -> Path:
    number = 2
    while (found := directory.with_name(f"{directory.name}-{number}")).exists():
        number += 1
    return found
