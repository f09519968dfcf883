"""The trainer's evaluations: the policy of one optimizer step, rolled out on the prompts of the eval sets.

Training waits for an evaluation, so all of it is sampled from the weights of one step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import ConfigError, NothingScoredError
from verifiers.inference.limiter import SubLimiter
from verifiers.inference.server_pool import credentials, each_server
from verifiers.inference.wire import neutral_where_unset
from verifiers.log import Redactor, secrets_of_run, url_without_secrets
from verifiers.monitoring.stage_timer import StageTimer, in_stage
from verifiers.rollouts.activity import RolloutActivity
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.run import Run
from verifiers.train.batching.rollout_session import RolloutSession
from verifiers.train.config import GRPOConfig
from verifiers.train.evaluation.eval_sets import EvalSet, choose_eval_sets
from verifiers.train.evaluation.policy_evaluation import (
    KeptEvaluation,
    Measured,
    SetEvaluation,
    evaluate_sets,
    sub_limiter_of,
)
from verifiers.train.evaluation.storage import StoredEvaluations, provenance
from verifiers.train.processes.distributed import Ranks

__all__ = ["Evaluator", "log_evaluation"]

logger = logging.getLogger("verifiers.train")


class Evaluator:
    """An evaluator of the policy on prompts of its own; rank 0 rolls out, and every rank gets the metrics.

    Args:
        session: the servers and the generator, on rank 0.

    Attributes:
        sets: the prompts.
        stored: the evaluations of the run on the disk.
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
        session: RolloutSession,
    ) -> None:
        self._args, self._plan, self._ranks, self._env = args, plan, ranks, env
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
            step: of the weights.
            version: under which they are pushed.
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
        limiter = sub_limiter_of(generator, self._args.eval_max_concurrent)
        parts: list[SetEvaluation] = []
        for one in sets:
            sampling = self._sampling(one)
            run = self.stored.run(step, prefix, one.name, self._metadata(one, sampling, step), one.env.rubric)
            part = SetEvaluation(
                _runner_of(generator, one, sampling, limiter),
                one.dataset,
                run,
                prefix=one.metric_prefix(prefix),
                right_from=self._args.eval_right_from,
                stores=self.stored.writes,
            )
            parts.append(part)
        return evaluate_sets(generator, parts, self._deadline_s())

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
    def evaluate_block(self, version: int, eval_dataset: Any = None) -> ScoredBlock:
        """Roll out the prompts of the only set, or of rows that are given instead, and keep the rollouts; on rank 0.

        Args:
            version: under which the present weights are pushed.

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
        generator = self._session.publish(version)
        limiter = sub_limiter_of(generator, self._args.eval_max_concurrent)
        runner = _runner_of(generator, one, self._sampling(one), limiter)
        part = KeptEvaluation(runner, one.dataset, self._args.num_generations_eval or 1, self._args.seed)
        if failures := evaluate_sets(generator, [part], self._deadline_s()).failures:
            raise NothingScoredError("; ".join(failures))
        assert part.block is not None
        return part.block

    # -- one evaluation -------------------------------------------------------------------------------------------

    def _redactor(self) -> Redactor:
        args, (key, headers) = self._args, credentials(self._session.servers)
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
                options = self._args.template_options(extra)
                own["extra_body"] = {**extra, "chat_template_kwargs": options}
            given = {**own, "max_tokens": self._args.max_completion_length}
        extra = dict(given.get("extra_body") or {})
        # as in training's requests: what is left out, a server may take from the model's generation_config.json
        extra |= neutral_where_unset(given, extra)
        return {**given, "temperature": self._args.eval_temperature, "extra_body": extra}

    def _metadata(self, one: EvalSet, sampling: dict[str, Any], weights_step: int) -> dict[str, Any]:
        args = self._args
        urls = [url_without_secrets(each.base_url or args.server_url) for each in each_server(self._session.servers)]
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
