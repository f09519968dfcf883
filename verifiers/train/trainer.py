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

from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback

from verifiers.data.adaptive import Adapts
from verifiers.data.curriculum import Curriculum
from verifiers.envs.ending import teardown_at_exit
from verifiers.errors import ConfigError, Error
from verifiers.rollouts.block_run import GroupPolicy
from verifiers.rollouts.endpoint import backend_for
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Group
from verifiers.rollouts.sync import WeightSync
from verifiers.train.advantages import group_is_flat
from verifiers.train.beginning import Beginning, choose_beginning, clear_the_way, seen_from_here
from verifiers.train.checkpoint import (
    extra_state,
    mark_complete,
    mark_incomplete,
    model_name,
    resume_step,
    told_where_writing_fails,
)
from verifiers.train.config import GRPOConfig
from verifiers.train.curriculum import curriculum_state, planned_run, restore_curriculum, still_planned
from verifiers.train.epochs import empty_epoch
from verifiers.train.evaluating import EvaluatingTrainer
from verifiers.train.evaluation_settings import check_held_out
from verifiers.train.feed import BlockFeed
from verifiers.train.heap import GivesMemoryBack
from verifiers.train.held_out import held_out_sets
from verifiers.train.keeping import drop_old_checkpoints
from verifiers.train.ledger import Ledger
from verifiers.train.models import check_model_path, get_tokenizer, told_what_cannot_be_loaded
from verifiers.train.output_lock import OutputLock
from verifiers.train.probing import BeforeUpdates
from verifiers.train.progress import ProgressLines
from verifiers.train.ranks import end_together
from verifiers.train.saved_blocks import load_blocks, save_blocks
from verifiers.train.servers import each_server, watched_servers
from verifiers.train.settings import refuse_mid_block_saves, training_sampling_args
from verifiers.train.sharding import refuse_short_ddp_timeout, refuse_unworkable_sharding
from verifiers.train.start_checks import check_output_dir
from verifiers.train.stopping import StopsBetweenBlocks
from verifiers.train.watching.clock import in_stage
from verifiers.train.weight_sync import HeldSync

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


