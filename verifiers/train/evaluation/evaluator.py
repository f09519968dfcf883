"""The trainer's evaluations: the policy of one optimizer step, rolled out on the prompts of the eval sets.

An evaluation is sampled from the weights of one optimizer step alone. Where training waits for it, that is plain;
with `eval_overlap` training continues meanwhile, and the next push of weights waits. So each ends at the latest with
the block that was trained beside it, at most one is in flight, and what depends on it (the best checkpoint, early
stopping) happens at the same step in every run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import ConfigError, NothingScoredError
from verifiers.inference.endpoint import Backend
from verifiers.inference.limiter import SubLimiter
from verifiers.inference.server_pool import credentials, each_server
from verifiers.inference.wire import neutral_where_unset
from verifiers.log import Redactor, secrets_of_run, url_without_secrets
from verifiers.monitoring.stage_timer import StageTimer, in_stage
from verifiers.rollouts.activity import RolloutActivity
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.runner import RolloutRunner
from verifiers.train.config import GRPOConfig
from verifiers.train.evaluation.eval_sets import EvalSet, choose_eval_sets
from verifiers.train.evaluation.policy_evaluation import (
    KeptEvaluation,
    Measured,
    PolicyEvaluation,
    SetEvaluation,
    sub_limiter_of,
)
from verifiers.train.evaluation.storage import StoredEvaluations, provenance
from verifiers.train.processes.distributed import Ranks
from verifiers.train.validation.sampling_args import with_template_options

__all__ = ["EvaluationInFlight", "Evaluator", "log_evaluation"]

logger = logging.getLogger("verifiers.train")

EVALUATION_IN_FLIGHT = "evaluation_in_flight"
"""In a checkpoint's further state: the step whose evaluation had not ended when it was written."""


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationInFlight:
    """An evaluation that has begun, as every rank knows it.

    Attributes:
        step: the optimizer step whose weights are evaluated.
        epoch: as transformers counts it.
        prefix: of the metrics.
    """

    step: int
    epoch: float | None
    prefix: str

    @contextlib.contextmanager
    def as_now(self, state: Any) -> Iterator[None]:
        """Set the trainer's state to the step of the evaluation inside: loggers take their x from it."""
        now = state.global_step, state.epoch
        state.global_step, state.epoch = self.step, self.epoch
        try:
            yield
        finally:
            state.global_step, state.epoch = now


