"""Counts of the rollouts that wait, run and are scored, added up over time."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from verifiers.inference.limiter import Limiter

__all__ = ["ActivityReading", "RolloutActivity", "counted_slot"]


@dataclass(frozen=True, slots=True)
class ActivityReading:
    """Sums since the start; the difference of two readings belongs to the time between them.

    Attributes:
        generating_s: seconds in which at least one rollout was running.
        busy_s: seconds in which at least one rollout was running or being scored.
        rollout_s: seconds of all rollouts that ran, added up; divided by the time, the mean number in flight.
        queued_s: the same of rollouts that waited for a slot of the limiter.
    """

    generating_s: float = 0.0
    busy_s: float = 0.0
    rollout_s: float = 0.0
    queued_s: float = 0.0

    def __sub__(self, before: ActivityReading) -> ActivityReading:
        return ActivityReading(
            self.generating_s - before.generating_s,
            self.busy_s - before.busy_s,
            self.rollout_s - before.rollout_s,
            self.queued_s - before.queued_s,
        )

    def __add__(self, other: ActivityReading) -> ActivityReading:
        return ActivityReading(
            self.generating_s + other.generating_s,
            self.busy_s + other.busy_s,
            self.rollout_s + other.rollout_s,
            self.queued_s + other.queued_s,
        )


class RolloutActivity:
    """Counts of the rollouts that wait, run and are scored, added up over time. Thread-safe.

    Args:
        clock: gives seconds; another one for tests.

    Attributes:
        queued, running, scoring: rollouts now.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.queued = self.running = self.scoring = self._most_running = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._since = clock()
        self._sums = [0.0, 0.0, 0.0, 0.0]

    def change(self, *, queued: int = 0, running: int = 0, scoring: int = 0) -> None:
        """Add to the counts; negative numbers take away."""
        with self._lock:
            self._add_elapsed()
            self.queued += queued
            self.running += running
            self.scoring += scoring
            self._most_running = max(self._most_running, self.running)

    def read(self) -> ActivityReading:
        """Return the sums up to now."""
        with self._lock:
            self._add_elapsed()
            return ActivityReading(*self._sums)

    def take_most_running(self) -> int:
        """Return the most rollouts that ran at once since the last call."""
        with self._lock:
            most, self._most_running = self._most_running, self.running
            return most

    def _add_elapsed(self) -> None:
        now = self._clock()
        passed, self._since = now - self._since, now
        if self.running:
            self._sums[0] += passed
            self._sums[2] += passed * self.running
        if self.running or self.scoring:
            self._sums[1] += passed
        if self.queued:
            self._sums[3] += passed * self.queued


@asynccontextmanager
async def counted_slot(limiter: Limiter, activity: RolloutActivity) -> AsyncIterator[None]:
    """Hold a slot; count the rollout as queued until it has the slot, and as running while it holds it."""
    activity.change(queued=1)
    queued = 1
    try:
        async with limiter.slot():
            activity.change(queued=-1, running=1)
            queued = 0
            try:
                yield
            finally:
                activity.change(running=-1)
    finally:
        if queued:
            activity.change(queued=-1)
