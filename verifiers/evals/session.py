"""One evaluation from its plan to its summary: opened or gone on with, run, stored, counted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verifiers.errors import NothingScoredError
from verifiers.evals.hiding import Hider
from verifiers.evals.loop_lag import LoopLag
from verifiers.evals.resume import Finished, find_run, finished_rollouts, run_identity, scores_whole_groups
from verifiers.evals.runner import Interruption, iter_requests, run_units
from verifiers.evals.store import new_run_directory, read_metadata
from verifiers.evals.tally import Tally
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.run import RolloutRunner

__all__ = ["EvaluationRun", "KeepsRollouts", "open_run"]


class KeepsRollouts(Protocol):
    """What a run hands its finished rollouts to; `ResultStore` writes them down."""

    def append(self, rollout: Rollout) -> None: ...


@dataclass(slots=True)
class EvaluationRun:
    """An evaluation that is new or goes on; made by `open_run`.

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
    hide: Hider
    interruption: Interruption = field(default_factory=Interruption)
    lag: LoopLag = field(default_factory=LoopLag)
    ran: int = 0
    tokens: int = 0

    @property
    def tally(self) -> Tally:
        """Numbers of all rollouts so far, this process's and those before."""
        return self.finished.tally

    @property
    def is_complete(self) -> bool:
        """True where every rollout has a reward already, so that nothing is left to run."""
        return self.finished.count >= self.planned

    async def run(self, runner: RolloutRunner, dataset: Any, store: KeepsRollouts) -> None:
        """Run what is left. It returns early after an interruption; everything finished is stored in any case."""

        def take(rollout: Rollout) -> None:
            store.append(rollout)
            self.tally.add(rollout)
            self.ran += 1
            self.tokens += rollout.usage.completion_tokens

        requests = iter_requests(dataset, self.metadata["rollouts_per_example"], self.metadata["seed"])
        units = self.finished.left(requests, whole_groups=self.whole_groups)
        async with self.lag.measured():
            await run_units(runner, units, take, self.interruption)

    def summary(self, seconds: float, **options: Any) -> dict[str, Any]:
        """The run in numbers.

        Args:
            seconds: that this process ran rollouts; those of earlier ones are added.
            **options: `right_from` and `prices` of `summarize`.
        """
        before = (self.metadata.get("summary") or {}).get("seconds") or 0.0
        found = self.tally.summary(before + seconds, self.metadata, **options)
        if self.lag.samples:
            found["loop_lag_ms"] = {"p50": self.lag.quantile_ms(0.5), "p95": self.lag.quantile_ms(0.95)}
            found["loop_lag_ms"]["max"] = round(self.lag.max_ms, 1)
        return found

    @property
    def lag_distorts(self) -> bool:
        """True where the event loop was so late that measured times are not the server's."""
        return bool(self.ran) and self.lag.distorts(self.tally.generation_s / len(self.tally) * 1000)

    def require_scores(self) -> None:
        """Raise NothingScoredError, with the commonest cause, where no rollout got a reward."""
        if self.tally.scored:
            return
        commonest = self.tally.commonest_failure()
        cause = f"; most often: {commonest[0]} ({commonest[1]} times)" if commonest else ""
        raise NothingScoredError(f"none of {len(self.tally)} evaluation rollouts got a reward{cause}")


def open_run(
    plan: Mapping[str, Any],
    rubric: Any,
    root: str | Path,
    *,
    fresh: bool = False,
    hide: Hider | None = None,
) -> EvaluationRun:
    """The newest run that this plan belongs to, or a new one.

    Args:
        plan: metadata of the run, with every entry of `resume.IDENTITY`.
        rubric: of the environment.
        root: directory of all evaluations.
        fresh: never go on with a run.

    Raises:
        ConfigError: nothing can be written there, or a stored run is damaged.
    """
    hide = hide or Hider(())
    metadata: dict[str, Any] = {**plan, "identity": run_identity(plan)}
    planned = metadata["num_examples"] * metadata["rollouts_per_example"]
    whole_groups = scores_whole_groups(rubric)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    session = {"started": now, "versions": plan.get("versions"), "git": plan.get("git")}
    parent = Path(root) / f"{metadata['env']}--{metadata['model']}".replace("/", "--")
    directory = None if fresh else find_run(parent, metadata["identity"])
    if directory is None:
        directory = new_run_directory(metadata["env"], metadata["model"], root)
        metadata |= {"started": now, "started_at": time.time(), "sessions": [session]}
        return EvaluationRun(directory, metadata, planned, Finished(Tally(hide)), whole_groups, hide)
    stored = read_metadata(directory)
    finished = finished_rollouts(directory, metadata["rollouts_per_example"], whole_groups=whole_groups, hide=hide)
    if finished.count >= planned:
        # nothing is run today, so nothing of today belongs to it
        return EvaluationRun(directory, stored, planned, finished, whole_groups, hide)
    metadata |= {name: stored[name] for name in ("started", "started_at", "summary") if name in stored}
    metadata["sessions"] = [*stored.get("sessions", ()), session]
    return EvaluationRun(directory, metadata, planned, finished, whole_groups, hide)
