"""Metrics of time: of each logged interval, and of a whole run.

The overlap ratio is O / min(G, T). T is the time in which the trainer works: all of it but waiting, pushing and
evaluating. G is the time in which a rollout runs or is scored, and O the time in which both happen; pushes and
evaluation, which stop one side for the other, count in none of them. 0 is strict turns; 1 means that the side with
less to do does all of it while the other works, so that no more overlap is to be had.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verifiers.monitoring.stage_timer import STAGES, StageUse
from verifiers.rollouts.run import ActivityReading

__all__ = ["RunTime", "interval_metrics"]

_NOT_WORKING = ("wait", "sync", "eval")
_GIB = float(1 << 30)


@dataclass(slots=True)
class RunTime:
    """Sums over some optimizer steps, in seconds unless it says otherwise.

    Attributes:
        steps: optimizer steps.
        stages: the trainer's seconds by stage.
        generator: in which a rollout ran or was scored, outside pushes and evaluation.
        overlapped: of these, in which the trainer worked.
        server: in which at least one rollout ran.
        scored_alone: in which the trainer waited and rollouts were scored, but none ran.
        waiting_rollouts: rollout-seconds run while the trainer waited.
        most_in_flight: the most rollouts that ran at once outside evaluation.
        peak_gib: highest memory by stage.
    """

    steps: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    generator: float = 0.0
    overlapped: float = 0.0
    server: float = 0.0
    scored_alone: float = 0.0
    waiting_rollouts: float = 0.0
    most_in_flight: float = 0.0
    sampled_tokens: float = 0.0
    trained_tokens: float = 0.0
    peak_gib: dict[str, float] = field(default_factory=dict)

    @property
    def wall(self) -> float:
        """All seconds."""
        return sum(self.stages.values())

    @property
    def working(self) -> float:
        """Seconds in which the trainer worked."""
        return sum(seconds for stage, seconds in self.stages.items() if stage not in _NOT_WORKING)

    @property
    def overlap(self) -> float | None:
        """The overlap ratio; None where one side had nothing to do."""
        least = min(self.generator, self.working)
        return min(1.0, self.overlapped / least) if least > 0 else None

    def share(self, *stages: str) -> float:
        """Return the part of all time that these stages took."""
        return sum(self.stages.get(stage, 0.0) for stage in stages) / self.wall if self.wall > 0 else 0.0

    @property
    def server_busy(self) -> float:
        """The part of all time in which at least one rollout ran."""
        return min(1.0, self.server / self.wall) if self.wall > 0 else 0.0

    @property
    def in_flight_while_waiting(self) -> float:
        """Rollouts that ran while the trainer waited, on average."""
        waited = self.stages.get("wait", 0.0)
        return self.waiting_rollouts / waited if waited > 0 else 0.0

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a logged interval: a dict of metrics with its number of optimizer steps as "steps"."""
        steps, step_s = _number(line, "steps"), _number(line, "time/step_s")
        if steps <= 0 or step_s <= 0:
            return
        wall = steps * step_s
        self.steps += steps
        for stage in STAGES:
            self.stages[stage] = self.stages.get(stage, 0.0) + steps * _number(line, f"time/{stage}_s")
            peak = _number(line, f"memory/{stage}_gib")
            if peak > 0:
                self.peak_gib[stage] = max(peak, self.peak_gib.get(stage, 0.0))
        self.generator += steps * _number(line, "time/generator_s")
        self.overlapped += steps * _number(line, "time/overlapped_s")
        self.scored_alone += steps * _number(line, "time/scored_alone_s")
        self.server += wall * _number(line, "rollouts/server_busy")
        waited = steps * _number(line, "time/wait_s")
        self.waiting_rollouts += waited * _number(line, "rollouts/in_flight_while_waiting")
        self.most_in_flight = max(self.most_in_flight, _number(line, "rollouts/most_in_flight"))
        self.sampled_tokens += wall * _number(line, "tokens/sampled_per_s")
        self.trained_tokens += wall * _number(line, "tokens/trained_per_s")


def interval_metrics(
    uses: Mapping[str, StageUse], steps: int, *, sampled_tokens: float = 0.0, trained_tokens: float = 0.0
) -> dict[str, float]:
    """Return the metrics of an interval: seconds per optimizer step, shares, means over time, and peaks.

    Args:
        uses: by stage, since the last time.
        steps: optimizer steps in the interval, at least 1.
        sampled_tokens: of the blocks that came in meanwhile.
    """
    wall = sum(use.seconds for use in uses.values())
    whole = sum((use.generator for use in uses.values()), start=ActivityReading())
    both = _sum_of_others(uses, ("sync", "eval"))
    overlapped = _sum_of_others(uses, _NOT_WORKING)
    waited = uses.get("wait", StageUse())
    time = RunTime(
        steps, {stage: use.seconds for stage, use in uses.items()}, both.busy_s, overlapped.busy_s, whole.generating_s
    )
    metrics = {f"time/{stage}_s": uses.get(stage, StageUse()).seconds / steps for stage in STAGES}
    metrics["time/step_s"] = wall / steps
    metrics["time/generator_s"] = both.busy_s / steps
    metrics["time/overlapped_s"] = overlapped.busy_s / steps
    metrics["time/scored_alone_s"] = (waited.generator.busy_s - waited.generator.generating_s) / steps
    if time.overlap is not None:
        metrics["overlap_ratio"] = time.overlap
    metrics["rollouts/server_busy"] = time.server_busy
    metrics["rollouts/in_flight"] = whole.rollout_s / max(wall, 1e-9)
    metrics["rollouts/queued"] = whole.queued_s / max(wall, 1e-9)
    # the stage's seconds and the activity's are read one after the other, which tells in a wait of microseconds
    running = min(waited.generator.rollout_s / max(waited.seconds, 1e-9), float(waited.most_running))
    metrics["rollouts/in_flight_while_waiting"] = running
    most = max((use.most_running for stage, use in uses.items() if stage != "eval"), default=0)
    metrics["rollouts/most_in_flight"] = float(most)
    metrics["tokens/sampled_per_s"] = sampled_tokens / max(wall, 1e-9)
    metrics["tokens/trained_per_s"] = trained_tokens / max(wall, 1e-9)
    for stage, use in uses.items():
        if use.peak_bytes:
            metrics[f"memory/{stage}_gib"] = use.peak_bytes / _GIB
    return metrics


def _sum_of_others(uses: Mapping[str, StageUse], without: Iterable[str]) -> ActivityReading:
    return sum((use.generator for stage, use in uses.items() if stage not in without), start=ActivityReading())


def _number(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    return float(value) if isinstance(value, (int, float)) and value == value else 0.0
