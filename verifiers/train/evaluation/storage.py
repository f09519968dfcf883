"""The stored evaluations of a training run: `evals/step-N` in its directory, each as `vf-eval` writes one.

They have the lineage of the weights, as blocks.jsonl has: a run that is resumed from a checkpoint removes the
evaluations of later steps, since it trains those again. Where the disk refuses, a warning says so and the training
continues.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.evals.evaluation_run import EvaluationRun, new_run
from verifiers.evals.provenance import environment_provenance, git_provenance, versions
from verifiers.evals.store import ResultStore
from verifiers.log import Redactor
from verifiers.monitoring.history import EVAL_REWARD, name_eval_reward
from verifiers.rollouts.rollout import Rollout

__all__ = [
    "EVALUATIONS",
    "BestEffortStore",
    "StoredEvaluations",
    "best_effort",
    "evaluation_lines",
    "provenance",
    "remove_later_evaluations",
]

EVALUATIONS = "evals"
"""The folder of stored evaluations in a run's directory."""

logger = logging.getLogger("verifiers.train")


@functools.cache
def provenance(env_name: str) -> dict[str, Any]:
    """Return versions and the environment's source for the metadata of evaluations; found out once a process."""
    return {**environment_provenance(env_name), "versions": versions(), "git": git_provenance()}


class StoredEvaluations:
    """The evaluations of one training run on the disk; used on rank 0.

    Args:
        redact: gives what takes secrets out of what is written.
        writes: False keeps nothing.

    Attributes:
        own: directories that this process has made; before the training they belong to the run that begins.
    """

    def __init__(self, output_dir: str | Path, redact: Callable[[], Redactor], *, writes: bool = True) -> None:
        self.root = Path(output_dir) / EVALUATIONS
        self.writes = writes
        self.own: set[Path] = set()
        self._redact = redact

    def run(self, step: int, prefix: str, name: str, metadata: Mapping[str, Any], rubric: Any) -> EvaluationRun:
        """Return the evaluation of one set, in a directory of its own.

        Args:
            prefix: of the metrics; another than "eval" is another evaluation of the same step.
            metadata: of the evaluation, with every entry of `verifiers.evals.evaluation_run.IDENTITY`.
        """
        directory = self.root / (f"step-{step}" if prefix == "eval" else f"step-{step}-{prefix}")
        if name:
            directory /= name
        if directory.exists():
            directory = _fresh(directory)
        self.own.add(self.root / directory.relative_to(self.root).parts[0])
        return new_run(directory, metadata, rubric, redact=self._redact())


def remove_later_evaluations(output_dir: str | Path, step: int) -> None:
    """Remove the evaluations of steps after `step`, at which a run is resumed."""
    with best_effort("evaluations of later steps stay where they are"):
        for path in (Path(output_dir) / EVALUATIONS).glob("step-*"):
            number = path.name.split("-")[1]
            if number.isdigit() and int(number) > step:
                shutil.rmtree(path)


class BestEffortStore:
    """A `ResultStore` of a run whose disk may refuse: a warning says so, and the training continues.

    Args:
        run: whose directory is created and written to at once.

    Attributes:
        is_whole: True once all of it is on the disk, with its summary.
    """

    def __init__(self, run: EvaluationRun) -> None:
        self.directory = run.directory
        self.is_whole = False
        self._store: ResultStore | None = None
        with best_effort(f"{self.directory} is not written", self._give_up):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._store = ResultStore(self.directory, {**run.metadata, "status": "running"}, run.redact).__enter__()

    def append(self, rollout: Rollout) -> None:
        """Write one rollout."""
        if self._store is not None:
            with best_effort(f"the rest of {self.directory} is not written", self._give_up):
                self._store.append(rollout)

    def close(self, summary: Mapping[str, Any], *, finished: bool) -> None:
        """Write the summary and end."""
        if self._store is not None:
            with best_effort(f"the summary of {self.directory} is not written"):
                self._store.write_metadata(summary=dict(summary), status="finished" if finished else "stopped")
                self.is_whole = True
        self._give_up()

    def _give_up(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with best_effort(f"{self.directory} may lack its end"):
                store.__exit__(None, None, None)


@contextlib.contextmanager
def best_effort(consequence: str, then: Callable[[], None] | None = None) -> Iterator[None]:
    """Warn of what the disk refuses, and continue."""
    try:
        yield
    except (OSError, ConfigError) as error:  # a ConfigError says that another process writes there
        logger.warning("%s (%s: %s); the training continues.", consequence, type(error).__name__, error)
        if then is not None:
            then()


def _fresh(directory: Path) -> Path:
    number = 2
    while (found := directory.with_name(f"{directory.name}-{number}")).exists():
        number += 1
    return found


def evaluation_lines(state: Any, args: Any) -> list[str]:
    """Return lines with the last evaluation of each eval set, and with the best step where that was asked for."""
    last: dict[str, dict[str, Any]] = {}
    for entry in state.log_history:
        last.update({name: entry for name in entry if EVAL_REWARD.fullmatch(name)})
    lines = []
    for metric, entry in last.items():
        prefix = metric.removesuffix("_reward")
        error = entry.get(f"{metric}_stderr")
        text = f"{name_eval_reward(metric, entry)} at step {entry['step']}: {entry[metric]:.3f}"
        text += f" ± {error:.3f}" if error is not None else ""
        text += f" ({entry.get(f'{prefix}_prompts', 0):.0f} prompts"
        failed = entry.get(f"{prefix}_failed", 0)
        lines.append(text + (f", {failed:.0f} rollouts failed)" if failed else ")"))
    if lines and state.best_global_step:
        text = f"best {args.metric_for_best_model}: {state.best_metric:.3f} at step {state.best_global_step}"
        loaded = args.load_best_model_at_end and state.best_model_checkpoint is not None
        lines.append(text + (", whose weights are saved" if loaded else ""))
    return lines
