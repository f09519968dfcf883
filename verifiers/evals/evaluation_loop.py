"""Evaluation: roll out every prompt of a dataset some times, score, and sum up honestly."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from verifiers.data.sampler import rollout_seed
from verifiers.data.shard import Shard
from verifiers.envs.datasets import row_fields
from verifiers.errors import NothingScoredError
from verifiers.inference.limiter import Limiter, NoMoreSlotsError
from verifiers.rollouts.rollout import Rollout, RolloutRequest, ScoredBlock, most_often
from verifiers.rollouts.run import Run, relaxed_gc
from verifiers.types import RolloutKey

__all__ = [
    "EVALUATION_BLOCK",
    "Interruption",
    "LoopLag",
    "evaluation_requests",
    "iter_requests",
    "nothing_scored",
    "run_evaluation",
    "run_units",
]

EVALUATION_BLOCK = 2**31
"""Block id of evaluation rollouts: far from any training block's, so that their sampling seeds differ."""

# few enough that reading or beginning them takes a fraction of a millisecond each time
_ROWS_READ_TOGETHER = 32
_BEGUN_TOGETHER = 32
# a score may take 31 times as long as a rollout until it slows down the run
_LEAST_UNFINISHED = 2048
_UNFINISHED_FOR_EACH_SLOT = 32


def evaluation_requests(dataset: Any, rollouts_per_example: int, seed: int | None) -> list[list[RolloutRequest]]:
    """Return the rollouts of an evaluation, one list a prompt.

    Args:
        seed: each rollout's sampling seed is derived from it; None sends no seed.
    """
    return list(iter_requests(dataset, rollouts_per_example, seed))


def iter_requests(
    dataset: Any, rollouts_per_example: int, seed: int | None, shard: Shard | None = None
) -> Iterator[list[RolloutRequest]]:
    """Yield what `evaluation_requests` returns, one prompt at a time: a long dataset is never held as a whole.

    Args:
        shard: leaves out the prompts of other shards; ids and seeds are those of the whole evaluation.
    """
    examples = None if shard is None else shard.examples(len(dataset))
    for example_id, row in enumerate(_rows(dataset)):
        if examples is not None and example_id not in examples:
            continue
        prompt, answer, task, info = row_fields(row)
        keys = [RolloutKey(EVALUATION_BLOCK, example_id, generation) for generation in range(rollouts_per_example)]
        yield [
            RolloutRequest(key, prompt, answer, task, info, None if seed is None else rollout_seed(seed, key))
            for key in keys
        ]


def _rows(dataset: Any) -> Iterator[Mapping[str, Any]]:
    if not hasattr(dataset, "iter"):
        yield from (dataset[index] for index in range(len(dataset)))
        return
    # a row read by itself takes longer than a call to a quick server
    for batch in dataset.iter(batch_size=_ROWS_READ_TOGETHER):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


class Interruption:
    """The end of a run of many rollouts in two steps: `drain` lets what is in flight finish, `abort` does not.

    Both may be called on the event loop only, e.g. from its signal handlers.

    Args:
        drain_s: seconds that rollouts in flight get to finish.

    Attributes:
        requested: the run is to end.
        exit_code: of a command whose run was ended so, by the signal.
    """

    def __init__(self, drain_s: float = 30.0) -> None:
        self.drain_s = drain_s
        self.requested = False
        self.exit_code = 130
        self._deadline: asyncio.Timeout | None = None
        self._limiter: Limiter | None = None

    def drain(self) -> None:
        """Begin nothing more, and give what is in flight `drain_s` seconds."""
        self._end_in(self.drain_s)

    def abort(self) -> None:
        """Cancel what is in flight."""
        self._end_in(0.0)

    def _end_in(self, seconds: float) -> None:
        self.requested = True
        if self._limiter is not None:
            # rollouts that queue for a slot have not begun
            self._limiter.close()
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time() + seconds)


