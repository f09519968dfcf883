"""The trainer's evaluations: when the policy is tried on held-out prompts, and what is made of what was found.

An evaluation is sampled from the weights of one optimizer step alone. Where training waits for it, that is plain;
with `eval_overlap` training goes on meanwhile, and the next push of weights waits. So each ends at the latest with
the block that was trained beside it, at most one is in flight, and what depends on it (the best checkpoint, early
stopping) happens at the same step in every run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError, NothingScoredError
from verifiers.evals.hiding import Hider, secrets_of_run, url_without_secrets
from verifiers.rollouts.meter import RolloutMeter
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.run import RolloutRunner
from verifiers.rollouts.share import LimiterShare
from verifiers.rollouts.wire import NEUTRAL_SAMPLING
from verifiers.train.data_plane import DataPlane
from verifiers.train.evaluation import KeptEvaluation, Measured, PolicyEvaluation, SetEvaluation, share_of
from verifiers.train.evaluation_records import EvaluationRecords, provenance
from verifiers.train.evaluation_settings import needs_the_metric
from verifiers.train.held_out import HeldOut, held_out_sets
from verifiers.train.servers import credentials, each_server
from verifiers.train.settings import with_template_options
from verifiers.train.watching.clock import in_stage

__all__ = ["EVALUATION_IN_FLIGHT", "EvaluatingTrainer"]

EVALUATION_IN_FLIGHT = "evaluation_in_flight"
"""In a checkpoint's further state: the step whose evaluation had not ended when it was written."""

logger = logging.getLogger("verifiers.train")


@dataclasses.dataclass(frozen=True, slots=True)
class _InFlight:
    """An evaluation that has begun, as every rank knows it."""

    step: int
    epoch: float | None
    prefix: str


