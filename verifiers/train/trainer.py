"""GRPOTrainer: TRL's loss plane under a data plane of our own.

Inherited from `trl.GRPOTrainer`: `_compute_loss` with all loss types, log-probs, the reference model, PEFT, FSDP,
DeepSpeed, logging and callbacks. Ours: where batches come from (`_prepare_inputs`), evaluation, checkpoints,
metrics. The private names of TRL that we rely on are listed in `TRL_PRIVATE_NAMES` and guarded by a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, ProgressCallback

from verifiers.envs.ending import teardown_at_exit
from verifiers.errors import GenerationError
from verifiers.rollouts.endpoint import Endpoint
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.sync import WeightSync
from verifiers.train.block import TrainingBlock, build_training_block
from verifiers.train.checkpoint import check_resumable, mark_complete, mark_incomplete, newest_complete
from verifiers.train.config import GRPOConfig
from verifiers.train.evaluation import evaluate_policy, evaluation_metrics
from verifiers.train.feed import BlockFeed
from verifiers.train.metrics import block_metrics
from verifiers.train.models import check_model_path, get_tokenizer
from verifiers.train.progress import ProgressLines
from verifiers.train.pushes import PushingTrainer
from verifiers.train.settings import refuse_mid_block_saves, training_sampling_args
from verifiers.train.weight_sync import DirectorySync, HeldSync

__all__ = ["TRL_PRIVATE_NAMES", "GRPOTrainer"]

TRL_PRIVATE_NAMES = (
    "_compute_loss",
    "_get_per_token_logps_and_entropies",
    "_logs",
    "_metrics",
    "_prepare_inputs",
    "_save_checkpoint",
    "_step",
    "_tokenizer",
)
"""What we override or read of `trl.GRPOTrainer` beyond its documented surface."""


class GRPOTrainer(PushingTrainer):
    """Trains a policy on an environment through a rollout server.

    Args:
        model: a model, or the path or hub name of one.
        env: the environment: its training rows are the prompts, its rubric gives the rewards.
        args: settings; `grpo_defaults()` gives the classic ones.
        processing_class: the tokenizer; loaded beside the model when left out.
        client: an openai client or Endpoint for the rollouts; made from `args.server_url` when left out.
        weight_sync: how weights reach the server; `DirectorySync` when left out.
        callbacks, optimizers, peft_config: as in TRL.

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
    ) -> None:
        args = args if args is not None else GRPOConfig("outputs/verifiers-run")
        if isinstance(model, str):
            check_model_path(model)
            processing_class = processing_class or get_tokenizer(model, padding_side="left")
        self.env = env
        dataset = env.get_dataset()
        self.plan = args.batch_plan(len(dataset))
        args.max_steps = self.plan.max_steps
        refuse_mid_block_saves(args, self.plan.updates_per_block)
        self.sampling_args = training_sampling_args(env, args)
        super().__init__(
            model=model,
            reward_funcs=_rewards_come_from_the_environment,
            args=args,
            train_dataset=dataset,
            eval_dataset=env.eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        self._rows = dataset
        self._client_given = client is not None
        self._client = client if client is not None else Endpoint(args.server_url)
        self.weight_sync = weight_sync or self._default_sync(args)
        self.generator: AsyncBatchGenerator | None = None
        self.feed: BlockFeed | None = None
        self.last_block: ScoredBlock | None = None
        self._block: TrainingBlock | None = None
        # lines of our own replace the bar and the raw dicts of transformers
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        if not any(isinstance(callback, ProgressLines) for callback in callbacks or []):
            self.add_callback(ProgressLines(self.plan))

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
        """
        if resume_from_checkpoint is True:
            newest = newest_complete(str(self.args.output_dir))
            resume_from_checkpoint = str(newest) if newest is not None else None
        if resume_from_checkpoint:
            check_resumable(resume_from_checkpoint, self.plan)
        try:
            self._on_rank_0(self.open)
            return super().train(resume_from_checkpoint or None, trial, ignore_keys_for_eval)
        finally:
            self.close()

    def open(self) -> None:
        """Wait for the rollout server and start the generator (rank 0); `train` and `evaluate` do it."""
        if self.generator is not None or not self.accelerator.is_main_process:
            return
        # not in close: an evaluation may follow the training
        teardown_at_exit(self.env)
        self.weight_sync.connect(self.args.server_wait)
        if isinstance(self.weight_sync, HeldSync) and not self._client_given:
            self._client = Endpoint(self.weight_sync.url)
        model = self.args.server_model or self._server().model_name()
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
        ).start()
        self.feed = BlockFeed(self._rows, self.plan, self.generator, self._push_weights)

    def close(self) -> None:
        """End the generator's thread and give back what weight pushes used. May be called twice."""
        generator, self.generator, self.feed = self.generator, None, None
        if generator is not None:
            generator.close()
        self.weight_sync.close()

    def _default_sync(self, args: GRPOConfig) -> WeightSync:
        if args.rollout_device is not None:
            return HeldSync(
                lambda: self.accelerator.unwrap_model(self.model),
                self.processing_class,
                args.rollout_device,
                slots=args.rollout_chunk_size,
                timeout_s=args.weight_sync_timeout,
            )
        url = str(getattr(self._client, "base_url", args.server_url))
        key = getattr(self._client, "api_key", "EMPTY")
        return DirectorySync(url, args.weight_sync_dir, args.weight_sync_timeout, key)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One empty item a micro-step: the trainer feeds itself, so nothing is read and skipped on resume."""
        steps = self.plan.max_steps * self.plan.gradient_accumulation_steps
        return DataLoader(_EmptySteps(steps), batch_size=1, collate_fn=_first)

    # -- batches ------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        # the block follows the optimizer step: micro-step counters start at 0 again after a resume
        step = self.state.global_step
        position = self.plan.position(step, self._step % self.plan.gradient_accumulation_steps)
        # raised on every rank before the next micro-step
        self._on_rank_0(self._stop_if_broken)
        if self._block is None or self._block.block_id != position.block_id:
            self._block = self._next_block(position.block_id, step)
            self._score_block(self._block)
        batch = self._block.batches[position.micro_batch][self.accelerator.process_index]
        return {name: value.to(self.accelerator.device) for name, value in batch.items()}

    def _stop_if_broken(self) -> None:
        if self.generator is not None:
            self.generator.check()

    def _next_block(self, block_id: int, step: int) -> TrainingBlock:
        block, metrics = self._on_rank_0(lambda: self._produce(block_id, step))
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        trained: TrainingBlock = block
        return trained

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0 and give its result to all ranks, or raise its failure on all of them."""
        payload: Any = None
        failure: Exception | None = None
        if self.accelerator.is_main_process:
            try:
                payload = work()
            except Exception as error:
                failure = error
        if self.accelerator.num_processes > 1:
            text = f"{type(failure).__name__}: {failure}" if failure is not None else None
            payload, text = broadcast_object_list([(payload, text)], from_process=0)[0]
            if failure is None and text is not None:
                raise GenerationError(f"rank 0 stopped: {text}")
        if failure is not None:
            raise failure
        return payload

    def _produce(self, block_id: int, step: int) -> tuple[TrainingBlock, dict[str, float]]:
        self.open()
        assert self.feed is not None
        block = self.feed.next(block_id, step)
        self.last_block = block
        trained = build_training_block(
            block, self.plan, self.args, self._tokenizer.pad_token_id, skip_flat=self._only_advantages_matter()
        )
        metrics = block_metrics(block, trained, self.plan)
        oldest = trained.oldest_version()
        metrics["staleness"] = float(step - oldest) if oldest is not None else 0.0
        for stage, seconds in self.feed.seconds.items():
            metrics[f"time/{stage}_s"] = seconds
        metrics["num_tokens"] = self._total_tokens(block)
        if self.log_completions:
            self._keep_for_table(block, trained)
        return trained, metrics

    def _keep_for_table(self, block: ScoredBlock, trained: TrainingBlock) -> None:
        """Fill the table that TRL shows and saves with `log_completions`: the scored rollouts of the newest block."""
        table: Any = self._logs
        for rollout in block:
            if not rollout.is_scored:
                continue
            given = trained.advantages.get(rollout.key, 0.0)
            table["prompt"].append(rollout.prompt)
            table["completion"].append(rollout.completion)
            table["advantages"].append(fmean(given) if isinstance(given, list) else given)
            for name, value in rollout.metrics.items():
                table["rewards"][name].append(value)

    def _only_advantages_matter(self) -> bool:
        """True where a row whose advantage is 0 adds nothing to the loss, so that its forward pass can be saved."""
        args = self.args
        return (
            args.skip_zero_advantage_rows
            and self.beta == 0.0
            and args.entropy_coef == 0.0
            and not args.use_adaptive_entropy
            and args.top_entropy_quantile >= 1.0
            and not self.aux_loss_enabled
            # bnpo divides by the tokens of each micro-batch, so every row of it matters
            and self.loss_type != "bnpo"
        )

    def _total_tokens(self, block: ScoredBlock) -> float:
        tokens = sum(r.usage.prompt_tokens + r.usage.completion_tokens for r in block)
        self.state.num_input_tokens_seen += tokens
        return float(self.state.num_input_tokens_seen)

    def _score_block(self, block: TrainingBlock) -> None:
        """Old log-probs before the block's first update where later updates need them, and the reference's."""
        started = time.perf_counter()
        needs_old = self.plan.updates_per_block > 1
        for cells in block.batches:
            batch = cells[self.accelerator.process_index]
            if needs_old:
                batch["old_per_token_logps"] = self._old_logps(batch, self.state.global_step)
            if self.beta != 0.0:
                batch["ref_per_token_logps"] = self._reference_logps(batch)
        self._metrics["train"]["time/old_logprobs_s"].append(time.perf_counter() - started)

    # -- evaluation, logging, checkpoints -----------------------------------------------------------------

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Roll out held-out prompts under the present weights, greedily or sampled, and log the means.

        Returns:
            `eval_reward`, its clustered standard error `eval_reward_stderr`, the same for each reward function,
            counts of prompts and failures, and `eval_seconds`.
        """
        started = time.perf_counter()

        def measure() -> dict[str, float]:
            measured = evaluation_metrics(self.evaluate_block(eval_dataset), metric_key_prefix)
            measured[f"{metric_key_prefix}_seconds"] = time.perf_counter() - started
            return measured

        metrics: dict[str, float] = self._on_rank_0(measure)
        was_training = self.model.training
        self.model.eval()
        self.log(dict(metrics))
        self.model.train(was_training)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluate_block(self, eval_dataset: Any = None) -> ScoredBlock:
        """The rollouts behind `evaluate`, on rank 0."""
        self.open()
        assert self.generator is not None
        assert self.feed is not None
        self.feed.sync(self.state.global_step)
        dataset = eval_dataset if eval_dataset is not None else self.env.get_eval_dataset(self.args.num_eval_prompts)
        return evaluate_policy(
            self.generator,
            dataset,
            num_generations=self.args.num_generations_eval or 1,
            sampling_args={**self.sampling_args, "temperature": self.args.eval_temperature},
            seed=self.args.seed,
            timeout_s=self.args.async_generation_timeout,
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        directory = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            mark_incomplete(directory)
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        # the last checkpoint of a run may stand inside a block; no run can go on from there
        if self.args.should_save and self.state.global_step % self.plan.updates_per_block == 0:
            mark_complete(directory, self.plan, self.state.global_step)


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
