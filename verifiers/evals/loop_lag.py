"""How late the event loop runs what is due: when it lags, measured latencies are the client's, not the server's."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

__all__ = ["LoopLag"]

_EVERY_S = 0.1
_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class LoopLag:
    """Measures, ten times a second, how late a timer fires.

    Attributes:
        samples: timers so far.
        max_ms: the longest delay.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.max_ms = 0.0
        # counts by size, because a list would grow with the run
        self._counts = [0] * (len(_BOUNDS_MS) + 1)

    def record(self, late_ms: float) -> None:
        """Take one delay, in milliseconds."""
        self.samples += 1
        self.max_ms = max(self.max_ms, late_ms)
        self._counts[sum(late_ms > bound for bound in _BOUNDS_MS)] += 1

    def quantile_ms(self, share: float) -> float:
        """A bound that at least this share of the delays does not exceed, in milliseconds; 0 without delays."""
        seen = 0
        for bound, count in zip((*_BOUNDS_MS, self.max_ms), self._counts, strict=True):
            seen += count
            if self.samples and seen >= share * self.samples:
                return min(float(bound), self.max_ms)
        return 0.0

    def distorts(self, mean_generation_ms: float) -> bool:
        """True where a delay that is common, 1 in 20, is more than a tenth of a rollout's time and over 20 ms."""
        late_ms = self.quantile_ms(0.95)
        return late_ms > 20 and late_ms > mean_generation_ms / 10

    @contextlib.asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measure while the block runs."""
        task = asyncio.create_task(self._measure())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _measure(self) -> None:
        while True:
            due = time.perf_counter() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.record(max(0.0, (time.perf_counter() - due) * 1000))
