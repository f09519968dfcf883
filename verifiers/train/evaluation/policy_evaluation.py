"""One evaluation of the policy on eval prompts, by vf-eval's own run and store.

The rollouts run on the generator's event loop, through the same runner, servers and limit as those of training. The
trainer may wait for the evaluation, or train on and take its result later.
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
from verifiers.evals.evaluation_loop import evaluation_requests, run_evaluation
from verifiers.evals.run import EvaluationRun
from verifiers.evals.statistics import Estimate
from verifiers.evals.summary import RunSummary, summarize
from verifiers.inference.limiter import SubLimiter
from verifiers.reports.evaluation import write_evaluation_report
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.runner import RolloutRunner
from verifiers.train.evaluation.storage import BestEffortStore, best_effort
from verifiers.types import Outcome

__all__ = ["KeptEvaluation", "Measured", "PolicyEvaluation", "SetEvaluation", "evaluation_metrics", "sub_limiter_of"]

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
        runner: plays the set's environment.
        dataset: the prompts.
        run: of vf-eval: what is finished, and where the rest is stored.
        prefix: of the metrics' names.
        right_from: reward from which pass@k counts a rollout as right.
        stores: False keeps nothing on the disk.
    """

    def __init__(
        self,
        runner: RolloutRunner,
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
            await run.run(self._runner, self._dataset, store)
            ended = True
        finally:
            seconds = time.perf_counter() - started
            if store is not None:
                store.close(run.summary(seconds, right_from=self._right_from), finished=ended)
        if store is not None and store.is_whole:
            # reading the rollouts again takes longer than an event loop may stand still
            await asyncio.to_thread(_write_report, run.directory)
        results = run.progress.results
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

    Args:
        runner: plays the set's environment.
        dataset: the prompts.
        num_generations: rollouts of each.
        seed: of their sampling seeds.

    Attributes:
        block: the rollouts, once they are scored.
    """

    def __init__(self, runner: RolloutRunner, dataset: Any, num_generations: int, seed: int) -> None:
        self._runner = runner
        self._groups = evaluation_requests(dataset, num_generations, seed)
        self.block: ScoredBlock | None = None

    async def run(self) -> Measured:
        """Run and score all rollouts.

        Raises:
            NothingScoredError: no rollout got a reward.
        """
        self.block = await run_evaluation(self._runner, self._groups)
        return Measured({}, [])


class RunsOnce(Protocol):
    """A part of a `PolicyEvaluation`: one set of prompts, run once."""

    async def run(self) -> Measured: ...


class PolicyEvaluation:
    """The evaluation of all sets at one optimizer step, while it runs; used from the trainer's thread.

    Args:
        generator: whose event loop and connections are used.
        sets: what is evaluated.
        timeout_s: deadline from `begin` on, in seconds.
    """

    def __init__(self, generator: AsyncBatchGenerator, sets: Sequence[RunsOnce], timeout_s: float) -> None:
        self._generator, self._sets, self._timeout_s = generator, sets, timeout_s
        self._began = time.monotonic()
        self._task: asyncio.Task[Measured] | None = None
        self._measured: Measured | None = None
        self._waited_s = 0.0

    def begin(self) -> None:
        """Submit the rollouts and return at once."""

        async def begin() -> asyncio.Task[Measured]:
            return asyncio.create_task(self._run())

        self._began = time.monotonic()
        self._task = self._generator.run(begin(), _GRACE_S)

    def wait(self) -> Measured:
        """Wait until it has ended; one that ran out of time is a failure.

        Raises:
            ConfigError: a mistake that every rollout would repeat.
            GeneratorClosedError: the generator was closed meanwhile.
        """
        if self._measured is not None:
            return self._measured
        assert self._task is not None
        task, waiting = self._task, time.monotonic()
        # rollouts that are given up may have something to put away first
        last = max(waiting, self._began + self._timeout_s) + _GRACE_S

        async def ended() -> Measured:
            return await asyncio.shield(task)

        try:
            while self._measured is None:
                try:
                    self._measured = self._generator.run(ended(), _LOOK_EVERY_S)
                except DeadlineError:
                    # what is trained beside it may have failed for good
                    self._generator.check()
                    if time.monotonic() > last:
                        self._measured = self._out_of_time("; its rollouts are still being given up")
        finally:
            self._waited_s += time.monotonic() - waiting
        return self._measured

    @property
    def waited_s(self) -> float:
        """Seconds for which the trainer waited for it."""
        return self._waited_s

    async def _run(self) -> Measured:
        """Run all sets until the deadline, also while nobody waits for the result."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await self._run_sets()
        except Exception as error:
            if not deadline.expired():
                raise
            if isinstance(error, TimeoutError):
                return self._out_of_time()
            return self._out_of_time(f"; giving it up raised {type(error).__name__}: {error}")

    async def _run_sets(self) -> Measured:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one.run()) for one in self._sets]
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            measured = [task.result() for task in running]
            metrics = {name: value for one in measured for name, value in one.metrics.items()}
            return Measured(metrics, [failure for one in measured for failure in one.failures])
        raise first

    def _out_of_time(self, further: str = "") -> Measured:
        return Measured({}, [f"it did not end within {self._timeout_s:g} s (eval_timeout){further}"])


def evaluation_metrics(summary: RunSummary, prefix: str, mean_length: float) -> dict[str, float]:
    """Return the metrics of one set, by their logged names; what cannot be told is left out.

    Args:
        summary: of all its rollouts.
        prefix: "eval", or "eval_<name>".
        mean_length: completion tokens of the rollouts that sampled any; NaN where none did.
    """
    metrics: dict[str, float] = {}

    def put(name: str, estimate: Estimate) -> None:
        for key, value in ((name, estimate.mean), (f"{name}_stderr", estimate.stderr)):
            if math.isfinite(value):
                metrics[f"{prefix}_{key}"] = value

    for name, measure in summary.measures.items():
        put("reward" if name == "reward" else f"rewards/{name}", measure.estimate)
    if len(summary.at_k) > 1:
        for row in summary.at_k:
            put(f"pass_at_{row.k}", row.pass_at)
            put(f"pass_hat_{row.k}", row.pass_hat)
            put(f"best_at_{row.k}", row.best)
    for task, (measure, counts) in summary.tasks.items():
        put(f"tasks/{task}/reward", measure.estimate)
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
    return SubLimiter(generator.runner().limiter, most)


def _write_report(directory: Path) -> None:
    with best_effort(f"{directory} gets no report.html"):
        write_evaluation_report(directory)
