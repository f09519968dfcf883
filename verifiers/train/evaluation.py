"""One evaluation of the policy on held-out prompts: through the same runner, server and limit as everything else.

It runs on the generator's event loop. Whoever trains may wait for it, or go on and take it later.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verifiers.errors import DeadlineError, NothingScoredError
from verifiers.evals.resume import scores_whole_groups
from verifiers.evals.runner import evaluation_requests, run_evaluation
from verifiers.evals.session import EvaluationRun
from verifiers.evals.statistics import Estimate
from verifiers.evals.store import iter_rows
from verifiers.evals.summary import RunSummary, summarize
from verifiers.evals.viewer.writing import write_evaluation_report
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Rollout, ScoredBlock
from verifiers.rollouts.run import RolloutRunner
from verifiers.rollouts.share import LimiterShare
from verifiers.train.evaluation_records import EvaluationRecord, tolerated
from verifiers.types import Outcome

__all__ = ["KeptEvaluation", "Measured", "PolicyEvaluation", "SetEvaluation", "evaluation_metrics", "share_of"]

_GRACE_S = 10.0
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """What an evaluation found.

    Attributes:
        metrics: by their logged names. A set in which nothing was scored has counts, and no means.
        failures: why the sets without a reward have none.
    """

    metrics: dict[str, float]
    failures: list[str]


class SetEvaluation:
    """The evaluation of one set of prompts.

    Args:
        runner: plays the set's environment.
        dataset: the prompts.
        record: where the rollouts are written, and what of them is there.
        prefix: of the metrics' names.
        right_from: reward from which pass@k counts a rollout as right.
    """

    def __init__(
        self, runner: RolloutRunner, dataset: Any, record: EvaluationRecord, *, prefix: str, right_from: float
    ) -> None:
        self._runner, self._dataset, self._record = runner, dataset, record
        self._prefix, self._right_from = prefix, right_from
        whole_groups = scores_whole_groups(runner.env.rubric)
        finished = record.finished(whole_groups)
        each = record.metadata["rollouts_per_example"]
        self._run = EvaluationRun(
            record.directory, record.metadata, len(dataset) * each, finished, whole_groups, record.hide
        )
        self._lengths = _stored_lengths(record) if finished.count else {}

    def append(self, rollout: Rollout) -> None:
        """Take a finished rollout."""
        self._lengths[rollout.key.example_id, rollout.key.generation] = rollout.usage.completion_tokens
        self._record.append(rollout)

    async def run(self) -> Measured:
        """Run what is left, and write it down.

        Raises:
            ConfigError: a mistake that every other rollout would repeat.
        """
        started = time.perf_counter()
        self._record.open()
        ended = False
        try:
            await self._run.run(self._runner, self._dataset, self)
            ended = True
        finally:
            seconds = time.perf_counter() - started
            summary = self._run.summary(seconds, right_from=self._right_from)
            written = self._record.close(summary, finished=ended)
        if written:
            # reading the rollouts again takes longer than an event loop may stand still
            await asyncio.to_thread(_write_report, self._record)
        metrics = evaluation_metrics(
            summarize(self._run.tally.columns, self._record.metadata, right_from=self._right_from),
            self._prefix,
            list(self._lengths.values()),
        )
        metrics[f"{self._prefix}_seconds"] = seconds
        try:
            self._run.require_scores()
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
        """Run and score all of it.

        Raises:
            NothingScoredError: no rollout got a reward.
        """
        self.block = await run_evaluation(self._runner, self._groups)
        return Measured({}, [])


class RunsOnce(Protocol):
    """What a `PolicyEvaluation` runs."""

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
        """All sets, until the deadline: nobody may be waiting by then."""
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


def evaluation_metrics(summary: RunSummary, prefix: str, lengths: Sequence[int]) -> dict[str, float]:
    """The metrics of one set, by their logged names; what cannot be told is left out.

    Args:
        summary: of all its rollouts.
        prefix: "eval", or "eval_<name>".
        lengths: completion tokens of each rollout.
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
    sampled = [length for length in lengths if length]
    if sampled:
        metrics[f"{prefix}_completions/mean_length"] = sum(sampled) / len(sampled)
    for outcome in Outcome:
        metrics[f"{prefix}_outcomes/{outcome}"] = float(summary.counts.outcomes.get(str(outcome), 0))
    metrics[f"{prefix}_prompts"] = float(summary.counts.prompts)
    metrics[f"{prefix}_failed"] = float(summary.counts.failed)
    return metrics


def share_of(generator: AsyncBatchGenerator, most: int | None) -> LimiterShare:
    """The part of the generator's limit that an evaluation may use."""
    return LimiterShare(generator.runner().limiter, most)


def _stored_lengths(record: EvaluationRecord) -> dict[tuple[int, int], int]:
    rows = iter_rows(record.directory, contents=False)
    return {(row["example_id"], row["generation"]): int(row["completion_tokens"] or 0) for row in rows}


def _write_report(record: EvaluationRecord) -> None:
    with tolerated(f"{record.directory} gets no report.html"):
        write_evaluation_report(record.directory)