async def run_units(
    runner: Run,
    units: Iterable[Sequence[RolloutRequest]],
    on_rollout: Callable[[Rollout], None],
    interruption: Interruption | None = None,
) -> None:
    """Run and score many rollouts under the runner's limiter and keep none of them.

    Args:
        units: rollouts that are scored together; taken one by one, when there is room.
        on_rollout: called with every finished, scored rollout, as it finishes.
        interruption: ends the run before its time; then this returns as if all were done. It closes the runner's
            limiter. A unit of which not all have begun is given up: it could not be scored as a whole.

    Raises:
        ConfigError: a mistake that every other rollout would repeat; the others are cancelled.
    """
    interruption = interruption or Interruption()
    runner.on_rollout = on_rollout

    unfinished, finished = 0, asyncio.Event()

    async def run(unit: Sequence[RolloutRequest]) -> None:
        nonlocal unfinished
        # nothing is returned: the task group's tasks must not hold on to rollouts
        try:
            with contextlib.suppress(NoMoreSlotsError):
                await runner.run_group(unit)
        finally:
            unfinished -= len(unit)
            finished.set()

    deadline = asyncio.timeout(None)
    try:
        with relaxed_gc():
            async with deadline, asyncio.TaskGroup() as tasks:
                interruption._deadline, interruption._limiter = deadline, runner.limiter
                room = 0
                for unit in units:
                    # scoring holds no slot, so where it is the slower part its queue would grow with the run
                    while unfinished >= _most_unfinished(runner.limiter) and not interruption.requested:
                        finished.clear()
                        await finished.wait()
                    if room <= 0 or len(unit) > 1:
                        # a turn of the loop for each single rollout would cost more than a call to a quick server
                        await runner.limiter.wait_for_room()
                        free = runner.limiter.free_slots
                        room = _BEGUN_TOGETHER if free is None else min(free, _BEGUN_TOGETHER)
                    if interruption.requested:
                        break
                    room -= len(unit)
                    unfinished += len(unit)
                    tasks.create_task(run(unit))
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
    except TimeoutError:
        if not (interruption.requested and deadline.expired()):
            raise
        return
    else:
        return
    finally:
        interruption._deadline = interruption._limiter = None
    raise first


def _most_unfinished(limiter: Limiter) -> float:
    """Return how many rollouts may be in flight, wait for their score or be scored, all together."""
    slots = limiter.max_concurrent
    return math.inf if slots is None else max(_LEAST_UNFINISHED, _UNFINISHED_FOR_EACH_SLOT * slots)


async def run_evaluation(runner: Run, groups: Sequence[Sequence[RolloutRequest]]) -> ScoredBlock:
    """Run and score all groups under the runner's limiter.

    Raises:
        NothingScoredError: no rollout got a reward; the message has the commonest cause.
    """
    scored = await runner.run_groups(groups)
    block = ScoredBlock(EVALUATION_BLOCK, scored)
    if not any(rollout.is_scored for rollout in block):
        raise nothing_scored(len(block.rollouts), block.commonest_failure())
    return block


def nothing_scored(rollouts: int, commonest: tuple[str, int] | None) -> NothingScoredError:
    """Return the error of an evaluation without a reward, with the commonest failure."""
    return NothingScoredError(f"none of {rollouts} evaluation rollouts got a reward{most_often(commonest)}")


_EVERY_S = 0.1
_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class LoopLag:
    """A measurement, ten times a second, of how late a timer fires.

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
        """Return a bound that at least this share of the delays keeps, in milliseconds; 0 without delays."""
        seen = 0
        for bound, count in zip((*_BOUNDS_MS, self.max_ms), self._counts, strict=True):
            seen += count
            if self.samples and seen >= share * self.samples:
                return min(float(bound), self.max_ms)
        return 0.0

    def distorts(self, mean_generation_ms: float) -> bool:
        """Return whether a common delay, 1 in 20, is over 20 ms and a tenth of a rollout's time."""
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
