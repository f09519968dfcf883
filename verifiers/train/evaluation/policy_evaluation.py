"""One evaluation of the policy on eval prompts, by vf-eval's own run and store.

The rollouts run on the generator's event loop, through the same runner, servers and limit as those of training.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verifiers.errors import DeadlineError, NothingScoredError
from verifiers.evals.evaluation_run import EvaluationRun, iter_requests, run_evaluation
from verifiers.evals.statistics import Estimate
from verifiers.evals.summary import RunSummary, summarize
from verifiers.inference.limiter import SubLimiter
from verifiers.reports.evaluation import write_evaluation_report
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.run import Run
from verifiers.train.evaluation.storage import BestEffortStore, best_effort
from verifiers.types import Outcome

__all__ = ["KeptEvaluation", "Measured", "SetEvaluation", "evaluate_sets", "evaluation_metrics", "sub_limiter_of"]

_GRACE_S = 10.0
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of an evaluation.

    Attributes:
        metrics: by their logged names. A set in which nothing was scored has counts, and no means.
        failures: why the sets without a reward have none.
    """

    metrics: dict[str, float]
    failures: list[str]


class SetEvaluation:
    """The evaluation of one set of prompts, stored as `vf-eval` stores one.

    Args:
        run: of vf-eval: what is finished, and where the rest is stored.
        right_from: reward from which pass@k counts a rollout as right.
        stores: False keeps nothing on the disk.
    """

    def __init__(
        self,
        runner: Run,
        dataset: Any,
        run: EvaluationRun,
        *,
        prefix: str,
        right_from: float,
        stores: bool = True,
    ) -> None:
        self._runner, self._dataset, self._run = runner, dataset, run
        self._prefix, self._right_from, self._stores = prefix, right_from, stores

    async def run(self) -> Measured:
        """Run what is left, and store it.

        Raises:
            ConfigError: a mistake that every other rollout would repeat.
        """
        started, run = time.perf_counter(), self._run
        store = BestEffortStore(run) if self._stores else None
        ended = False
        try:
            await run.run(self._runner, self._dataset, None if store is None else store.append)
            ended = True
        finally:
            seconds = time.perf_counter() - started
            if store is not None:
                store.close(run.summary(seconds, right_from=self._right_from), finished=ended)
        if store is not None and store.is_whole:
            # reading the rollouts again takes longer than an event loop may stand still
            await asyncio.to_thread(_write_report, run.directory)
        results = run.results
        summary = summarize(results, run.metadata, right_from=self._right_from)
        metrics = evaluation_metrics(summary, self._prefix, results.mean_length)
        metrics[f"{self._prefix}_seconds"] = seconds
        if (trained_on := run.metadata.get("prompts_trained_on")) is not None:
            metrics[f"{self._prefix}_prompts_trained_on"] = float(trained_on)
        try:
            run.require_scores()
        except NothingScoredError as error:
            return Measured(metrics, [f"{self._prefix}: {error}"])
        return Measured(metrics, [])


class KeptEvaluation:
    """The evaluation of one set of prompts whose rollouts are kept here, and nothing is written.

    Attributes:
        block: the rollouts, once they are scored.
    """

    def __init__(self, runner: Run, dataset: Any, num_generations: int, seed: int) -> None:
        self._runner = runner
        self._groups = list(iter_requests(dataset, num_generations, seed))
        self.block: ScoredBlock | None = None

    async def run(self) -> Measured:
        """Run and score all rollouts.

        Raises:
            NothingScoredError: no rollout got a reward.
        """
        self.block = await run_evaluation(self._runner, self._groups)
        return Measured({}, [])


class RunsOnce(Protocol):
    """The evaluation of one set of prompts, run once."""

    async def run(self) -> Measured: ...


def evaluate_sets(generator: AsyncBatchGenerator, sets: Sequence[RunsOnce], timeout_s: float) -> Measured:
    """Run the evaluations of all sets at once and wait for them; that they ran out of time is a failure.

    Args:
        timeout_s: deadline in seconds.

    Raises:
        ConfigError: a mistake that every rollout would repeat.
        GeneratorClosedError: the generator was closed meanwhile.
    """

    async def begin() -> asyncio.Task[Measured]:
        return asyncio.create_task(_run_until(sets, timeout_s))

    async def ended() -> Measured:
        return await asyncio.shield(task)

    task = generator.run(begin(), _GRACE_S)
    # rollouts that are given up may have something to put away first
    last = time.monotonic() + timeout_s + _GRACE_S
    while True:
        try:
            measured: Measured = generator.run(ended(), _LOOK_EVERY_S)
            return measured
        except DeadlineError:
            # the block that is generated meanwhile may have failed for good
            generator.check()
            if time.monotonic() > last:
                return _out_of_time(timeout_s, "; its rollouts are still being given up")


async def _run_until(sets: Sequence[RunsOnce], timeout_s: float) -> Measured:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await _run_all(sets)
    except Exception as error:
        if not deadline.expired():
            raise
        if isinstance(error, TimeoutError):
            return _out_of_time(timeout_s)
        return _out_of_time(timeout_s, f"; giving it up raised {type(error).__name__}: {error}")


async def _run_all(sets: Sequence[RunsOnce]) -> Measured:
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one.run()) for one in sets]
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
    else:
        measured = [task.result() for task in running]
        metrics = {name: value for one in measured for name, value in one.metrics.items()}
        return Measured(metrics, [failure for one in measured for failure in one.failures])
    raise first


def _out_of_time(timeout_s: float, further: str = "") -> Measured:
    return Measured({}, [f"it did not end within {timeout_s:g} s (eval_timeout){further}"])


def evaluation_metrics(summary: RunSummary, prefix: str, mean_length: float) -> dict[str, float]:
    """Return the metrics of one set, by their logged names; what cannot be told is left out.

    Args:
        prefix: "eval", or "eval_<name>".
        mean_length: completion tokens of the rollouts that sampled any; NaN where none did.
    """
    metrics: dict[str, float] = {}

    def put(name: str, estimate: Estimate) -> None:
        for key, value in ((name, estimate.mean), (f"{name}_stderr", estimate.stderr)):
            if math.isfinite(value):
                metrics[f"{prefix}_{key}"] = value

    for name, measure in summary.measures.items():
        put("reward" if name == "reward" else f"rewards/{name}", measure)
    if len(summary.at_k) > 1:
        for row in summary.at_k:
            put(f"pass_at_{row.k}", row.pass_at)
            put(f"pass_hat_{row.k}", row.pass_hat)
            put(f"best_at_{row.k}", row.best)
    for task, (measure, counts) in summary.tasks.items():
        put(f"tasks/{task}/reward", measure)
        metrics[f"{prefix}_tasks/{task}/prompts"] = float(counts.prompts)
        metrics[f"{prefix}_tasks/{task}/failed"] = float(counts.unscored)
    if math.isfinite(mean_length):
        metrics[f"{prefix}_completions/mean_length"] = mean_length
    for outcome in Outcome:
        metrics[f"{prefix}_outcomes/{outcome}"] = float(summary.counts.outcomes.get(str(outcome), 0))
    metrics[f"{prefix}_prompts"] = float(summary.counts.prompts)
    metrics[f"{prefix}_failed"] = float(summary.counts.failed)
    return metrics


def sub_limiter_of(generator: AsyncBatchGenerator, most: int | None) -> SubLimiter:
    """Return the part of the generator's limit that an evaluation may use."""
    return SubLimiter(generator.rollout_run().limiter, most)


def _write_report(directory: Path) -> None:
    with best_effort(f"{directory} gets no report.html"):
        write_evaluation_report(directory)
