"""GRPOTrainer: one class over TRL's, which holds the parts of a run.

Inherited from `trl.GRPOTrainer`: `_compute_loss` with all loss types, log-probs, the reference model, PEFT, FSDP,
DeepSpeed, logging and callbacks. The parts: the batch plan, the rollout prefetcher, the data loop, the weight
publisher, the evaluator, checkpoints and the monitor. The private names of TRL that are used are listed in
`TRL_PRIVATE_NAMES` and guarded by a test.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import trl
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback

from verifiers.data.adaptive_curriculum import CurriculumPolicy
from verifiers.data.curriculum import Curriculum
from verifiers.errors import ConfigError, Error
from verifiers.monitoring.stage_timer import in_stage
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.prefetch import RolloutPrefetcher
from verifiers.train.batching.streaming import refuse_unstreamable
from verifiers.train.batching.training_block import TrainingBlock
from verifiers.train.block_metrics import block_metrics, block_tokens, fill_completions_table
from verifiers.train.checkpoint.block_log import BlockLog, block_record
from verifiers.train.checkpoint.checkpoint import (
    extra_state,
    mark_complete,
    mark_incomplete,
    model_name,
    raises_checkpoint_error,
    resume_step,
    rotate_checkpoints,
)
from verifiers.train.checkpoint.pending_blocks import load_pending_blocks, save_pending_blocks
from verifiers.train.checkpoint.resume import (
    ResumePoint,
    choose_resume_point,
    lock_output_dir,
    prepare_output_dir,
    visible_checkpoint,
)
from verifiers.train.config import GRPOConfig
from verifiers.train.console import ProgressLines
from verifiers.train.data_loop import DataLoop, StopsBetweenBlocks, empty_epoch
from verifiers.train.distributed import Ranks
from verifiers.train.evaluation.eval_sets import choose_eval_sets
from verifiers.train.evaluation.evaluator import Evaluator, log_evaluation
from verifiers.train.loss.grpo_loss import (
    CorrectedLoss,
    micro_step_loss,
    only_advantages_matter,
    weighted_coefficients,
)
from verifiers.train.loss.logprobs import PolicyLogprobs
from verifiers.train.models import check_model_path, get_tokenizer, raises_load_error
from verifiers.train.monitor import MonitorCallback, RunMonitor
from verifiers.train.planned_run import (
    curriculum_metrics,
    curriculum_state,
    planned_run,
    restore_curriculum,
    still_planned,
)
from verifiers.train.rollout_session import RolloutSession
from verifiers.train.sampling_args import training_sampling_args
from verifiers.train.termination import end_together
from verifiers.train.validation import (
    check_eval_sets,
    check_output_dir,
    needs_the_metric,
    refuse_mid_block_saves,
    refuse_short_ddp_timeout,
    refuse_unworkable_sharding,
)
from verifiers.train.weight_sync.protocol import WeightSync
from verifiers.train.weight_sync.publisher import BeforeOptimizerStep, PolicyWeights, WeightPublisher, first_prompt
from verifiers.train.weight_sync.verification import LogprobCheck

__all__ = ["TRL_PRIVATE_NAMES", "GRPOTrainer"]

TRL_PRIVATE_NAMES = (
    "_compute_loss",
    "_determine_best_metric",
    "_evaluate",
    "_finalize_training",
    "_get_per_token_logps_and_entropies",
    "_logs",
    "_maybe_log_save_evaluate",
    "_metrics",
    "_prepare_inputs",
    "_save",
    "_save_checkpoint",
    "_step",
    "_tokenizer",
)
"""What we override or read of `trl.GRPOTrainer` beyond its documented surface."""

logger = logging.getLogger("verifiers.train")


class GRPOTrainer(trl.GRPOTrainer):
    """Trains a policy on an environment through a rollout server.

    Args:
        model: a model, or the path or hub name of one.
        env: the environment: its training rows are the prompts, its rubric gives the rewards.
        args: settings; `grpo_defaults()` gives the classic ones.
        processing_class: the tokenizer; loaded beside the model when left out.
        client: an openai client, Endpoint or base URL for the rollouts, or a list of them for several servers of the
            model; `args.server_urls` when left out.
        weight_sync: how weights reach the servers of `client`; the kind that `args.weight_sync` names when left out.
        callbacks, optimizers, peft_config: as in TRL.
        eval_dataset: rows to evaluate on instead of the environment's own, or several such by name.
        eval_env: an environment to evaluate on instead, with rows of its own, or several by name.
        curriculum: stages of datasets, or a rule that follows how well the policy does; the datasets are the
            environments of a group, or the values of the column `task`.

    Attributes:
        plan: the batch plan.
        session: the generator and the prefetcher, on rank 0 while a run goes on.
        publisher: keeps the rollout servers on the trained weights.
        evaluator: evaluates the policy.
        monitor: measures and records the run.
        last_block: the block that was trained last, on rank 0.

    Raises:
        ConfigError: sizes that do not divide, settings that contradict each other or the environment.
    """

    args: GRPOConfig
    model: Any
    beta: float

    def __init__(
        self,
        model: Any,
        env: Any,
        args: GRPOConfig | None = None,
        processing_class: Any = None,
        *,
        client: Any = None,
        weight_sync: WeightSync | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        curriculum: Curriculum | CurriculumPolicy | None = None,
        eval_dataset: Any = None,
        eval_env: Any = None,
    ) -> None:
        args = args if args is not None else GRPOConfig("outputs/verifiers-run")
        check_output_dir(str(args.output_dir))
        if isinstance(model, str):
            check_model_path(model)
            given: Any = args.model_init_kwargs or {}
            options = {"trust_remote_code": args.trust_remote_code, "revision": given.get("revision") or "main"}
            processing_class = processing_class or get_tokenizer(model, padding_side="left", **options)
        self.env, self._rows = env, env.get_dataset()
        self._model_name = model_name(model)
        self.plan = planned_run(args, env, curriculum)
        self._curriculum_at_start = curriculum_state(self.plan)
        args.max_steps = self.plan.max_steps
        refuse_mid_block_saves(args, self.plan.updates_per_block)
        self.sampling_args = training_sampling_args(env, args)
        eval_sets = choose_eval_sets(env, eval_dataset, eval_env, most=args.num_eval_prompts)
        check_eval_sets(args, eval_sets)
        with contextlib.ExitStack() as loading:
            if isinstance(model, str):
                # a hub that refuses a push raises subclasses
                loading.enter_context(raises_load_error(model, (OSError,), exact=True))
            super().__init__(
                model=model,
                reward_funcs=_rewards_come_from_the_environment,
                args=args,
                train_dataset=self._rows,
                # never read: transformers wants one where evaluations are asked for
                eval_dataset=self._rows,
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
            )
        refuse_unworkable_sharding(self.accelerator, args)
        refuse_short_ddp_timeout(args, self.accelerator.num_processes)
        self.last_block: ScoredBlock | None = None
        self._block_log: BlockLog | None = None
        self._lock: Any = None
        self._first_step = 0
        self._owed_evaluation: int | None = None
        if args.streaming:
            refuse_unstreamable(experts=self.aux_loss_enabled, deepspeed=self.is_deepspeed_enabled)
        self._make_parts(client, weight_sync, eval_sets)
        if args.drain_before_sync is False:
            self.publisher.drains()
        self._set_callbacks(callbacks or [])

    def _make_parts(self, client: Any, weight_sync: WeightSync | None, eval_sets: Sequence[Any]) -> None:
        args, plan = self.args, self.plan
        self.ranks = Ranks(self.accelerator)
        self.monitor = RunMonitor(args, plan, self.env, self.model, self.accelerator.device)
        self.timer = self.monitor.timer
        self.weights = PolicyWeights(self.ranks, lambda: self.accelerator.unwrap_model(self.model))
        self.logprobs = PolicyLogprobs(
            super()._get_per_token_logps_and_entropies,
            self.accelerator,
            self.ranks,
            policy=lambda: self.model,
            reference=lambda: self.ref_model,
            copy=self._frozen_copy,
            batch_size=args.old_logprobs_batch_size,
            temperature=self.temperature,
        )
        self.check = LogprobCheck(
            lambda: {
                "model": str(args.server_model),
                "prompt": first_prompt(self._rows),
                "temperature": self.temperature,
            },
            lambda prompt_ids, ids: self.logprobs.of_tokens(prompt_ids, ids, together=self.weights.is_sharded),
            tolerance=args.probe_tolerance,
            trains_in_half=self.model.dtype in (torch.bfloat16, torch.float16) or args.bf16 or args.fp16,
            patience_s=float(max(args.weight_sync_timeout, args.rollout_timeout)),
            limit_s=float(max(args.weight_sync_timeout, args.rollout_timeout, args.async_generation_timeout)),
            on_result=lambda result: self._log_values({"sampling/probe_difference": result.largest_difference}),
        )
        tokenizer = self.processing_class
        self.publisher = WeightPublisher(args, client, weight_sync, self.weights, tokenizer, self._rows, self.check)
        self.evaluator = Evaluator(
            args,
            plan,
            self.ranks,
            self.timer,
            self.env,
            eval_sets,
            self.sampling_args,
            servers=lambda: self.publisher.servers,
            publish=lambda settle: self.session.publish(self.state.global_step, settle=settle),
        )
        self.session = RolloutSession(
            args,
            self.env,
            [one.env for one in eval_sets],
            self._rows,
            plan,
            self.sampling_args,
            self.publisher,
            self.timer,
            before_push=self.evaluator.wait,
            # DeepSpeed takes its optimizer step with the last backward pass, before a check could be judged
            checks_meanwhile=not self.is_deepspeed_enabled,
        )
        self.corrected_loss = CorrectedLoss(args)
        self.data_loop = DataLoop(
            plan,
            args,
            self.ranks,
            self.logprobs,
            beta=self.beta,
            timer=self.timer,
            pad_token_id=self._tokenizer.pad_token_id,
            skip_zero_advantage=only_advantages_matter(args, self.beta, self.aux_loss_enabled),
            prefetcher=self.session.open,
            record=self._record_block,
            log=self._log_values,
        )

    def _set_callbacks(self, given: Sequence[Any]) -> None:
        # lines of our own replace the bar and the raw dicts of transformers
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(MonitorCallback(self.monitor, self.accelerator.device))
        self.add_callback(BeforeOptimizerStep(self.publisher.settle))
        if not any(isinstance(callback, ProgressLines) for callback in given):
            self.add_callback(ProgressLines(self.plan))
        self._stops = StopsBetweenBlocks(self.plan.updates_per_block)
        self.add_callback(self._stops)

    @property
    def weight_sync(self) -> WeightSync:
        """How weights reach the rollout servers."""
        return self.publisher.sync

    @property
    def eval_sets(self) -> tuple[Any, ...]:
        """The sets of prompts that `evaluate` goes through."""
        return self.evaluator.sets

    # -- a run --------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train to `max_steps`.

        Args:
            resume_from_checkpoint: a checkpoint's path, or True for the newest complete one in `output_dir`
                (step 0 where there is none). Left out, the run begins at step 0; what an earlier one left in
                `output_dir` is moved into `earlier-N` there.
            trial: as in transformers.
            ignore_keys_for_eval: as in transformers.

        Raises:
            CheckpointError: the checkpoint is incomplete, of another plan, or not seen by every process; or another
                run writes to `output_dir`.
            GenerationError, WeightSyncError: with the cause; nothing is left running.
            RankError: another process of the run failed, was stopped or vanished.
        """
        output_dir, rank = str(self.args.output_dir), self.accelerator.process_index

        def choose() -> ResumePoint:
            self._lock = lock_output_dir(output_dir)
            return choose_resume_point(output_dir, resume_from_checkpoint, self.plan, self._rows, self._model_name)

        def run() -> Any:
            self._forget_earlier_run()
            point = self.ranks.on_rank_0(choose)
            checkpoint = visible_checkpoint(point, output_dir, rank)
            self._first_step = resume_step(checkpoint) if checkpoint else 0
            self._owed_evaluation = self.ranks.on_rank_0(lambda: self._open_run(point))
            # it must come after every callback that may ask for a stop
            self.remove_callback(self._stops)
            self.add_callback(self._stops)
            return super(GRPOTrainer, self).train(checkpoint, trial, ignore_keys_for_eval)

        def watched() -> contextlib.AbstractContextManager[None]:
            callbacks: list[Any] = self.callback_handler.callbacks
            return self.monitor.running([callback for callback in callbacks if hasattr(callback, "end_table")])

        return end_together(self.accelerator, run, self.close, watched=watched, give_back=self._give_back)

    def _forget_earlier_run(self) -> None:
        self.data_loop.reset()
        self.corrected_loss.reset()
        self.last_block = None
        # a run that was cut inside an update left it anywhere
        self._step = 0
        kept: list[Any] = [*self._metrics.values(), *self._logs.values()]
        for values in kept:
            values.clear()

    def _open_run(self, point: ResumePoint) -> int | None:
        """Open what a run needs, on rank 0; return the step whose evaluation the checkpoint still owes."""
        prefetcher = self.open()
        assert self.session.generator is not None
        output_dir, checkpoint, step = str(self.args.output_dir), point.checkpoint, point.step
        prepare_output_dir(point, output_dir, self.evaluator.stored().own())
        if self.args.save_only_model and self.args.save_strategy != "no":
            logger.warning("with save_only_model=True no run can resume its checkpoints: they lack the optimizer.")
        self._block_log = BlockLog(output_dir, self.plan.first_block_after(step))
        further = extra_state(checkpoint) if checkpoint else self._curriculum_at_start
        restore_curriculum(self.plan, further)
        if checkpoint:
            prefetcher.restore(still_planned(self.plan, load_pending_blocks(checkpoint)))
        owed = self.evaluator.begin_run(step, further)
        self.monitor.begin(
            step if checkpoint else None,
            servers=self.publisher.servers,
            activity=self.session.generator.activity,
            drains=prefetcher.drains,
            owes_evaluation=owed is not None,
        )
        return owed

    def open(self) -> RolloutPrefetcher:
        """Wait for the rollout server and start the generator (rank 0); `train` and `evaluate` do it."""
        return self.session.open()

    def close(self) -> None:
        """End the generator's thread and give back what weight pushes used. May be called twice."""
        self.evaluator.give_up()
        self._owed_evaluation = self._block_log = None
        lock, self._lock = self._lock, None
        with contextlib.ExitStack() as stack:
            if lock is not None:
                stack.callback(lock.release)
            stack.callback(self.session.close)

    def _give_back(self, error: BaseException) -> None:
        """Give back what an end cannot leave out, where there is no time for more."""
        try:
            self.weight_sync.close()
        finally:
            self.monitor.end(error)

    # -- data ---------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of empty items: the data loop gives what is trained."""
        return empty_epoch(self.plan, self._first_step)

    @in_stage("prepare")
    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        self._begin_owed_evaluation()
        micro_step = self._step % self.plan.gradient_accumulation_steps
        return {"micro_batches": self.data_loop.micro_batches(self.state.global_step, micro_step)}

    def _record_block(self, block: ScoredBlock, trained: TrainingBlock, step: int) -> dict[str, float]:
        """Write down what became of a block, on rank 0; return its metrics."""
        self.last_block = block
        if self._block_log is not None:
            self._block_log.write(block_record(block, step, trained.dropped))
        self.monitor.note_block(block, trained, step)
        if self.log_completions:
            fill_completions_table(self._logs, block, trained)
        self.state.num_input_tokens_seen += block_tokens(block)
        metrics = block_metrics(block, trained, self.plan, optimizer_step=step)
        metrics.update(curriculum_metrics(self.plan, block), num_tokens=float(self.state.num_input_tokens_seen))
        return metrics

    def _log_values(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def _check_question(self) -> dict[str, Any]:
        model, prompt = str(self.args.server_model), first_prompt(self._rows)
        return {"model": model, "prompt": prompt, "temperature": self.temperature}

    def _frozen_copy(self) -> Any:
        if not self.args.old_logprobs_on_rollout_device:
            return None
        return self.publisher.copy_of(self.state.global_step)

    # -- loss ---------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take a micro-step as TRL does; at the end of a streamed update its gradient gets the right denominator."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return self.data_loop.rescale_update(model, loss) if self.args.streaming else loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the loss of a micro-step, micro-batch by micro-batch."""
        loss = micro_step_loss(self.accelerator, model, inputs["micro_batches"], self._compute_loss)
        self.corrected_loss.metrics.end_micro_step()
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mode = "train" if self.model.training else "eval"
        prepared = self.corrected_loss.prepare(inputs)
        logged, self._metrics[mode] = self._metrics[mode], defaultdict(list)
        try:
            with weighted_coefficients(self, inputs):
                loss: Tensor = super()._compute_loss(model, prepared)
        finally:
            self.corrected_loss.end()
            measured, self._metrics[mode] = self._metrics[mode], logged
        per_row = self.importance_sampling_level == "sequence"
        self.corrected_loss.metrics.add(measured, prepared, per_row=per_row)
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        # the first thing that TRL's loss calls: its advantages can be corrected before they are read
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.corrected_loss.correct(logps, training=self.model.training), entropies, aux_loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with what micro-batches measured joined over ranks, and the trainer's time by stage."""
        if self.model.training:
            self._log_values(self.corrected_loss.take_metrics(self.accelerator.num_processes))
            # the log of a run's end has the steps since the last one
            if "loss" in logs or "train_runtime" in logs:
                logs.update(self.monitor.interval(self.state.global_step))
        super().log(logs, start_time)

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Roll out held-out prompts under the present weights, greedily or sampled, and log what was found.

        Args:
            eval_dataset: rows to use instead of the trainer's sets, or several such by name.
            ignore_keys: ignored.
            metric_key_prefix: what the metrics' names begin with.

        Returns:
            `eval_reward`, its clustered standard error `eval_reward_stderr`, the same for each reward function, for
            each task of a mixture, and for pass@k where there are several rollouts a prompt; counts of prompts,
            failures and outcomes; `eval_seconds` and `eval_wait_seconds`. See docs/reference/metrics.md.

        Raises:
            NothingScoredError: no rollout of a set got a reward, or it ran out of time. While a run trains, that is a
                warning instead, unless the learning rate depends on the metric.
        """
        self._finish_evaluation_in_flight()
        self._begin_evaluation(self.evaluator.sets_of(eval_dataset), prefix=metric_key_prefix)
        return self._finish_evaluation()

    def evaluate_block(self, eval_dataset: Any = None) -> ScoredBlock:
        """Roll out held-out prompts under the present weights and keep the rollouts; on rank 0, nothing is logged.

        Args:
            eval_dataset: rows to use instead of the trainer's set.

        Raises:
            ConfigError: the trainer has several sets.
            NothingScoredError: no rollout got a reward, or it ran out of time.
        """
        return self.evaluator.evaluate_block(eval_dataset)

    def _begin_evaluation(self, sets: Sequence[Any], **options: Any) -> None:
        step = weights_step = self.state.global_step
        if not self.is_in_train and self.args.load_best_model_at_end and self.state.best_model_checkpoint:
            # after a run its best weights are loaded
            weights_step = self.state.best_global_step or step
        self.evaluator.begin(sets, step=step, epoch=self.state.epoch, weights_step=weights_step, **options)

    @in_stage("eval")
    def _finish_evaluation(self) -> dict[str, float]:
        """Wait for the evaluation in flight and log it under the step that it is of; every rank calls it."""
        flight, metrics = self.evaluator.finish(required=not self.is_in_train or needs_the_metric(self.args))
        with flight.as_now(self.state):
            log_evaluation(self, metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _finish_evaluation_in_flight(self) -> None:
        """Finish the evaluation in flight, if there is one, with everything that follows from what it found."""
        flight = self.evaluator.in_flight
        if flight is None:
            return
        flags = {name: getattr(self.control, name) for name in ("should_log", "should_evaluate", "should_save")}
        metrics = self._finish_evaluation()
        with flight.as_now(self.state):
            is_best = self._determine_best_metric(metrics, None)
        checkpoint = Path(str(self.args.output_dir)) / f"checkpoint-{flight.step}"
        if is_best and checkpoint.is_dir():
            self.state.best_model_checkpoint = str(checkpoint)
        # logging and evaluating take back what was asked for at the step that is now
        for name, asked in flags.items():
            setattr(self.control, name, asked or getattr(self.control, name))

    def _begin_owed_evaluation(self) -> None:
        """Begin the evaluation again that was in flight when the checkpoint was written that this run resumed."""
        owed, self._owed_evaluation = self._owed_evaluation, None
        if owed is None or owed != self.state.global_step:
            return
        overlaps = bool(self.args.eval_overlap)
        self._begin_evaluation(self.eval_sets, overlaps=overlaps, resumes=True)
        if not overlaps:
            self._finish_evaluation_in_flight()

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        step, control, flight = self.state.global_step, self.control, self.evaluator.in_flight
        ends = control.should_training_stop or control.should_epoch_stop or step >= self.state.max_steps
        between_blocks = step % self.plan.updates_per_block == 0
        # transformers comes here a second time where a step ends an epoch
        begun_before = flight is not None and flight.step < step
        if ends or control.should_evaluate or (begun_before and (between_blocks or control.should_save)):
            self._finish_evaluation_in_flight()
        # a callback may have stopped the run because of what was found
        ends = ends or self.control.should_training_stop
        # at the end nothing is left to train beside it, and a search for hyperparameters reads the result at once
        if self.control.should_evaluate and self.args.eval_overlap and not ends and trial is None:
            self.control.should_evaluate = False
            self._begin_evaluation(self.eval_sets, overlaps=True)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        if skip_scheduler and self.state.global_step > 0:
            # eval_on_start: a run that resumes was evaluated where it started
            return {}
        metrics: dict[str, float] = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        try:
            return bool(super()._determine_best_metric(metrics, trial))
        except KeyError:
            if self.evaluator.nothing_scored:
                return False
            raise ConfigError(
                f"metric_for_best_model is {self.args.metric_for_best_model!r}, which this evaluation does not have; "
                f"choose one of {', '.join(sorted(metrics))}."
            ) from None

    # -- checkpoints --------------------------------------------------------------------------------------

    @in_stage("save")
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        # transformers would delete older ones before this one counts
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        with raises_checkpoint_error(directory):
            if self.args.should_save:
                mark_incomplete(directory)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.save_total_limit = limit
            self.accelerator.wait_for_everyone()
            # the last checkpoint of a run may stand inside a block; no run can resume from there
            between_blocks = self.state.global_step % self.plan.updates_per_block == 0
            if self.args.should_save and between_blocks and not self.args.save_only_model:
                self._keep_blocks_in_flight(directory)
                of = (self._rows, self._model_name)
                mark_complete(directory, self.plan, self.state.global_step, self.checkpoint_extra(), *of)
        if self.args.should_save:
            rotate_checkpoints(str(self.args.output_dir), limit, self.state.best_model_checkpoint)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # transformers would delete complete ones without a word to their markers
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def checkpoint_extra(self) -> dict[str, Any]:
        """Return further state for a checkpoint's marker, as JSON, by the name of what it belongs to."""
        return {**curriculum_state(self.plan), **self.evaluator.state()}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does; a sharded policy is saved whole, and a disk that refuses is one sentence."""
        run_dir = Path(str(self.args.output_dir))
        with raises_checkpoint_error(Path(output_dir or run_dir), run_dir):
            if _internal_call or not self.weights.is_sharded:
                super().save_model(output_dir, _internal_call)
                return
            self._save(str(output_dir or run_dir), state_dict=self.weights.gather(tied=True, adapter_only=False))
            if self.args.push_to_hub:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _keep_blocks_in_flight(self, directory: Path) -> None:
        prefetcher = self.session.prefetcher
        if prefetcher is None:
            return
        # a block that cannot be finished ends the run when it is wanted; the weights are worth keeping all the same
        with contextlib.suppress(Error):
            save_pending_blocks(directory, prefetcher.finished_blocks())
        if self._block_log is not None:
            self._block_log.sync()


def _rewards_come_from_the_environment(**_: Any) -> list[float | None]:
    raise AssertionError("TRL's own generation is not used")
