"""The trainer's evaluations: the policy of one optimizer step, rolled out on the prompts of the eval sets.

Training waits for an evaluation, so all of it is sampled from the weights of one step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, DeadlineError, Error, NothingScoredError
from verifiers.evals.evaluation_run import EvaluationRun
from verifiers.evals.statistics import Estimate
from verifiers.evals.store import ResultStore
from verifiers.evals.summary import RunSummary, summarize
from verifiers.inference.limiter import SubLimiter
from verifiers.inference.server_pool import credentials, each_server
from verifiers.inference.wire import neutral_where_unset
from verifiers.log import Redactor, secrets_of_run, url_without_secrets
from verifiers.monitoring.stage_timer import StageTimer, in_stage
from verifiers.reports.evaluation import write_evaluation_report
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.run import RolloutActivity, Run
from verifiers.train.batching.rollout_session import RolloutSession
from verifiers.train.config import GRPOConfig
from verifiers.train.evaluation.eval_sets import EvalSet, choose_eval_sets
from verifiers.train.evaluation.storage import StoredEvaluations, provenance
from verifiers.train.processes.distributed import Ranks
from verifiers.types import Outcome

logger = logging.getLogger("verifiers.train")

EvaluatesSet = Callable[[], Coroutine[Any, Any, "Measured"]]

_GRACE_S = 10.0
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """Result of an evaluation.

    Attributes:
        metrics: by their logged names. A set in which nothing was scored has counts, and no means.
    """

    metrics: dict[str, float]
    failures: list[str]


class Evaluator:
    """An evaluator of the policy on prompts of its own; rank 0 rolls out, and every rank gets the metrics."""

    def __init__(
        self,
        args: GRPOConfig,
        ranks: Ranks,
        timer: StageTimer,
        env: Any,
        sets: Sequence[EvalSet],
        sampling_args: dict[str, Any],
        session: RolloutSession,
    ) -> None:
        self._args, self._ranks, self._env = args, ranks, env
        self._sampling_args, self._session = sampling_args, session
        self.timer = timer
        self.sets = tuple(sets)
        self.nothing_scored = False
        self.stored = StoredEvaluations(str(args.output_dir), self._redactor, writes=bool(args.save_evaluations))

    def sets_of(self, eval_dataset: Any = None) -> tuple[EvalSet, ...]:
        """Return the sets of the run, or those of the rows that are given instead."""
        if eval_dataset is None:
            return self.sets
        return choose_eval_sets(self._env, eval_dataset, most=self._args.num_eval_prompts)

    @in_stage("eval")
    def evaluate(
        self, sets: Sequence[EvalSet], *, step: int, version: int, prefix: str, required: bool
    ) -> dict[str, float]:
        """Roll out all sets under the present weights and return the metrics; every rank calls it.

        Args:
            required: an evaluation without a reward is an error, not a warning.

        Raises:
            NothingScoredError: no rollout of a set got a reward, or it ran out of time.
        """
        measured: Measured = self._ranks.on_rank_0(lambda: self._evaluate_on_rank_0(sets, step, version, prefix))
        self.nothing_scored = bool(measured.failures)
        if measured.failures:
            text = "; ".join(measured.failures)
            if required:
                raise NothingScoredError(text)
            logger.warning("The evaluation of step %d gave no reward, and training continues: %s", step, text)
        return measured.metrics

    def _evaluate_on_rank_0(self, sets: Sequence[EvalSet], step: int, version: int, prefix: str) -> Measured:
        generator = self._session.publish(version)
        limiter = SubLimiter(generator.rollout_run().limiter, self._args.eval_max_concurrent)
        parts = []
        for one in sets:
            sampling = self._sampling(one)
            run = self.stored.run(step, prefix, one.name, self._metadata(one, sampling, step), one.env)
            runner = _runner_of(generator, one, sampling, limiter)
            parts.append(functools.partial(self._evaluate_set, one, run, runner, one.metric_prefix(prefix)))
        deadline_s = float(self._args.eval_timeout or self._args.async_generation_timeout)
        return evaluate_sets(generator, parts, deadline_s)

    async def _evaluate_set(self, one: EvalSet, run: EvaluationRun, runner: Run, prefix: str) -> Measured:
        started, right_from = time.perf_counter(), self._args.eval_right_from
        if self.stored.writes:
            await self._run_stored(one, run, runner)
        else:
            await run.run(runner, one.dataset, None)
        results = run.results
        metrics = evaluation_metrics(
            summarize(results, run.metadata, right_from=right_from), prefix, results.mean_length
        )
        metrics[f"{prefix}_seconds"] = time.perf_counter() - started
        if (trained_on := run.metadata.get("prompts_trained_on")) is not None:
            metrics[f"{prefix}_prompts_trained_on"] = float(trained_on)
        try:
            run.require_scores()
        except NothingScoredError as error:
            return Measured(metrics, [f"{prefix}: {error}"])
        return Measured(metrics, [])

    async def _run_stored(self, one: EvalSet, run: EvaluationRun, runner: Run) -> None:
        """Run one set, stored as `vf-eval` stores an evaluation, with its report."""
        started, status = time.perf_counter(), "stopped"
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            with ResultStore(run.directory, {**run.metadata, "status": "running"}, run.redact) as store:
                try:
                    await run.run(runner, one.dataset, store.append)
                    status = "finished"
                finally:
                    summary = run.summary(time.perf_counter() - started, right_from=self._args.eval_right_from)
                    store.write_metadata(summary=summary, status=status)
            # reading the rollouts again takes longer than an event loop may stand still
            await asyncio.to_thread(write_evaluation_report, run.directory)
        except OSError as error:
            if isinstance(error, (Error, TimeoutError)):
                raise
            raise ConfigError(
                f"the evaluation cannot be stored in {run.directory} ({error}); make room, or set "
                "save_evaluations=False."
            ) from error

    def is_best(self, decide: Callable[[], Any], metrics: Mapping[str, float]) -> bool:
        """Return what transformers decides of the last evaluation, which is not the best where it gave no reward."""
        try:
            return bool(decide())
        except KeyError:
            if self.nothing_scored:
                return False
            raise ConfigError(
                f"metric_for_best_model is {self._args.metric_for_best_model!r}, which this evaluation lacks; "
                f"choose one of {', '.join(sorted(metrics))}."
            ) from None

    # -- one evaluation -------------------------------------------------------------------------------------------

    def _redactor(self) -> Redactor:
        args, (key, headers) = self._args, credentials(self._session.publisher.servers)
        given = {str(place): part.env_args for place, part in enumerate(self.sets)}
        urls = list(args.server_urls or [args.server_url])
        return Redactor([secret for url in urls for secret in secrets_of_run(url, key, headers, given)])

    def _sampling(self, one: EvalSet) -> dict[str, Any]:
        given = self._sampling_args
        if one.env is not self._env:
            own = dict(getattr(one.env, "sampling_args", None) or {})
            if self._args.chat_template_kwargs:
                extra = own.get("extra_body") or {}
                options = self._args.template_options(extra)
                own["extra_body"] = {**extra, "chat_template_kwargs": options}
            given = {**own, "max_tokens": self._args.max_completion_length}
        extra = dict(given.get("extra_body") or {})
        # as in training's requests: what is left out, a server may take from the model's generation_config.json
        extra |= neutral_where_unset(given, extra)
        return {**given, "temperature": self._args.eval_temperature, "extra_body": extra}

    def _metadata(self, one: EvalSet, sampling: dict[str, Any], weights_step: int) -> dict[str, Any]:
        args = self._args
        urls = [
            url_without_secrets(each.base_url or args.server_url)
            for each in each_server(self._session.publisher.servers)
        ]
        return {
            "env": one.env_name,
            **provenance(one.env_name),
            "env_args": one.env_args,
            "prompts": one.fingerprint,
            "prompts_trained_on": one.prompts_trained_on,
            "model": str(args.server_model),
            "base_url": urls[0],
            "base_urls": urls,
            "sampling_args": sampling,
            "num_examples": len(one.dataset),
            "rollouts_per_example": args.num_generations_eval or 1,
            "seed": args.seed,
            "max_concurrent": args.eval_max_concurrent,
            "requests_per_second": args.requests_per_second,
            "rollout_timeout_s": args.rollout_timeout,
            "optimizer_step": weights_step,
            "output_dir": str(args.output_dir),
        }


def evaluate_sets(generator: AsyncBatchGenerator, sets: Sequence[EvaluatesSet], timeout_s: float) -> Measured:
    """Run the evaluations of all sets at once and wait for them; that they ran out of time is a failure.

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