class EvaluatingTrainer(DataPlane):
    """The part of the trainer that evaluates the policy; rank 0 rolls out, and every rank learns the metrics.

    Attributes:
        held_out: the sets that `evaluate` goes through.
    """

    env: Any
    sampling_args: dict[str, Any]
    held_out: tuple[HeldOut, ...] = ()
    _records: EvaluationRecords | None = None
    _evaluation: PolicyEvaluation | None = None
    _in_flight: _InFlight | None = None
    _owed: int | None = None
    _nothing_scored: bool = False

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Roll out held-out prompts under the present weights, greedily or sampled, and log what was found.

        Args:
            eval_dataset: rows to use instead of the trainer's sets, or several such by name.
            metric_key_prefix: what the metrics' names begin with.

        Returns:
            `eval_reward`, its clustered standard error `eval_reward_stderr`, the same for each reward function, for
            each task of a mixture, and for pass@k where there are several rollouts a prompt; counts of prompts,
            failures and outcomes; `eval_seconds` and `eval_wait_seconds`. See docs/reference/metrics.md.

        Raises:
            NothingScoredError: no rollout of a set got a reward, or it ran out of time. While a run trains, that is a
                warning instead, unless the learning rate depends on the metric.
        """
        self._settle_evaluation()
        sets = self.held_out
        if eval_dataset is not None:
            sets = held_out_sets(self.env, eval_dataset, most=self.args.num_eval_prompts)
        self._begin_evaluation(sets, metric_key_prefix)
        return self._finish_evaluation()

    @in_stage("eval")
    def evaluate_block(self, eval_dataset: Any = None) -> ScoredBlock:
        """Roll out held-out prompts under the present weights and keep the rollouts; on rank 0, nothing is logged.

        Args:
            eval_dataset: rows to use instead of the trainer's set.

        Raises:
            ConfigError: the trainer has several sets.
            NothingScoredError: no rollout got a reward, or it ran out of time.
        """
        sets = self.held_out
        if eval_dataset is not None:
            sets = held_out_sets(self.env, eval_dataset, most=-1)
        if len(sets) > 1:
            names = ", ".join(held_out.name for held_out in sets)
            raise ConfigError(f"there are several held-out sets ({names}); give rows of one, or call evaluate().")
        (held_out,) = sets
        self._present_weights(judged=True)
        assert self.generator is not None
        limiter = share_of(self.generator, self.args.eval_max_concurrent)
        runner = self._runner_of(held_out, self._evaluation_sampling(held_out), limiter)
        part = KeptEvaluation(runner, held_out.dataset, self.args.num_generations_eval or 1, self.args.seed)
        evaluation = PolicyEvaluation(self.generator, [part], self._evaluation_deadline_s())
        evaluation.begin()
        if failures := evaluation.wait().failures:
            raise NothingScoredError("; ".join(failures))
        assert part.block is not None
        return part.block

    # -- one evaluation -------------------------------------------------------------------------------------------

    @in_stage("eval")
    def _begin_evaluation(
        self, sets: Sequence[HeldOut], prefix: str = "eval", *, overlaps: bool = False, resumes: bool = False
    ) -> None:
        """Push the present weights and submit the rollouts; every rank calls it."""
        self._on_rank_0(lambda: self._begin_on_rank_0(sets, prefix, overlaps, resumes))
        self._in_flight = _InFlight(self.state.global_step, self.state.epoch, prefix)

    def _begin_on_rank_0(self, sets: Sequence[HeldOut], prefix: str, overlaps: bool, resumes: bool) -> None:
        # after the last step nothing more would judge these weights
        self._present_weights(judged=not overlaps)
        assert self.generator is not None
        most = self.args.eval_max_concurrent
        if most is None and overlaps:
            # as many as one more block in flight would have, at most half of all; below 1 there is no bound
            most, bound = self.plan.completions_per_block, self.args.max_concurrent
            most = max(1, min(most, bound // 2)) if bound > 0 else most
        parts: list[SetEvaluation] = []
        limiter = share_of(self.generator, most)
        for held_out in sets:
            sampling = self._evaluation_sampling(held_out)
            metadata = self._evaluation_metadata(held_out, sampling)
            record = self._evaluation_records().record(
                metadata["optimizer_step"], prefix, held_out.name, metadata, resumes=resumes
            )
            part = SetEvaluation(
                self._runner_of(held_out, sampling, limiter),
                held_out.dataset,
                record,
                prefix=held_out.metric_prefix(prefix),
                right_from=self.args.eval_right_from,
            )
            parts.append(part)
        evaluation = PolicyEvaluation(self.generator, parts, self._evaluation_deadline_s())
        evaluation.begin()
        self._evaluation = evaluation

    def _present_weights(self, *, judged: bool) -> None:
        """Rank 0: the servers have the present weights; `judged` where nothing that is trained beside it will."""
        self.open()
        assert self.feed is not None
        self.feed.sync(self.state.global_step)
        if judged:
            self._settle_probe()

    def _runner_of(self, held_out: HeldOut, sampling: dict[str, Any], limiter: LimiterShare) -> RolloutRunner:
        assert self.generator is not None
        # a meter of its own: what the run's table says of the generator is about training
        options = {"sampling_args": sampling, "limiter": limiter, "meter": RolloutMeter()}
        runner = self.generator.runner(require_tokens=False, **options)
        return dataclasses.replace(runner, env=held_out.env)

    @in_stage("eval")
    def _finish_evaluation(self) -> dict[str, float]:
        """Wait for the evaluation in flight and log it under the step that it is of; every rank calls it."""
        flight, self._in_flight = self._in_flight, None
        assert flight is not None
        measured: Measured = self._on_rank_0(lambda: self._take_measured(flight.prefix))
        self._nothing_scored = bool(measured.failures)
        if measured.failures:
            text = "; ".join(measured.failures)
            if not self.is_in_train or needs_the_metric(self.args):
                raise NothingScoredError(text)
            logger.warning("The evaluation of step %d gave no reward, and training goes on: %s", flight.step, text)
        metrics = measured.metrics
        with self._as_of(flight):
            self._log_evaluation(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _take_measured(self, prefix: str) -> Measured:
        evaluation = self._evaluation
        assert evaluation is not None
        try:
            measured = evaluation.wait()
        finally:
            self._evaluation = None
        metrics = {**measured.metrics, f"{prefix}_wait_seconds": evaluation.waited_s}
        return Measured(metrics, measured.failures)

    def _settle_evaluation(self) -> None:
        """Finish the evaluation in flight, if there is one, with everything that follows from what it found."""
        flight = self._in_flight
        if flight is None:
            return
        flags = {name: getattr(self.control, name) for name in ("should_log", "should_evaluate", "should_save")}
        metrics = self._finish_evaluation()
        with self._as_of(flight):
            is_best = self._determine_best_metric(metrics, None)
        checkpoint = Path(str(self.args.output_dir)) / f"checkpoint-{flight.step}"
        if is_best and checkpoint.is_dir():
            self.state.best_model_checkpoint = str(checkpoint)
        # logging and evaluating take back what was asked for at the step that is now
        for name, asked in flags.items():
            setattr(self.control, name, asked or getattr(self.control, name))

    def _push_weights(self, version: int) -> None:
        if self._evaluation is not None:
            # all of its rollouts are of one version
            with self.clock.stage("eval"):
                self._evaluation.wait()
        super()._push_weights(version)

    # -- when -----------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        if self._owed is not None:
            self._begin_owed()
        return super()._prepare_inputs(generation_batch)

    def _begin_owed(self) -> None:
        """Go on with the evaluation that was in flight when the checkpoint was written that this run resumed."""
        owed, self._owed = self._owed, None
        if owed != self.state.global_step:
            return
        overlaps = bool(self.args.eval_overlap)
        self._begin_evaluation(self.held_out, overlaps=overlaps, resumes=True)
        if not overlaps:
            self._settle_evaluation()

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        step, control = self.state.global_step, self.control
        ends = control.should_training_stop or control.should_epoch_stop or step >= self.state.max_steps
        between_blocks = step % self.plan.updates_per_block == 0
        # transformers comes here a second time where a step ends an epoch
        begun_before = self._in_flight is not None and self._in_flight.step < step
        if ends or control.should_evaluate or (begun_before and (between_blocks or control.should_save)):
            self._settle_evaluation()
        # a callback may have stopped the run because of what was found
        ends = ends or self.control.should_training_stop
        # at the end nothing is left to train beside it, and a search for hyperparameters reads the result at once
        if self.control.should_evaluate and self.args.eval_overlap and not ends and trial is None:
            self.control.should_evaluate = False
            self._begin_evaluation(self.held_out, overlaps=True)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        if skip_scheduler and self.state.global_step > 0:
            # eval_on_start: a run that goes on was evaluated where it started
            return {}
        metrics: dict[str, float] = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        try:
            return bool(super()._determine_best_metric(metrics, trial))
        except KeyError:
            if self._nothing_scored:
                return False
            raise ConfigError(
                f"metric_for_best_model is {self.args.metric_for_best_model!r}, which this evaluation does not have; "
                f"choose one of {', '.join(sorted(metrics))}."
            ) from None

    # -- over a run -----------------------------------------------------------------------------------------------

    def _give_up_evaluation(self) -> None:
        """Forget the evaluation in flight; it ends with the generator that it runs on."""
        self._evaluation = self._in_flight = self._owed = None

    def _open_evaluations(self, first_step: int, further_state: dict[str, Any]) -> int | None:
        """Rank 0: keep the stored evaluations of this lineage; the step whose evaluation a checkpoint still owes."""
        self._evaluation_records().begin_run(first_step)
        owed = further_state.get(EVALUATION_IN_FLIGHT)
        return owed if isinstance(owed, int) and self.args.eval_strategy != "no" else None

    def _evaluation_state(self) -> dict[str, Any]:
        """What a checkpoint says of the evaluations."""
        return {EVALUATION_IN_FLIGHT: self._in_flight.step} if self._in_flight is not None else {}

    def _evaluation_records(self) -> EvaluationRecords:
        if self._records is None:
            args, (key, headers) = self.args, credentials(self._servers)
            given = {str(place): part.env_args for place, part in enumerate(self.held_out)}
            urls = list(args.server_urls or [args.server_url])
            hide = Hider([secret for url in urls for secret in secrets_of_run(url, key, headers, given)])
            writes = bool(args.save_evaluations)
            self._records = EvaluationRecords(str(args.output_dir), hide, writes=writes)
        return self._records

    def _evaluation_deadline_s(self) -> float:
        return float(self.args.eval_timeout or self.args.async_generation_timeout)

    def _evaluation_sampling(self, held_out: HeldOut) -> dict[str, Any]:
        given = self.sampling_args
        if held_out.env is not self.env:
            own = dict(getattr(held_out.env, "sampling_args", None) or {})
            if self.args.chat_template_kwargs:
                extra = own.get("extra_body") or {}
                options = with_template_options(extra, self.args)
                own["extra_body"] = {**extra, "chat_template_kwargs": options}
            given = {**own, "max_tokens": self.args.max_completion_length}
        extra = dict(given.get("extra_body") or {})
        for name, value in NEUTRAL_SAMPLING.items():
            # as of training's requests: what is left out, a server may take from the model's generation_config.json
            if given.get(name) is None and extra.get(name) is None:
                extra[name] = value
        return {**given, "temperature": self.args.eval_temperature, "extra_body": extra}

    def _evaluation_metadata(self, held_out: HeldOut, sampling: dict[str, Any]) -> dict[str, Any]:
        args = self.args
        urls = [url_without_secrets(one.base_url or args.server_url) for one in each_server(self._servers)]
        step = self.state.global_step
        if not self.is_in_train and args.load_best_model_at_end and self.state.best_model_checkpoint:
            # after a run its best weights are loaded
            step = self.state.best_global_step or step
        return {
            "env": held_out.env_name,
            **provenance(held_out.env_name),
            "env_args": held_out.env_args,
            "prompts": held_out.fingerprint,
            "model": str(args.server_model),
            "base_url": urls[0],
            "base_urls": urls,
            "sampling_args": sampling,
            "num_examples": len(held_out.dataset),
            "rollouts_per_example": args.num_generations_eval or 1,
            "seed": args.seed,
            "max_concurrent": args.eval_max_concurrent,
            "requests_per_second": args.requests_per_second,
            "rollout_timeout_s": args.rollout_timeout,
            "optimizer_step": step,
            "output_dir": str(args.output_dir),
        }

    def _log_evaluation(self, metrics: dict[str, float]) -> None:
        # TRL sees by the model's mode which metrics are meant, and writes its table of completions at every log
        was_training, self.model.training = self.model.training, False
        table, self.log_completions = self.log_completions, False
        try:
            self.log(dict(metrics))
        finally:
            self.model.training, self.log_completions = was_training, table

    @contextlib.contextmanager
    def _as_of(self, flight: _InFlight) -> Iterator[None]:
        """The trainer's state says the step that an evaluation is of: loggers take their x from it."""
        state: Any = self.state
        now = state.global_step, state.epoch
        state.global_step, state.epoch = flight.step, flight.epoch
        try:
            yield
        finally:
            state.global_step, state.epoch = now