class GRPOTrainer(EvaluatingTrainer):
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

    Raises:
        ConfigError: sizes that do not divide, settings that contradict each other or the environment.
    """

    _lock: OutputLock | None = None
    _begins_at = 0

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
        check_output_dir(str(args.output_dir))
        if isinstance(model, str):
            check_model_path(model)
            given: Any = args.model_init_kwargs or {}
            options = {"trust_remote_code": args.trust_remote_code, "revision": given.get("revision") or "main"}
            processing_class = processing_class or get_tokenizer(model, padding_side="left", **options)
        self.env = env
        dataset = env.get_dataset()
        self.plan = planned_run(args, env, curriculum)
        self._curriculum_at_start = curriculum_state(self.plan)
        args.max_steps = self.plan.max_steps
        refuse_mid_block_saves(args, self.plan.updates_per_block)
        self.sampling_args = training_sampling_args(env, args)
        self.held_out = held_out_sets(env, eval_dataset, eval_env, most=args.num_eval_prompts)
        check_held_out(args, self.held_out)
        with contextlib.ExitStack() as loading:
            if isinstance(model, str):
                # a hub that refuses a push raises subclasses
                loading.enter_context(told_what_cannot_be_loaded(model, (OSError,), exact=True))
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
        self._rows, self._model_name = dataset, model_name(model)
        self._client_given = client is not None
        backend = backend_for(client if client is not None else self._default_client())
        self.weight_sync = weight_sync or self._default_sync(each_server(backend))
        self._servers = watched_servers(backend, self.weight_sync, args.server_restart_timeout)
        self._client = client if client is not None else self._servers
        if args.drain_before_sync is False:
            self._drains()
        refuse_unworkable_sharding(self.accelerator, args)
        refuse_short_ddp_timeout(args, self.accelerator.num_processes)
        if args.streaming:
            self._refuse_unstreamable()
        # lines of our own replace the bar and the raw dicts of transformers
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(BeforeUpdates(self._settle_probe))
        if not any(isinstance(callback, ProgressLines) for callback in callbacks or []):
            self.add_callback(ProgressLines(self.plan))
        self.add_callback(GivesMemoryBack())
        self._stops = StopsBetweenBlocks(self.plan.updates_per_block)
        self.add_callback(self._stops)

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
                (step 0 where there is none). Left out, the run begins at step 0; what an earlier one left in
                `output_dir` is moved into `earlier-N` there.

        Raises:
            CheckpointError: the checkpoint is incomplete, of another plan, or not seen by every process; or another
                run writes to `output_dir`.
            GenerationError, WeightSyncError: with the cause; nothing is left running.
            RankError: another process of the run failed, was stopped or vanished.
        """
        output_dir, rank = str(self.args.output_dir), self.accelerator.process_index

        def choose() -> Beginning:
            self._lock = OutputLock(output_dir)
            return choose_beginning(output_dir, resume_from_checkpoint, self.plan, self._rows, self._model_name)

        def run() -> Any:
            self._begin_run()
            beginning = self._on_rank_0(choose)
            checkpoint = seen_from_here(beginning, output_dir, rank)
            self._begins_at = resume_step(checkpoint) if checkpoint else 0
            self._owed = self._on_rank_0(lambda: self._open_run(beginning))
            # it must hear of a stop after whoever asks for one
            self.remove_callback(self._stops)
            self.add_callback(self._stops)
            return super(GRPOTrainer, self).train(checkpoint, trial, ignore_keys_for_eval)

        return end_together(self.accelerator, run, self.close, watched=self._watched, give_back=self._give_back)

    def _open_run(self, beginning: Beginning) -> int | None:
        """Rank 0: open what a run needs; gives the step whose evaluation the checkpoint still owes."""
        self.open()
        assert self.feed is not None
        output_dir, checkpoint, step = str(self.args.output_dir), beginning.checkpoint, beginning.step
        clear_the_way(beginning, output_dir, self._evaluation_records().own())
        if self.args.save_only_model and self.args.save_strategy != "no":
            logger.warning(
                "with save_only_model=True no run can go on from its checkpoints: they lack the optimizer."
            )
        self.ledger = Ledger(output_dir, self.plan.first_block_after(step))
        further = extra_state(checkpoint) if checkpoint else self._curriculum_at_start
        restore_curriculum(self.plan, further)
        if checkpoint:
            self.feed.restore(still_planned(self.plan, load_blocks(checkpoint)))
        owed = self._open_evaluations(step, further)
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
            self._client = self._servers = backend_for(self.weight_sync.url)
        model = self._policy_name()
        self.args.server_model = model
        self.generator = AsyncBatchGenerator(
            self.env,
            self._servers,
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
        # the first pushes to servers that were just connected are always probed
        self._pushes = 0

    def close(self) -> None:
        """End the generator's thread and give back what weight pushes used. May be called twice."""
        generator, self.generator, self.feed = self.generator, None, None
        self._give_up_evaluation()
        self.ledger = self._records = None
        lock, self._lock = self._lock, None
        # whatever one of them raises, the rest is given back
        with contextlib.ExitStack() as stack:
            if lock is not None:
                stack.callback(lock.release)
            stack.callback(self.weight_sync.close)
            stack.callback(self._leave_probe)
            if generator is not None:
                stack.callback(generator.close)

    def _give_back(self, error: BaseException) -> None:
        """What an end cannot leave out, where there is no time for more."""
        try:
            self.weight_sync.close()
        finally:
            self.watch.end(error)

    def _group_policy(self) -> GroupPolicy:
        args = self.args

        def is_flat(group: Group) -> bool:
            return group_is_flat(group, zero_truncated_completions=args.zero_truncated_completions)

        return GroupPolicy(retries=args.rollout_retries, is_flat=is_flat if args.dynamic_sampling else None)

    def _drains(self) -> bool:
        """Whether rollouts in flight end before a push: as asked for, or because the server would lose them."""
        asked, sync = self.args.drain_before_sync, type(self.weight_sync).__name__
        if getattr(self.weight_sync, "keeps_requests", True):
            return bool(asked)
        if asked is False:
            raise ConfigError(
                f"drain_before_sync is False, but with {sync} a request keeps the weights that it began with, "
                "whatever the server calls them by then: its tokens would be stale unmarked; leave it out."
            )
        if asked is None and self.args.num_batches_ahead:
            logger.warning(
                "%s cannot keep requests in flight while it loads weights, so every push waits for the rollouts in "
                "flight to end; stragglers then leave the server idle (drain_before_sync).",
                sync,
            )
        return True

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As `empty_epoch`."""
        return empty_epoch(self.plan, self._begins_at)

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
            between_blocks = self.state.global_step % self.plan.updates_per_block == 0
            if self.args.should_save and between_blocks and not self.args.save_only_model:
                self._keep_blocks_in_flight(directory)
                of = (self._rows, self._model_name)
                mark_complete(directory, self.plan, self.state.global_step, self.checkpoint_extra(), *of)
        if self.args.should_save:
            drop_old_checkpoints(str(self.args.output_dir), limit, self.state.best_model_checkpoint)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # transformers would delete complete ones without a word to their markers
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit

    def checkpoint_extra(self) -> dict[str, Any]:
        """Further state for a checkpoint's marker, as JSON, by the name of what it belongs to."""
        return {**curriculum_state(self.plan), **self._evaluation_state()}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As transformers'; a disk that refuses is one sentence."""
        run_dir = Path(str(self.args.output_dir))
        with told_where_writing_fails(Path(output_dir or run_dir), run_dir):
            super().save_model(output_dir, _internal_call)

    def _keep_blocks_in_flight(self, directory: Path) -> None:
        if self.feed is None:
            return
        # a block that cannot be finished ends the run when it is wanted; the weights are worth keeping all the same
        with contextlib.suppress(Error):
            save_blocks(directory, self.feed.finished_blocks())
        if self.ledger is not None:
            self.ledger.sync()


def _rewards_come_from_the_environment(**_: Any) -> list[float]:
    raise AssertionError("TRL's own generation is not used")
