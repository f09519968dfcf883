"""The trainer's time by stage: at every moment exactly one stage runs, so the stages add up to the wall clock.

A stage that begins inside another interrupts it. `switch` says what runs where no `stage` is open.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from verifiers.rollouts.run import ActivityReading, RolloutActivity

__all__ = ["STAGES", "PeakMemory", "StageTimer", "StageUse", "in_stage", "peak_memory"]

_CLEAR = "/proc/self/clear_refs"
_STATUS = "/proc/self/status"


class PeakMemory(Protocol):
    """A measurement of the highest memory between two calls of `take`."""

    where: str

    def take(self) -> int:
        """Return the most bytes in use since the last call, and start from zero."""
        ...


class ProcessPeak:
    """Resident memory of this process."""

    where = "resident memory of the trainer's process"

    def take(self) -> int:
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


class CudaPeak:
    """Memory that torch's allocator gave out on one CUDA device."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self.where = f"torch's allocations on {device}"

    def take(self) -> int:
        highest = int(self._cuda.max_memory_allocated(self._device))
        self._cuda.reset_peak_memory_stats(self._device)
        return highest


def peak_memory(device: Any) -> PeakMemory | None:
    """Return the peak-memory counter for a model on `device`; None where the system has none."""
    if getattr(device, "type", "cpu") == "cuda":
        return CudaPeak(device)
    process = ProcessPeak()
    try:
        process.take()
    except (OSError, ValueError):
        return None
    return process


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
    """The seconds and the memory of one stage.

    Attributes:
        seconds: of wall clock.
        peak_bytes: highest memory while it ran; 0 where nothing measures it.
        most_running: the most rollouts that ran at once meanwhile.
        generator: what the generator did meanwhile.
    """

    seconds: float = 0.0
    peak_bytes: int = 0
    most_running: int = 0
    generator: ActivityReading = field(default_factory=ActivityReading)

    def add(self, other: StageUse) -> None:
        """Take another part of the same stage in."""
        self.seconds += other.seconds
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.most_running = max(self.most_running, other.most_running)
        self.generator = self.generator + other.generator


class StageTimer:
    """A timer of `STAGES` since `start`. Belongs to the trainer's thread; others may look at `current`.

    Args:
        now: gives seconds; another one for tests.

    Attributes:
        activity: the generator's, which is read at each change of stage; None for none.
        memory: measures the highest memory of each stage; None for nothing.
        current: the stage that runs.
        since: when it began, in the timer's seconds.
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
        """Forget everything before now."""
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
        use = StageUse(now - self._added_until)
        self._added_until = now
        if self.memory is not None:
            use.peak_bytes = self.memory.take()
        if self.activity is not None:
            reading = self.activity.read()
            most_running = self.activity.take_most_running()
            if self._read_from is self.activity:
                use.generator, use.most_running = reading - self._reading, most_running
            self._read_from, self._reading = self.activity, reading
        self._uses.setdefault(self.current, StageUse()).add(use)


def in_stage(name: str) -> Callable[[_Method], _Method]:
    """Time a method under a stage of its object's `timer`."""

    def timed(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.timer.stage(name):
                return method(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return timed
