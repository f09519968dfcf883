"""The stored evaluations of a training run: `evals/step-N` in its directory, each as `vf-eval` writes one.

They have the lineage of the weights, as blocks.jsonl has: a run that is resumed from a checkpoint removes the
evaluations of later steps, since it trains those again.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verifiers.evals.evaluation_run import EvaluationRun, new_run
from verifiers.evals.store import environment_provenance, git_provenance, versions
from verifiers.log import Redactor
from verifiers.monitoring.history import EVAL_REWARD, name_eval_reward

EVALUATIONS = "evals"
"""The folder of stored evaluations in a run's directory."""


@functools.cache
def provenance(env_name: str) -> dict[str, Any]:
    """Return versions and the environment's source for the metadata of evaluations; found out once a process."""
    return {**environment_provenance(env_name), "versions": versions(), "git": git_provenance()}


class StoredEvaluations:
    """The evaluations of one training run on the disk; used on rank 0. Where `writes` is False nothing is kept.

    Attributes:
        own: directories that this process has made; before the training they belong to the run that begins.
    """

    def __init__(self, output_dir: str | Path, redact: Callable[[], Redactor], *, writes: bool = True) -> None:
        self.root = Path(output_dir) / EVALUATIONS
        self.writes = writes
        self.own: set[Path] = set()
        self._redact = redact

    def run(self, step: int, prefix: str, name: str, metadata: Mapping[str, Any], env: Any) -> EvaluationRun:
        """Return the evaluation of one set, in a directory of its own.

        Another prefix than "eval" is another evaluation of the same step.
        """
        directory = self.root / (f"step-{step}" if prefix == "eval" else f"step-{step}-{prefix}")
        if name:
            directory /= name
        if directory.exists():
            directory = _fresh(directory)
        self.own.add(self.root / directory.relative_to(self.root).parts[0])
        return new_run(directory, metadata, env, redact=self._redact())


def remove_later_evaluations(output_dir: str | Path, step: int) -> None:
    """Remove the evaluations of steps after `step`, at which a run is resumed."""
    for path in (Path(output_dir) / EVALUATIONS).glob("step-*"):
        number = path.name.split("-")[1]
        if number.isdigit() and int(number) > step:
            shutil.rmtree(path, ignore_errors=True)


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
