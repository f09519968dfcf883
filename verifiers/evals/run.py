"""One evaluation from its plan to its summary: new or continued, run, stored, counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verifiers.errors import NothingScoredError
from verifiers.evals.evaluation_loop import Interruption, LoopLag, iter_requests, run_units
from verifiers.evals.progress import Progress
from verifiers.evals.remaining import Finished, find_run, finished_rollouts, run_identity, scores_whole_groups
from verifiers.evals.store import new_run_directory, read_metadata
from verifiers.log import Redactor
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.runner import RolloutRunner

__all__ = ["EvaluationRun", "KeepsRollouts", "open_run", "run_in"]


class KeepsRollouts(Protocol):
    """A receiver of finished rollouts; `ResultStore` writes them down."""

    def append(self, rollout: Rollout) -> None: ...


@dataclass(slots=True)
class EvaluationRun:
    """An evaluation that is new or continued; made by `open_run`.

    Attributes:
        directory: where it is stored.
        metadata: what is run.
        planned: rollouts in all.
        finished: what was done before.
        whole_groups: the rubric scores a prompt's rollouts together.
        ran, tokens: rollouts and completion tokens of this process.
        interruption: ends it before its time.
    """

    directory: Path
    metadata: dict[str, Any]
    planned: int
    finished: Finished
    whole_groups: bool
    redact: Redactor
    interruption: Interruption = field(default_factory=Interruption)
    lag: LoopLag = field(default_factory=LoopLag)
    ran: int = 0
    tokens: int = 0

    @property
    def progress(self) -> Progress:
        """Numbers of all rollouts so far, this process's and those before."""
        return self.finished.progress

    @property
    def is_complete(self) -> bool:
        """True where every rollout has a reward already, so that nothing is left to run."""
        return self.finished.count >= self.planned

    async def run(self, runner: RolloutRunner, dataset: Any, store: KeepsRollouts | None) -> None:
        """Run what is left. Returns early after an interruption; everything finished is stored in any case."""

        def take(rollout: Rollout) -> None:
            if store is not None:
                store.append(rollout)
            self.progress.add(rollout)
            self.ran += 1
            self.tokens += rollout.usage.completion_tokens

        requests = iter_requests(dataset, self.metadata["rollouts_per_example"], self.metadata["seed"])
        units = self.finished.left(requests, whole_groups=self.whole_groups)
        async with self.lag.measured():
            await run_units(runner, units, take, self.interruption)

    def summary(self, seconds: float, **options: Any) -> dict[str, Any]:
        """Return the run in numbers.

        Args:
            seconds: that this process ran rollouts; those of earlier ones are added.
            **options: `right_from` and `prices` of `summarize`.
        """
        before = (self.metadata.get("summary") or {}).get("seconds") or 0.0
        found = self.progress.summary(before + seconds, self.metadata, **options)
        if self.lag.samples:
            found["loop_lag_ms"] = {"p50": self.lag.quantile_ms(0.5), "p95": self.lag.quantile_ms(0.95)}
            found["loop_lag_ms"]["max"] = round(self.lag.max_ms, 1)
        return found

    @property
    def lag_distorts(self) -> bool:
        """True where the event loop was so late that measured times are not the server's."""
        return bool(self.ran) and self.lag.distorts(self.progress.generation_s / len(self.progress) * 1000)

    def require_scores(self) -> None:
        """Raise NothingScoredError, with the commonest cause, where no rollout got a reward."""
        if self.progress.scored:
            return
        commonest = self.progress.commonest_failure()
        cause = f"; most often: {commonest[0]} ({commonest[1]} times)" if commonest else ""
        raise NothingScoredError(f"none of {len(self.progress)} evaluation rollouts got a reward{cause}")


def open_run(
    plan: Mapping[str, Any],
    rubric: Any,
    root: str | Path,
    *,
    fresh: bool = False,
    redact: Redactor | None = None,
) -> EvaluationRun:
    """Return the newest run that this plan belongs to, or a new one.

    Args:
        plan: metadata of the run, with every entry of `remaining.IDENTITY`.
        rubric: of the environment.
        root: directory of all evaluations.
        fresh: never continue a run.
        redact: takes secrets out of what is written.

    Raises:
        ConfigError: nothing can be written there, or a stored run is damaged.
    """
    parent = Path(root) / f"{plan['env']}--{plan['model']}".replace("/", "--")
    directory = None if fresh else find_run(parent, run_identity(plan))
    return run_in(directory or new_run_directory(plan["env"], plan["model"], root), plan, rubric, redact=redact)


def run_in(
    directory: Path, plan: Mapping[str, Any], rubric: Any, *, fresh: bool = False, redact: Redactor | None = None
) -> EvaluationRun:
    """Return the run of this plan in a directory: continued where the directory holds that run, else new.

    Args:
        directory: of the run; it need not exist yet.
        plan: as in `open_run`.
        rubric: as in `open_run`.
        fresh: ignore what is stored there.
        redact: takes secrets out of what is written.

    Raises:
        ConfigError: the stored run is damaged.
    """
    redact = redact or Redactor(())
    metadata: dict[str, Any] = {**plan, "identity": run_identity(plan)}
    planned = metadata["num_examples"] * metadata["rollouts_per_example"]
    whole_groups = scores_whole_groups(rubric)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    session = {"started": now, "versions": plan.get("versions"), "git": plan.get("git")}
    stored = {} if fresh else read_metadata(directory)
    if stored.get("identity") != metadata["identity"]:
        metadata |= {"started": now, "started_at": time.time(), "sessions": [session]}
        return EvaluationRun(directory, metadata, planned, Finished(Progress(redact)), whole_groups, redact)
    each = metadata["rollouts_per_example"]
    finished = finished_rollouts(directory, each, whole_groups=whole_groups, redact=redact)
    if finished.count >= planned:
        # nothing is run today, so nothing of today belongs to the run
        return EvaluationRun(directory, stored, planned, finished, whole_groups, redact)
    metadata |= {name: stored[name] for name in ("started", "started_at", "summary") if name in stored}
    metadata["sessions"] = [*stored.get("sessions", ()), session]
    return EvaluationRun(directory, metadata, planned, finished, whole_groups, redact)