class Evaluator:
    """An evaluator of the policy on prompts of its own; rank 0 rolls out, and every rank gets the metrics.

    Args:
        args: settings of the run.
        plan: of the run.
        ranks: of the run.
        timer: the trainer's time by stage.
        env: what is trained on.
        sets: the prompts.
        sampling_args: of training rollouts.
        servers: gives what rollouts are sent to.
        publish: brings the servers to the present weights, on rank 0, and gives the generator; its argument says
            that nothing which is trained beside the evaluation will check these weights.

    Attributes:
        sets: the prompts.
        stored: the evaluations of the run on the disk.
        in_flight: the evaluation that has begun and not ended.
        running: its rollouts, on rank 0; all are of one version, so a push waits for them.
        nothing_scored: the last one gave no reward.
    """

    def __init__(
        self,
        args: GRPOConfig,
        plan: BatchPlan,
        ranks: Ranks,
        timer: StageTimer,
        env: Any,
        sets: Sequence[EvalSet],
        sampling_args: dict[str, Any],
        *,
        servers: Callable[[], Backend],
        publish: Callable[[bool], AsyncBatchGenerator],
    ) -> None:
        self._args, self._plan, self._ranks, self._env = args, plan, ranks, env
        self._sampling_args, self._servers, self._publish = sampling_args, servers, publish
        self.timer = timer
        self.sets = tuple(sets)
        self.in_flight: EvaluationInFlight | None = None
        self.nothing_scored = False
        self.running: PolicyEvaluation | None = None
        self.stored = StoredEvaluations(str(args.output_dir), self._redactor, writes=bool(args.save_evaluations))

    def sets_of(self, eval_dataset: Any = None) -> tuple[EvalSet, ...]:
        """Return the sets of the run, or those of the rows that are given instead."""
        if eval_dataset is None:
            return self.sets
        return choose_eval_sets(self._env, eval_dataset, most=self._args.num_eval_prompts)

    @in_stage("eval")
    def begin(
        self,
        sets: Sequence[EvalSet],
        *,
        step: int,
        epoch: float | None,
        weights_step: int | None = None,
        prefix: str = "eval",
        overlaps: bool = False,
        resumes: bool = False,
    ) -> None:
        """Publish the present weights and submit the rollouts; every rank calls it.

        Args:
            sets: the prompts.
            step: optimizer steps so far, under which the metrics are logged.
            epoch: as transformers counts it.
            weights_step: the step of the weights, where it is another.
            prefix: of the metrics.
            overlaps: training continues meanwhile.
            resumes: results that are stored of the very same evaluation are kept.
        """
        of = step if weights_step is None else weights_step
        self._ranks.on_rank_0(lambda: self._begin_on_rank_0(sets, of, prefix, overlaps, resumes))
        self.in_flight = EvaluationInFlight(step, epoch, prefix)

    def _begin_on_rank_0(
        self, sets: Sequence[EvalSet], weights_step: int, prefix: str, overlaps: bool, resumes: bool
    ) -> None:
        # after the last step nothing more would check these weights
        generator = self._publish(not overlaps)
        most = self._args.eval_max_concurrent
        if most is None and overlaps:
            # as many as one more block in flight would have, at most half of all; below 1 there is no bound
            most, bound = self._plan.completions_per_block, self._args.max_concurrent
            most = max(1, min(most, bound // 2)) if bound > 0 else most
        parts: list[SetEvaluation] = []
        limiter = sub_limiter_of(generator, most)
        for one in sets:
            sampling = self._sampling(one)
            metadata = self._metadata(one, sampling, weights_step)
            run = self.stored.run(weights_step, prefix, one.name, metadata, one.env.rubric, resumes=resumes)
            part = SetEvaluation(
                _runner_of(generator, one, sampling, limiter),
                one.dataset,
                run,
                prefix=one.metric_prefix(prefix),
                right_from=self._args.eval_right_from,
                stores=self.stored.writes,
            )
            parts.append(part)
        evaluation = PolicyEvaluation(generator, parts, self._deadline_s())
        evaluation.begin()
        self.running = evaluation

    def is_best(self, decide: Callable[[], Any], metrics: Mapping[str, float]) -> bool:
        """Return what transformers decides about the last evaluation, which is not the best where it gave no reward.

        Raises:
            ConfigError: metric_for_best_model is not among the metrics.
        """
        try:
            return bool(decide())
        except KeyError:
            if self.nothing_scored:
                return False
            raise ConfigError(
                f"metric_for_best_model is {self._args.metric_for_best_model!r}, which this evaluation lacks; "
                f"choose one of {', '.join(sorted(metrics))}."
            ) from None

    @in_stage("eval")
    def finish(self, *, required: bool) -> tuple[EvaluationInFlight, dict[str, float]]:
        """Wait for the evaluation in flight and return its metrics; every rank calls it.

        Args:
            required: an evaluation without a reward is an error, not a warning.

        Raises:
            NothingScoredError: no rollout of a set got a reward, or it ran out of time.
        """
        flight, self.in_flight = self.in_flight, None
        assert flight is not None
        measured: Measured = self._ranks.on_rank_0(lambda: self._take_measured(flight.prefix))
        self.nothing_scored = bool(measured.failures)
        if measured.failures:
            text = "; ".join(measured.failures)
            if required:
                raise NothingScoredError(text)
            logger.warning("The evaluation of step %d gave no reward, and training continues: %s", flight.step, text)
        return flight, measured.metrics

    def _take_measured(self, prefix: str) -> Measured:
        evaluation = self.running
        assert evaluation is not None
        try:
            measured = evaluation.wait()
        finally:
            self.running = None
        metrics = {**measured.metrics, f"{prefix}_wait_seconds": evaluation.waited_s}
        return Measured(metrics, measured.failures)

    @in_stage("eval")
    def evaluate_block(self, eval_dataset: Any = None) -> ScoredBlock:
        """Roll out the prompts of the only set, or of rows that are given instead, and keep the rollouts; on rank 0.

        Raises:
            ConfigError: there are several sets.
            NothingScoredError: no rollout got a reward, or it ran out of time.
        """
        sets = self.sets
        if eval_dataset is not None:
            sets = choose_eval_sets(self._env, eval_dataset, most=-1)
        if len(sets) > 1:
            names = ", ".join(one.name for one in sets)
            raise ConfigError(f"there are several eval sets ({names}); give rows of one, or call evaluate().")
        (one,) = sets
        generator = self._publish(True)
        limiter = sub_limiter_of(generator, self._args.eval_max_concurrent)
        runner = _runner_of(generator, one, self._sampling(one), limiter)
        part = KeptEvaluation(runner, one.dataset, self._args.num_generations_eval or 1, self._args.seed)
        evaluation = PolicyEvaluation(generator, [part], self._deadline_s())
        evaluation.begin()
        if failures := evaluation.wait().failures:
            raise NothingScoredError("; ".join(failures))
        assert part.block is not None
        return part.block

    # -- over a run -----------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Forget the evaluation in flight, which ends with the generator that it runs on, and those of the run."""
        self.running = self.in_flight = None
        self.stored.own.clear()

    def owed(self, further_state: dict[str, Any]) -> int | None:
        """Return the step whose evaluation was in flight when the checkpoint was written that a run resumes.

        Args:
            further_state: of the checkpoint.
        """
        owed = further_state.get(EVALUATION_IN_FLIGHT)
        return owed if isinstance(owed, int) and self._args.eval_strategy != "no" else None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the evaluations."""
        return {EVALUATION_IN_FLIGHT: self.in_flight.step} if self.in_flight is not None else {}

    # -- one evaluation -------------------------------------------------------------------------------------------

    def _redactor(self) -> Redactor:
        args, (key, headers) = self._args, credentials(self._servers())
        given = {str(place): part.env_args for place, part in enumerate(self.sets)}
        urls = list(args.server_urls or [args.server_url])
        return Redactor([secret for url in urls for secret in secrets_of_run(url, key, headers, given)])

    def _deadline_s(self) -> float:
        return float(self._args.eval_timeout or self._args.async_generation_timeout)

    def _sampling(self, one: EvalSet) -> dict[str, Any]:
        given = self._sampling_args
        if one.env is not self._env:
            own = dict(getattr(one.env, "sampling_args", None) or {})
            if self._args.chat_template_kwargs:
                extra = own.get("extra_body") or {}
                options = with_template_options(extra, self._args)
                own["extra_body"] = {**extra, "chat_template_kwargs": options}
            given = {**own, "max_tokens": self._args.max_completion_length}
        extra = dict(given.get("extra_body") or {})
        # as in training's requests: what is left out, a server may take from the model's generation_config.json
        extra |= neutral_where_unset(given, extra)
        return {**given, "temperature": self._args.eval_temperature, "extra_body": extra}

    def _metadata(self, one: EvalSet, sampling: dict[str, Any], weights_step: int) -> dict[str, Any]:
        args = self._args
        urls = [url_without_secrets(each.base_url or args.server_url) for each in each_server(self._servers())]
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


def _runner_of(
    generator: AsyncBatchGenerator, one: EvalSet, sampling: dict[str, Any], limiter: SubLimiter
) -> RolloutRunner:
    # an activity of its own: what the run's table shows of the generator is about training
    options = {"sampling_args": sampling, "limiter": limiter, "activity": RolloutActivity()}
    return dataclasses.replace(generator.runner(require_tokens=False, **options), env=one.env)


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
