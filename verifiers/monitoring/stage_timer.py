"""The trainer's time by stage: at every moment exactly one stage runs, so the stages add up to the wall clock.

A stage that begins inside another interrupts it. `switch` says what runs where no `stage` is open.

The overlap ratio is O / min(G, T). T is the time in which the trainer works: all of it but waiting, pushing and
evaluating. G is the time in which a rollout runs or is scored, and O the time in which both happen; pushes and
evaluation, which stop one side for the other, count in none of them. 0 is strict turns; 1 means that the side with
less to do does all of it while the other works, so that no more overlap is to be had.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verifiers.evals.store import finite
from verifiers.rollouts.run import ActivityReading, RolloutActivity

_NOT_WORKING = ("wait", "sync", "eval")
_GIB = float(1 << 30)
_CLEAR = "/proc/self/clear_refs"
_STATUS = "/proc/self/status"


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """A measurement of the highest memory between two calls.

    Attributes:
        where: which memory, in words.
        take: returns the most bytes in use since the last call, and starts from zero.
    """

    where: str
    take: Callable[[], int]


def peak_memory(device: Any) -> PeakMemory | None:
    """Return the peak-memory counter for a model on `device`; None where the system has none."""
    if getattr(device, "type", "cpu") == "cuda":
        return PeakMemory(f"torch's allocations on {device}", functools.partial(_cuda_peak, device))
    try:
        _process_peak()
    except (OSError, ValueError):
        return None
    return PeakMemory("resident memory of the trainer's process", _process_peak)


def _process_peak() -> int:
    with open(_STATUS, "rb") as file:
        text = file.read()
    start = text.index(b"VmHWM:") + 6
    kilobytes = int(text[start : text.index(b"kB", start)])
    descriptor = os.open(_CLEAR, os.O_WRONLY)
    try:
        os.write(descriptor, b"5")
    finally:
        os.close(descriptor)
    return kilobytes * 1024


def _cuda_peak(device: Any) -> int:
    import torch

    highest = int(torch.cuda.max_memory_allocated(device))
    torch.cuda.reset_peak_memory_stats(device)
    return highest


STAGES = {
    "wait": "waiting for rollouts",
    "prepare": "making micro-batches of a block, and sending them to the ranks",
    "old_logprobs": "old and reference log-probs",
    "train": "forward and backward passes",
    "optimizer": "the optimizer's step",
    "sync": "pushing weights, and checking the servers",
    "eval": "evaluation",
    "save": "checkpoints",
    "rest": "everything else: logging, callbacks, data loading",
}
"""The stages of the trainer's time, with their meanings."""

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(slots=True)
class StageUse:
    """The seconds and the memory of one stage, and what the generator did meanwhile.

    `peak_bytes` is 0 where nothing measures it; `most_running` are rollouts that ran at once.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    most_running: int = 0
    generator: ActivityReading = field(default_factory=ActivityReading)


class StageTimer:
    """A timer of `STAGES` since `start`. Belongs to the trainer's thread; others may look at `current`.

    Attributes:
        activity: the generator's, which is read at each change of stage; None for none.
        since: when the current stage began, in the timer's seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.activity: RolloutActivity | None = None
        self.memory: PeakMemory | None = None
        self.current = "rest"
        self.now = now
        self.since = now()
        self._base = "rest"
        self._open = 0
        self._added_until = self.since
        self._read_from: RolloutActivity | None = None
        self._reading = ActivityReading()
        self._uses: dict[str, StageUse] = {}

    def start(self) -> None:
        self._add_elapsed()
        self._uses = {}

    def switch(self, stage: str) -> None:
        """Set the stage that runs from now on, wherever no other stage is open."""
        self._base = stage
        if not self._open:
            self._enter(stage)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside under `name`, and not under what was running."""
        before = self.current
        self._open += 1
        self._enter(name)
        try:
            yield
        finally:
            self._open -= 1
            self._enter(before if self._open else self._base)

    def take(self) -> dict[str, StageUse]:
        """Return the use of each stage since the last call, or since the start."""
        self._add_elapsed()
        uses, self._uses = self._uses, {}
        return uses

    def _enter(self, stage: str) -> None:
        if stage != self.current:
            self._add_elapsed()
            self.current, self.since = stage, self._added_until

    def _add_elapsed(self) -> None:
        """Add the time since the last call to the stage that ran."""
        now = self.now()
        use = self._uses.setdefault(self.current, StageUse())
        use.seconds += now - self._added_until
        self._added_until = now
        if self.memory is not None:
            use.peak_bytes = max(use.peak_bytes, self.memory.take())
        if self.activity is not None:
            reading = self.activity.read()
            most_running = self.activity.take_most_running()
            if self._read_from is self.activity:
                use.generator += reading - self._reading
                use.most_running = max(use.most_running, most_running)
            self._read_from, self._reading = self.activity, reading


def in_stage(name: str) -> Callable[[_Method], _Method]:
    """Time a method under a stage of its object's `timer`."""

    def timed(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.timer.stage(name):
                return method(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return timed


# -- sums and metrics ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunTime:
    """Sums over some optimizer steps, in seconds unless it says otherwise.

    Attributes:
        generator: in which a rollout ran or was scored, outside pushes and evaluation.
        overlapped: of these, in which the trainer worked.
        scored_alone: in which the trainer waited and rollouts were scored, but none ran.
        waiting_rollouts: rollout-seconds run while the trainer waited.
        most_in_flight: the most rollouts that ran at once outside evaluation.
        server_read: in intervals that know how full the servers were.
        server_full: of these, in which requests waited at a server, by the share of its readings.
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
    server_read: float = 0.0
    server_full: float = 0.0
    sampled_tokens: float = 0.0
    trained_tokens: float = 0.0
    peak_gib: dict[str, float] = field(default_factory=dict)

    @property
    def wall(self) -> float:
        return sum(self.stages.values())

    @property
    def overlap(self) -> float | None:
        """The overlap ratio; None where one side had nothing to do."""
        working = sum(seconds for stage, seconds in self.stages.items() if stage not in _NOT_WORKING)
        least = min(self.generator, working)
        return min(1.0, self.overlapped / least) if least > 0 else None

    def share(self, *stages: str) -> float:
        """Return the part of all time that these stages took."""
        return sum(self.stages.get(stage, 0.0) for stage in stages) / self.wall if self.wall > 0 else 0.0

    @property
    def server_busy(self) -> float:
        """The part of all time in which at least one rollout ran."""
        return min(1.0, self.server / self.wall) if self.wall > 0 else 0.0

    @property
    def full(self) -> float | None:
        """The part of the time for which requests waited at a busy server; None where no server told."""
        return self.server_full / self.server_read if self.server_read > 0 else None

    @property
    def in_flight_while_waiting(self) -> float:
        """Rollouts that ran while the trainer waited, on average."""
        waited = self.stages.get("wait", 0.0)
        return self.waiting_rollouts / waited if waited > 0 else 0.0

    def take(self, line: Mapping[str, Any]) -> None:
        """Add a logged interval: its metrics, and optimizer steps as "steps"."""
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
        if "server/full" in line:
            self.server_read += wall
            self.server_full += wall * _number(line, "server/full")
        self.sampled_tokens += wall * _number(line, "tokens/sampled_per_s")
        self.trained_tokens += wall * _number(line, "tokens/trained_per_s")


def interval_metrics(
    uses: Mapping[str, StageUse], steps: int, *, sampled_tokens: float = 0.0, trained_tokens: float = 0.0
) -> dict[str, float]:
    """Return the metrics of an interval: seconds per optimizer step, shares, means over time, and peaks.

    `sampled_tokens` are of the blocks that came in meanwhile.
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
    return finite(line.get(name)) or 0.0
