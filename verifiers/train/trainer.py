"""GRPOTrainer: TRL's loss plane under a data plane of our own.

Inherited from `trl.GRPOTrainer`: `_compute_loss` with all loss types, log-probs, the reference model, PEFT, FSDP,
DeepSpeed, logging and callbacks. Ours: where batches come from (`_prepare_inputs`), evaluation, checkpoints,
metrics. The private names of TRL that we rely on are listed in `TRL_PRIVATE_NAMES` and guarded by a test.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, ProgressCallback

from verifiers.data.adaptive import Adapts
from verifiers.data.curriculum import Curriculum
from verifiers.envs.ending import teardown_at_exit
from verifiers.errors import ConfigError, Error
from verifiers.rollouts.block_run import GroupPolicy
from verifiers.rollouts.endpoint import Endpoint
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Group
from verifiers.rollouts.sync import WeightSync
from verifiers.train.advantages import group_is_flat
from verifiers.train.checkpoint import (
    check_resumable,
    extra_state,
    mark_complete,
    mark_incomplete,
    newest_complete,
    resume_step,
    told_where_writing_fails,
)
from verifiers.train.config import GRPOConfig
from verifiers.train.curriculum import curriculum_state, planned_run, restore_curriculum, still_planned
from verifiers.train.evaluating import EvaluatingTrainer
from verifiers.train.evaluation_settings import check_held_out
from verifiers.train.feed import BlockFeed
from verifiers.train.heap import GivesMemoryBack
from verifiers.train.held_out import held_out_sets
from verifiers.train.keeping import drop_old_checkpoints
from verifiers.train.ledger import Ledger
from verifiers.train.models import check_model_path, get_tokenizer
from verifiers.train.progress import ProgressLines
from verifiers.train.pushes import BeforeUpdates
from verifiers.train.ranks import end_together
from verifiers.train.saved_blocks import load_blocks, save_blocks
from verifiers.train.settings import refuse_mid_block_saves, training_sampling_args
from verifiers.train.sharding import refuse_unworkable_sharding
from verifiers.train.watching.clock import in_stage
from verifiers.train.weight_sync import HeldSync

__all__ = ["TRL_PRIVATE_NAMES", "GRPOTrainer"]

TRL_PRIVATE_NAMES = (
    "_compute_loss",
    "_determine_best_metric",
    "_evaluate",
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


class GRPOTrainer(EvaluatingTrainer):
    """Trains a policy on an environment through a rollout server.

    Args:
        model: a model, or the path or hub name of one.
        env: the environment: its training rows are the prompts, its rubric gives the rewards.
        args: settings; `grpo_defaults()` gives the classic ones.
        processing_class: the tokenizer; loaded beside the model when left out.
        client: an openai client or Endpoint for the rollouts; routes to `args.server_urls` when left out.
        weight_sync: how weights reach the servers; the kind that `args.weight_sync` names when left out.
        callbacks, optimizers, peft_config: as in TRL.
        eval_dataset: rows to evaluate on instead of the environment's own, or several such by name.
        eval_env: an environment to evaluate on instead, with rows of its own, or several by name.
        curriculum: stages of datasets, or a rule that follows how well the policy does; the datasets are the
            environments of a group, or the values of the column `task`.

    Raises:
        ConfigError: sizes that do not divide, settings that contradict each other or the environment.
    """

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
        curriculum: Curriculum | Adapts | None = None,
        eval_dataset: Any = None,
        eval_env: Any = None,
    ) -> None:
        args = args if args is not None else GRPOConfig("outputs/verifiers-run")
        if isinstance(model, str):
            check_model_path(model)
            processing_class = processing_class or get_tokenizer(model, padding_side="left")
        self.env = env
        dataset = env.get_dataset()
        self.plan = planned_run(args, env, curriculum)
        args.max_steps = self.plan.max_steps
        refuse_mid_block_saves(args, self.plan.updates_per_block)
        self.sampling_args = training_sampling_args(env, args)
        self.held_out = held_out_sets(env, eval_dataset, eval_env, most=args.num_eval_prompts)
        check_held_out(args, self.held_out)
        super().__init__(
            model=model,
            reward_funcs=_rewards_come_from_the_environment,
            args=args,
            train_dataset=dataset,
            # never read: whoever asks for evaluations must give transformers one
            eval_dataset=dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        self._rows = dataset
        self._client_given = client is not None
        self._client = client if client is not None else self._default_client()
        self.weight_sync = weight_sync or self._default_sync()
        refuse_unworkable_sharding(self.accelerator, args)
        if args.streaming:
            self._refuse_unstreamable()
        # lines of our own replace the bar and the raw dicts of transformers
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(BeforeUpdates(self._settle_probe))
        if not any(isinstance(callback, ProgressLines) for callback in callbacks or []):
            self.add_callback(ProgressLines(self.plan))
        self.add_callback(GivesMemoryBack())

    def _refuse_unstreamable(self) -> None:
        if self.aux_loss_enabled:
            raise ConfigError(
                "the router loss of a mixture-of-experts model is a mean over each micro-batch, which streaming "
                "would rescale; set streaming=False."
            )
        if self.is_deepspeed_enabled:
            raise ConfigError(
                "DeepSpeed keeps gradients to itself, and streaming has to rescale them; set streaming=False, or use "
                "FSDP."
            )

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
                (a fresh start where there is none).

        Raises:
            CheckpointError: the checkpoint is incomplete or of another plan.
            GenerationError, WeightSyncError: with the cause; nothing is left running.
            RankError: another process of the run failed, was stopped or vanished.
        """
        if resume_from_checkpoint is True:
            newest = newest_complete(str(self.args.output_dir))
            resume_from_checkpoint = str(newest) if newest is not None else None
        if resume_from_checkpoint:
            check_resumable(resume_from_checkpoint, self.plan)
        checkpoint = resume_from_checkpoint or None

        def run() -> Any:
            self._owed = self._on_rank_0(lambda: self._open_run(checkpoint))
            return super(GRPOTrainer, self).train(checkpoint, trial, ignore_keys_for_eval)

        with self._watched():
            return end_together(self.accelerator, run, self.close)

    def _open_run(self, checkpoint: str | bool | None) -> int | None:
        """Rank 0: open what a run needs; gives the step whose evaluation the checkpoint still owes."""
        self.open()
        assert self.feed is not None
        step = resume_step(str(checkpoint)) if checkpoint else 0
        self.ledger = Ledger(str(self.args.output_dir), self.plan.first_block_after(step))
        if checkpoint:
            restore_curriculum(self.plan, extra_state(str(checkpoint)))
            self.feed.restore(still_planned(self.plan, load_blocks(str(checkpoint))))
        owed = self._open_evaluations(step, extra_state(str(checkpoint)) if checkpoint else {})
        self.watch.begin(self, step if checkpoint else None, owes_evaluation=owed is not None)
        return owed

    def open(self) -> None:
        """Wait for the rollout server and start the generator (rank 0); `train` and `evaluate` do it."""
        if self.generator is not None or not self.accelerator.is_main_process:
            return
        # not in close: an evaluation may follow the training
        for env in (self.env, *(held_out.env for held_out in self.held_out)):
            teardown_at_exit(env)
        self._connect_servers()
        if isinstance(self.weight_sync, HeldSync) and not self._client_given:
            self._client = Endpoint(self.weight_sync.url)
        model = self._policy_name()
        self.args.server_model = model
        self.generator = AsyncBatchGenerator(
            self.env,
            self._client,
            model,
            self.sampling_args,
            num_batches_ahead=self.args.num_batches_ahead,
            max_concurrent=self.args.max_concurrent,
            requests_per_second=self.args.requests_per_second,
            generation_timeout_s=self.args.async_generation_timeout,
            rollout_timeout_s=self.args.rollout_timeout,
            grading_timeout_s=self.args.grading_timeout,
            generation=self.args.generation,
            group_policy=self._group_policy(),
            drop_stragglers_after_s=self.args.drop_stragglers_after,
        ).start()
        self.feed = BlockFeed(
            self._rows,
            self.plan,
            self.generator,
            self._push_weights,
            drains=self._drains(),
            max_staleness=self.args.max_staleness,
            spare_groups=self.args.spare_groups(self.plan.prompts_per_block),
            clock=self.clock,
        )

    def close(self) -> None:
        """End the generator's thread and give back what weight pushes used. May be called twice."""
        generator, self.generator, self.feed = self.generator, None, None
        self._give_up_evaluation()
        self.ledger = None
        if generator is not None:
            generator.close()
        self._leave_probe()
        self.weight_sync.close()

    def _group_policy(self) -> GroupPolicy:
        args = self.args

        def is_flat(group: Group) -> bool:
            return group_is_flat(group, zero_truncated_completions=args.zero_truncated_completions)

        return GroupPolicy(retries=args.rollout_retries, is_flat=is_flat if args.dynamic_sampling else None)

    def _drains(self) -> bool:
        """Whether rollouts in flight end before a push: as asked for, or because the server would lose them."""
        if self.args.drain_before_sync is not None:
            return self.args.drain_before_sync
        keeps = bool(getattr(self.weight_sync, "keeps_requests", True))
        if not keeps and self.args.num_batches_ahead:
            logger.warning(
                "%s cannot keep requests in flight while it loads weights, so every push waits for the rollouts in "
                "flight to end; stragglers then leave the server idle (drain_before_sync).",
                type(self.weight_sync).__name__,
            )
        return not keeps

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One empty item a micro-step: the trainer feeds itself, so nothing is read and skipped on resume."""
        steps = self.plan.max_steps * self.plan.gradient_accumulation_steps
        return DataLoader(_EmptySteps(steps), batch_size=1, collate_fn=_first)

    # -- checkpoints ---------------------------------------------------------------------------------------

    @in_stage("save")
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        # transformers would delete older ones before this one counts
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        with told_where_writing_fails(directory):
            if self.args.should_save:
                mark_incomplete(directory)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.save_total_limit = limit
            self.accelerator.wait_for_everyone()
            # the last checkpoint of a run may stand inside a block; no run can go on from there
            if self.args.should_save and self.state.global_step % self.plan.updates_per_block == 0:
                self._keep_blocks_in_flight(directory)
                mark_complete(directory, self.plan, self.state.global_step, self.checkpoint_extra())
        if self.args.should_save:
            drop_old_checkpoints(str(self.args.output_dir), limit, self.state.best_model_checkpoint)

    def checkpoint_extra(self) -> dict[str, Any]:
        """Further state for a checkpoint's marker, as JSON, by the name of what it belongs to."""
        version = self.feed.server_version if self.feed is not None else None
        kept = {"policy_version": version, "num_batches_ahead": self.args.num_batches_ahead}
        return {**kept, **curriculum_state(self.plan), **self._evaluation_state()}

    def _keep_blocks_in_flight(self, directory: Path) -> None:
        if self.feed is None:
            return
        # a block that cannot be finished ends the run when it is wanted; the weights are worth keeping all the same
        with contextlib.suppress(Error):
            save_blocks(directory, self.feed.finished_blocks())
        if self.ledger is not None:
            self.ledger.sync()


class _EmptySteps(Dataset[Any]):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}


def _first(items: list[Any]) -> Any:
    return items[0]


def _rewards_come_from_the_environment(**_: Any) -> list[float]:
    raise AssertionError("TRL's own generation is not used")
