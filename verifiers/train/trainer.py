"""GRPOTrainer: one class over TRL's, which holds the parts of a run.

Inherited from `trl.GRPOTrainer`: settings, the reference model, PEFT, FSDP, DeepSpeed, logging and callbacks. The
parts: the batch plan, the rollout prefetcher, the data loop, the loss, the weight publisher, the evaluator,
checkpoints and the monitor. tests/train/test_trl_contract.py guards the names of TRL that are used.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trl
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback

from verifiers.data.adaptive_curriculum import CurriculumPolicy
from verifiers.data.curriculum import Curriculum
from verifiers.envs.datasets import row_fields
from verifiers.errors import ConfigError
from verifiers.evals.export import raises_hub_error
from verifiers.images import ImageStore
from verifiers.interrupt import Termination
from verifiers.keywords import parameter_names
from verifiers.monitoring.stage_timer import in_stage
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.block_metrics import block_tokens, fill_completions_table, fill_counts, note_values
from verifiers.train.batching.demonstrations import Demonstrations
from verifiers.train.batching.rollout_session import RolloutPrefetcher, RolloutSession
from verifiers.train.batching.training_block import TrainingBlock, only_advantages_matter
from verifiers.train.checkpoint.checkpoint import model_name, resume_step
from verifiers.train.checkpoint.run_directory import RunDirectory, raises_checkpoint_error
from verifiers.train.checkpoint.weights import (
    CheckpointWeights,
    check_kept,
    check_optimizer,
    reference_of,
    settings_of_the_run,
    unreadable_named,
)
from verifiers.train.config import GRPOConfig
from verifiers.train.conflicts import refuse_adapters, refuse_processes, unknown_setting
from verifiers.train.console import ProgressLines, shown
from verifiers.train.cpu_linear import use_onednn
from verifiers.train.data_loop import DataLoop, StopsBetweenBlocks, empty_epoch, reward_of_the_environment
from verifiers.train.evaluation.evaluator import Evaluator, log_evaluation
from verifiers.train.image_processor import ImageError, ImageProcessor, RowImages, towers
from verifiers.train.loss.logprobs import PolicyLogprobs, fuse_heads
from verifiers.train.loss.policy_loss import policy_loss
from verifiers.train.loss.prefixes import can_share
from verifiers.train.loss.updates import EntropyBonus, FiniteUpdates, LossMetrics, micro_step_loss, scale_gradients
from verifiers.train.models import (
    check_model_path,
    copy_server_files,
    disable_dropout,
    get_adapter,
    get_tokenizer,
    raises_load_error,
    warn_of_lost_updates,
)
from verifiers.train.monitor import MonitorCallback, RunMonitor
from verifiers.train.processes.distributed import Ranks, end_together, ended_if_stuck
from verifiers.train.run_plan import RunPlan, plan_run, with_one_bos
from verifiers.train.weight_sync.protocol import WeightSync, refuse_untied
from verifiers.train.weight_sync.publisher import PolicyWeights, WeightPublisher
from verifiers.train.weight_sync.verification import LogprobCheck

logger = logging.getLogger("verifiers.train")


class GRPOTrainer(trl.GRPOTrainer):
    """A trainer of a policy on an environment through a rollout server.

    Args:
        model: a model, or the path or hub name of one.
        env: its training rows are the prompts, its rubric gives the rewards.
        args: settings; `grpo_defaults()` gives the classic ones.
        processing_class: the tokenizer; loaded beside the model when left out.
        client: an openai client, Endpoint or base URL for the rollouts, or a list of them for several servers of the
            model; `args.server_urls` when left out.
        weight_sync: how weights reach the servers of `client`; the kind that `args.weight_sync` names when left out.
        callbacks, optimizers, peft_config: as in TRL.
        eval_dataset: rows to evaluate on instead of the environment's own, or several such by name.
        eval_env: an environment to evaluate on instead, with rows of its own, or several by name.
        curriculum: stages of datasets, or a curriculum policy that follows the rewards; the datasets are the
            environments of a group, or the values of the column `task`.
        plan: what `plan_run` gave for `args`, `env`, `curriculum` and the eval sets; asked for here when left out.

    Attributes:
        plan: the batch plan.
        session: the generator and the prefetcher, on rank 0 while a run is in progress.
        directory: the run's output directory: its checkpoints and its block log.
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
        env: Any = None,
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
        plan: RunPlan | None = None,
        **unknown: Any,
    ) -> None:
        for name in unknown:
            known = parameter_names(GRPOTrainer.__init__)
            raise ConfigError(f"GRPOTrainer takes no {name!r}; {unknown_setting(name, known)}")
        args = args if args is not None else GRPOConfig("outputs/verifiers-run")
        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        if not isinstance(model, str) and not hasattr(model, "config"):
            raise ConfigError(f"model is {model!r:.100}; give a path, a name on the hub, or a model of transformers.")
        if isinstance(model, str):
            check_model_path(model, adds_adapter=peft_config is not None)
        plan = plan or plan_run(args, env, curriculum, eval_dataset=eval_dataset, eval_env=eval_env)
        self._model_name, self.plan = model_name(model), plan.batches
        given: Any = args.model_init_kwargs or {}
        if processing_class is None:
            revision = given.get("revision") or "main"
            options = {"trust_remote_code": args.trust_remote_code, "revision": revision}
            name = model if isinstance(model, str) else model.config._name_or_path
            if not name:
                raise ConfigError("the policy in memory names no tokenizer to load; give processing_class too.")
            processing_class = get_tokenizer(name, padding_side="left", **options)
        if isinstance(model, str):
            model = get_adapter(model, **{"trust_remote_code": args.trust_remote_code, **given}) or model
        refuse_adapters({"default": peft_config} if peft_config else getattr(model, "peft_config", {}), args.beta)
        self.env, self._rows = env, env.get_dataset()
        args.max_steps = self.plan.max_steps
        # peft 0.21 asks transformers so
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # a hub that refuses a push raises subclasses
        with raises_load_error(model, (OSError,), exact=True), reference_of(model, args.beta > 0 and not peft_config):
            super().__init__(
                model=model,
                reward_funcs=reward_of_the_environment,
                args=args,
                train_dataset=self._rows,
                # never read: transformers requires one where evaluations are asked for
                eval_dataset=self._rows,
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
            )
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError(
                "nothing of the policy is trainable; load an adapter with is_trainable=True, or call "
                "model.requires_grad_(True)."
            )
        refuse_untied(self.model)
        if args.kl_in_reward:
            self.beta = 0.0
        disable_dropout(self.model, warns=self.is_world_process_zero())
        # DeepSpeed keeps weights of 32 bits beside those of 16
        if self.is_world_process_zero() and not self.is_deepspeed_enabled:
            warn_of_lost_updates(self.model, args.learning_rate)
        if getattr(self.model.config.get_text_config(), "num_local_experts", None) == 0:
            # a dense member of a family of mixtures, such as Granite 4's, routes nothing
            self.aux_loss_enabled = False
        fuse_heads(self)
        use_onednn(self.model, self.ref_model)
        refuse_processes(args, self.accelerator, experts=self.aux_loss_enabled)
        self.last_block: ScoredBlock | None = None
        plan = with_one_bos(plan, self._rows, self.processing_class)
        self.sampling_args = plan.sampling_args
        self._settle_rows()
        self._make_parts(plan, client, weight_sync)
        self._set_callbacks(callbacks or [])

    def _make_parts(self, run: RunPlan, client: Any, weight_sync: WeightSync | None) -> None:
        """Make the parts, each of parts above it."""
        args, plan, accelerator, model = self.args, self.plan, self.accelerator, self.model
        tokenizer: Any = self.processing_class
        self.ranks = Ranks(accelerator)
        self.monitor = RunMonitor(args, plan, self.env, model, accelerator.device)
        self.timer = self.monitor.timer
        self.images = self._load_images()
        self.weights = PolicyWeights(self.ranks, accelerator.unwrap_model(model))
        self.logprobs = PolicyLogprobs(
            accelerator,
            self.ranks,
            model,
            self.ref_model,
            batch_size=args.old_logprobs_batch_size,
            temperature=self.temperature,
            images=self.images,
        )
        self.check = LogprobCheck.of_run(args, model, self._rows, self._score_tokens, on_result=self._log_probe)
        self.publisher = WeightPublisher(
            args, client, weight_sync, self.weights, tokenizer, self._rows, self.check, self.images
        )
        self.session = RolloutSession(
            args,
            [self.env, *(one.env for one in run.eval_sets)],
            self._rows,
            plan,
            run.sampling_args,
            self.publisher,
            tokenizer,
            self.timer,
            # DeepSpeed takes its optimizer step with the last backward pass, before a check could be judged
            checks_meanwhile=not self.is_deepspeed_enabled,
            images=None if self.images is None else self.images.store,
        )
        self.evaluator = Evaluator(
            args, self.ranks, self.timer, self.env, run.eval_sets, run.sampling_args, self.session
        )
        in_shards = self.is_fsdp_enabled or self.is_deepspeed_enabled
        changing = accelerator.unwrap_model(self.ref_model) if args.sync_ref_model else None
        self.checkpoint_weights = CheckpointWeights(
            self.ranks, self.weights.model, in_shards=in_shards, reference=changing
        )
        self.directory = RunDirectory(
            args,
            plan,
            self.ranks,
            self._rows,
            self._model_name,
            checksums=self.checkpoint_weights.checksums,
            blocks=self.session.finished_blocks,
        )
        self._first_step = 0
        self.loss_metrics = LossMetrics()
        self.entropy_bonus = EntropyBonus(self, self.ranks, self.loss_metrics)
        self.data_loop = DataLoop(
            plan,
            args,
            self.ranks,
            self.logprobs,
            self.session,
            self.timer,
            demonstrations=self._load_demonstrations(),
            record=self._record_block,
            log_block=self.directory.log_block,
            log=self._log_values,
        )
        self.updates = FiniteUpdates(accelerator, self.ranks, self.data_loop.drop_update)

    def _load_images(self) -> RowImages | None:
        """Return how prompts with images are read, where the run takes any, and freeze what they pass through."""
        args = self.args
        if not args.max_images:
            return None
        policy = self.accelerator.unwrap_model(self.model)
        base = policy.get_base_model() if is_peft_model(policy) else policy
        try:
            given: Any = args.model_init_kwargs or {}
            processor = ImageProcessor.load(
                base.config._name_or_path, self.processing_class, base.config, given.get("revision")
            )
        except ImageError as error:
            raise ConfigError(f"max_images={args.max_images}: {error}.") from error
        parts = towers(base).values()
        if not args.train_vision_tower:
            for part in parts:
                part.requires_grad_(False)
        elif not any(parameter.requires_grad for part in parts for parameter in part.parameters()):
            raise ConfigError(
                "train_vision_tower is set, and the adapter has no weight there; name the tower's layers in its "
                "target_modules, or leave the setting out."
            )
        elif args.ddp_find_unused_parameters is None:
            # rows of a rank's micro-batch may all be without an image
            args.ddp_find_unused_parameters = True
        store = ImageStore(Path(str(args.output_dir)) / "images", args.max_images)
        return RowImages(processor, store, base.base_model)

    def _load_demonstrations(self) -> Demonstrations | None:
        """Return the run's demonstrations on rank 0, which makes the rows; None elsewhere, and without any."""
        args, loaded = self.args, list[Demonstrations]()
        if args.demonstrations is not None:
            load = functools.partial(Demonstrations.load, args.demonstrations, self.processing_class)
            self.ranks.on_rank_0(lambda: loaded.append(load(seed=self.plan.seed, max_seq_len=args.max_seq_len)))
        return loaded[0] if loaded else None

    def _settle_rows(self) -> None:
        """Turn off what the model or its loss does not allow of rows: leaving some out, and sharing prefixes."""
        args, policy = self.args, self.accelerator.unwrap_model(self.model)
        args.skip_zero_advantage_rows &= only_advantages_matter(args, self.aux_loss_enabled)
        base = policy.get_base_model() if is_peft_model(policy) else policy
        if args.share_prefixes and (
            self.aux_loss_enabled
            or (args.max_images and not hasattr(base.base_model, "get_rope_index"))
            or not can_share(base, args.max_seq_len)
        ):
            args.share_prefixes = False
            logger.warning(
                "each row is computed on its own: its prompt cannot be shared with this model (linear attention, a "
                "window below max_seq_len, a kernel that is not sdpa, images as Gemma 3 sees them, or a router loss)"
            )

    def _set_callbacks(self, given: Sequence[Any]) -> None:
        # lines of our own replace the bar and the raw dicts of transformers
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(MonitorCallback(self.monitor, self.accelerator.device))
        if not any(isinstance(callback, ProgressLines) for callback in given):
            self.add_callback(ProgressLines(self.plan))
        self._stops_between_blocks = StopsBetweenBlocks(self.plan.updates_per_block)

    @property
    def weight_sync(self) -> WeightSync:
        """The way that weights reach the rollout servers."""
        return self.publisher.sync

    # -- a run --------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train to `max_steps`.

        Args:
            resume_from_checkpoint: a checkpoint's path, or True for the newest complete one in `output_dir`
                (step 0 where there is none). Left out, the run begins at step 0; what an earlier one left in
                `output_dir` gets the name `output_dir-earlier-N`.
            trial, ignore_keys_for_eval: as in transformers.

        Raises:
            CheckpointError: the checkpoint is incomplete, of another plan, not seen by every process, or does not
                give its weights back; or another run writes to `output_dir`.
            GenerationError, WeightSyncError: with the cause; nothing is left running.
            RankError: another process of the run failed, was stopped or disappeared.
        """

        def run(termination: Termination) -> Any:
            self._forget_earlier_run()
            checkpoint = self._begin_run(resume_from_checkpoint)
            if checkpoint is not None and self.images is not None:
                self.images.store.adopt(Path(checkpoint).parent / "images")
            # after every callback that may ask for a stop or a save
            self.pop_callback(self._stops_between_blocks)
            self.add_callback(self._stops_between_blocks)
            with self.directory.rotation(), self._ended_if_stuck(termination):
                trained = super(GRPOTrainer, self).train(checkpoint, trial, ignore_keys_for_eval)
                self.weights.require_finite("those of a finished run")
                return trained

        return end_together(
            self.accelerator,
            run,
            self.close,
            monitored=functools.partial(shown, self.monitor, self.callback_handler.callbacks),
        )

    def _begin_run(self, asked: str | bool | None) -> str | None:
        """Open all that a run uses and return the checkpoint's path on this rank, None for step 0."""
        checkpoint = self.directory.choose(asked)
        self._first_step = resume_step(checkpoint) if checkpoint else 0

        def begin() -> None:
            # servers come first: nothing is archived for a run that finds none
            prefetcher, generator = self.session.open(), self.session.generator
            assert generator is not None
            prefetcher.restore(self.directory.begin(checkpoint, self.evaluator.stored.own, resumes=bool(asked)))
            self.monitor.begin(
                self._first_step if checkpoint else None,
                servers=self.publisher.servers,
                activity=generator.activity,
                drains=prefetcher.drains,
            )

        self.ranks.on_rank_0(begin)
        return checkpoint

    def _ended_if_stuck(self, termination: Termination) -> contextlib.AbstractContextManager[None]:
        """End rank 0 of several by a signal also inside a collective that does not end; it gives back what it can."""

        def give_back(error: BaseException) -> None:
            try:
                self.weight_sync.close()
            finally:
                self.monitor.end(error)

        if self.session.generator is None or self.ranks.count == 1:
            return contextlib.nullcontext()
        return ended_if_stuck(termination, self.session.generator.loop, give_back)

    def _forget_earlier_run(self) -> None:
        self.data_loop.reset()
        self.loss_metrics.reset()
        self.entropy_bonus.reset()
        self.updates.reset()
        # a run that was stopped inside an update left other values
        self.last_block, self._step = None, 0
        kept: list[Any] = [*self._metrics.values(), *self._logs.values()]
        for values in kept:
            values.clear()

    def open(self) -> RolloutPrefetcher:
        """Wait for the rollout server and start the generator (rank 0); `train` and `evaluate` do it."""
        return self.session.open()

    def close(self) -> None:
        """End the generator's thread, give back what weight pushes used, and release the directory.

        May be called twice.
        """
        self.evaluator.stored.own.clear()
        # whatever one of them raises, the other is closed
        with contextlib.ExitStack() as stack:
            stack.callback(self.directory.close)
            stack.callback(self.session.close)

    # -- data ---------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of empty items: the data loop gives what is trained."""
        return empty_epoch(self.plan, self._first_step)

    @in_stage("prepare")
    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        micro_step = self._step % self.plan.gradient_accumulation_steps
        return {"micro_batches": self.data_loop.micro_batches(self.state.global_step, micro_step)}

    def _record_block(self, block: ScoredBlock, trained: TrainingBlock, step: int) -> dict[str, float]:
        """Write down what became of a block, on rank 0; return its metrics."""
        self.last_block = block
        if self.log_completions:
            fill_completions_table(self._logs, block, trained)
        self.state.num_input_tokens_seen += block_tokens(block)
        tokens_seen = float(self.state.num_input_tokens_seen)
        return {**self.monitor.note_block(block, trained, step), "num_tokens": tokens_seen}

    def _score_tokens(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> list[float]:
        names: list[str] = []
        if self.images is not None:
            names = self.images.store.keep_all(row_fields(self._rows[0])[0])
        return self.logprobs.of_tokens(prompt_ids, ids, names, together=self.weights.is_sharded)

    def _log_probe(self, difference: float) -> None:
        self._log_values({"sampling/probe_difference": difference})

    def _log_values(self, metrics: Mapping[str, float]) -> None:
        note_values(self._metrics["train"], metrics)

    # -- loss ---------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take a micro-step as TRL does; at the end of a streamed update its gradient gets the actual weights."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        scale = self.data_loop.gradient_scale
        if scale is not None:
            scale_gradients(model, scale)
        if self.accelerator.sync_gradients:
            self.entropy_bonus.end_update()
        return self.updates.end_micro_step(loss, 1.0 if scale is None else scale)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        # transformers takes its optimizer step next: the weights must still be those of the push that is checked
        with self.timer.stage("optimizer"):
            self.publisher.finish_check()
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.updates.end_update(model, self.optimizer, self.state.global_step, norm)
        return norm

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the loss of a micro-step, micro-batch by micro-batch."""
        return micro_step_loss(self.accelerator, model, inputs["micro_batches"], self._compute_loss)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        scored = self.logprobs.score(model, inputs, experts=self.aux_loss_enabled)
        entropy_RT, mask_RT = scored.entropy_RT, inputs["loss_mask"]
        assert entropy_RT is not None
        quantile = self.top_entropy_quantile
        loss, measured = policy_loss(
            scored.logps_RT,
            entropy_RT,
            inputs,
            self.args,
            entropy_coef=self.entropy_bonus.coefficient,
            trained_RT=self.get_high_entropy_mask(entropy_RT, mask_RT, 1 - quantile) if quantile < 1.0 else None,
            others_RTK=scored.others_RTK,
        )
        if scored.router_loss is not None:
            loss = loss + self.router_aux_loss_coef * scored.router_loss * mask_RT.sum() / inputs["update_tokens"]
            measured.values["aux_loss"] = scored.router_loss.detach().expand(int(mask_RT.sum()))
        self.loss_metrics.add(measured.values)
        self.entropy_bonus.note(measured)
        self.updates.note_call(loss, inputs["rollout_index"], measured.is_finite_R)
        # a token's weight is its share of the whole update, and replicas take the mean of their ranks' gradients, as
        # transformers does of their losses; micro-steps are added up by both
        return loss * self.accelerator.num_processes

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with what micro-batches measured joined over ranks, and the trainer's time by stage."""
        if self.model.training:
            self._log_values(self.loss_metrics.take(self.ranks))
            fill_counts(self._metrics["train"])
            # the log of a run's end has the steps since the last one
            if "loss" in logs or "train_runtime" in logs:
                logs.update(self.monitor.interval(self.state.global_step))
            self.updates.correct(logs)
        super().log(logs, start_time)

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Roll out eval prompts under the present weights, greedily or sampled, and log what was found.

        Args:
            eval_dataset: rows to use instead of the trainer's sets, or several such by name.
            ignore_keys: ignored.
            metric_key_prefix: what the metrics' names begin with.

        Returns:
            `eval_reward`, its standard error `eval_reward_stderr`, and the others of docs/reference/metrics.md.

        Raises:
            NothingScoredError: no rollout of a set got a reward, or it ran out of time. While a run trains, that is a
                warning instead, unless the learning rate depends on the metric.
        """
        state, in_train = self.state, self.is_in_train
        # after a run its best weights are loaded
        best = self.args.load_best_model_at_end and state.best_model_checkpoint and not in_train
        metrics = self.evaluator.evaluate(
            self.evaluator.sets_of(eval_dataset),
            step=(state.best_global_step if best else None) or state.global_step,
            version=state.global_step,
            prefix=metric_key_prefix,
            required=not in_train or self.args.rate_needs_metric,
        )
        if metrics:
            log_evaluation(self, metrics)
        self.control = self.callback_handler.on_evaluate(self.args, state, self.control, metrics)
        return metrics

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        if skip_scheduler and self.state.global_step > 0:
            # eval_on_start: a run that resumes was evaluated where it started
            return {}
        return dict(super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler))

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        decide = functools.partial(super()._determine_best_metric, metrics, trial)
        is_best = self.evaluator.is_best(decide, metrics)
        if is_best and self.args.load_best_model_at_end:
            # evaluations may be more frequent than checkpoints, and only what is saved can be loaded
            self.control.should_save = True
        return is_best

    # -- checkpoints --------------------------------------------------------------------------------------

    @in_stage("save")
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self.directory.saving(self.state):
            super()._save_checkpoint(model, trial)
            self.checkpoint_weights.save_reference(self.directory.checkpoint(self.state.global_step))

    def _load_from_checkpoint(self, path: str, model: Any = None) -> None:
        self.checkpoint_weights.load(path, functools.partial(super()._load_from_checkpoint, path, model))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        in_shards = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if checkpoint is not None:
            check_kept(checkpoint, self.args)
            # here, as DeepSpeed loads the policy on a way of its own
            self.checkpoint_weights.load_reference(checkpoint)
            if not in_shards:
                check_optimizer(checkpoint)
        read = unreadable_named("the optimizer's state", str(checkpoint))
        with contextlib.nullcontext() if in_shards else read, settings_of_the_run(self.optimizer, self.lr_scheduler):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with unreadable_named("the random state", str(checkpoint)):
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        self.checkpoint_weights.load(str(self.state.best_model_checkpoint), super()._load_best_model)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the run's repository on the hub; a hub that refuses is one sentence."""
        with raises_hub_error("the run's repository", "log in by `hf auth login`, or set push_to_hub=False"):
            super().init_hf_repo(token, private)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Push as transformers does; a hub that refuses is one sentence, and the model stays in `output_dir`."""
        with raises_hub_error("the model", f"it is saved in {str(self.args.output_dir)!r}"):
            return super().push_to_hub(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as transformers does, with all files that a server needs.

        A sharded policy is saved whole, and a disk that refuses is one sentence.
        """
        self.weights.require_finite("saved")
        run_dir = Path(str(self.args.output_dir))
        with raises_checkpoint_error(Path(output_dir or run_dir), run_dir):
            if self.args.should_save and self._model_name is not None:
                Path(output_dir or run_dir).mkdir(parents=True, exist_ok=True)
                copy_server_files(self._model_name, Path(output_dir or run_dir))
            if _internal_call or not self.weights.is_sharded:
                super().save_model(output_dir, _internal_call)
                return
            self._save(str(output_dir or run_dir), state_dict=self.weights.gather(tied=True, adapter_only=False))
            if self.args.push_to_hub:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