async def _run_until(sets: Sequence[EvaluatesSet], timeout_s: float) -> Measured:
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            measured = await gather_owned(one() for one in sets)
    except Exception as error:
        if not deadline.expired():
            raise
        if isinstance(error, TimeoutError):
            return _out_of_time(timeout_s)
        return _out_of_time(timeout_s, f"; giving it up raised {type(error).__name__}: {error}")
    metrics = {name: value for one in measured for name, value in one.metrics.items()}
    return Measured(metrics, [failure for one in measured for failure in one.failures])


def _out_of_time(timeout_s: float, further: str = "") -> Measured:
    return Measured({}, [f"it did not end within {timeout_s:g} s (eval_timeout){further}"])


def evaluation_metrics(summary: RunSummary, prefix: str, mean_length: float) -> dict[str, float]:
    """Return the metrics of one set, by their logged names that begin with "eval" or "eval_<name>".

    What cannot be told is left out, such as the mean length where no rollout sampled any token.
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


def _runner_of(generator: AsyncBatchGenerator, one: EvalSet, sampling: dict[str, Any], limiter: SubLimiter) -> Run:
    # an activity of its own: what the run's table shows of the generator is about training
    options = {"sampling_args": sampling, "limiter": limiter, "activity": RolloutActivity()}
    return dataclasses.replace(generator.rollout_run(require_tokens=False, **options), env=one.env)


def log_evaluation(trainer: Any, metrics: dict[str, float]) -> None:
    """Log the metrics of an evaluation through a TRL trainer.

    TRL sees by the model's mode which metrics are meant, and writes its table of completions at every log.
    """
    was_training, trainer.model.training = trainer.model.training, False
    table, trainer.log_completions = trainer.log_completions, False
    try:
        trainer.log(dict(metrics))
    finally:
        trainer.model.training, trainer.log_completions = was_training, table
