"""The trainer's data plane: which micro-batch is trained now, and how it comes from rank 0 to every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from torch import Tensor

from verifiers.data.plan import BatchPlan, Position
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.block import TrainingBlock, build_training_block
from verifiers.train.collate import Dropped, rollout_tokens
from verifiers.train.curriculum import curriculum_metrics
from verifiers.train.feed import BlockFeed
from verifiers.train.ledger import Ledger, block_record
from verifiers.train.loss_metrics import LossMetrics
from verifiers.train.metrics import block_metrics
from verifiers.train.passes import MicroBatches, all_passes
from verifiers.train.probing import ProbingTrainer
from verifiers.train.ranks import on_rank_0
from verifiers.train.streaming import BlockStream, StreamedPart
from verifiers.train.watching.clock import in_stage
from verifiers.train.watching.watch import WatchedTrainer

__all__ = ["DataPlane"]

logger = logging.getLogger("verifiers.train")


@dataclass(slots=True)
class InTraining:
    """What a rank holds of the block in training. Each run has one of its own, so that nothing outlives a run.

    Attributes:
        block_id: the block; None before the first.
        batches: its micro-batches, so far.
        rescales: of a streamed block, by the micro-batch that ends an update: what its gradient is multiplied by.
        rescale: that of the micro-batch in training, where it has one.
        stream: where a streamed block's micro-batches come from, on rank 0.
        update_loss: the losses of the update's micro-batches, added up.
        said_over: a row over `max_tokens_per_pass` was warned of.
    """

    block_id: int | None = None
    batches: MicroBatches = field(default_factory=list)
    rescales: dict[int, float] = field(default_factory=dict)
    rescale: float | None = None
    stream: BlockStream | None = None
    update_loss: Any = 0.0
    said_over: bool = False


class DataPlane(WatchedTrainer, ProbingTrainer):
    """The part of the trainer that turns blocks into micro-batches on each rank.

    Attributes:
        last_block: the block trained newest, on rank 0.
        ledger: where the fate of every rollout is written, on rank 0; None outside `train`.
    """

    plan: BatchPlan
    generator: AsyncBatchGenerator | None = None
    feed: BlockFeed | None = None
    last_block: ScoredBlock | None = None
    ledger: Ledger | None = None
    _now: InTraining

    def __init__(self, **kwargs: Any) -> None:
        self._now = InTraining()
        super().__init__(**kwargs)

    def _begin_run(self) -> None:
        """Forget what is of an earlier run of this object; every rank calls it."""
        self._now = InTraining()
        self.last_block = None
        # a run that was cut inside an update left it anywhere
        self._step = 0
        self._correcting, self._mismatch, self._loss_metrics = None, [], LossMetrics()
        kept: list[Any] = [*self._metrics.values(), *self._logs.values()]
        for values in kept:
            values.clear()

    def open(self) -> None:
        """Wait for the rollout server and start the generator (rank 0)."""
        raise NotImplementedError

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        return on_rank_0(self.accelerator, work, self._joint_work())

    @in_stage("prepare")
    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        # the block follows the optimizer step: micro-step counters start at 0 again after a resume
        step = self.state.global_step
        position = self.plan.position(step, self._step % self.plan.gradient_accumulation_steps)
        # raised on every rank before the next micro-step
        self._on_rank_0(self._stop_if_broken)
        if self._now.block_id != position.block_id:
            self._begin_block(position.block_id, step)
        now = self._now
        if position.micro_batch == len(now.batches):
            self._next_part(position)
        now.rescale = now.rescales.get(position.micro_batch)
        return {"passes": now.batches[position.micro_batch][self.accelerator.process_index]}

    def _may_probe_meanwhile(self) -> bool:
        # pushes that drain are for runs that can be repeated: nothing then runs beside a probe
        return self.feed is not None and not self.feed.drains and super()._may_probe_meanwhile()

    def _stop_if_broken(self) -> None:
        if self.generator is not None:
            self.generator.check()

    # -- whole blocks ---------------------------------------------------------------------------------------

    def _begin_block(self, block_id: int, step: int) -> None:
        now = self._now
        now.batches, now.rescales = [], {}
        if self.args.streaming:
            self._on_rank_0(lambda: self._begin_stream(block_id, step))
        else:
            batches, metrics = self._on_rank_0(lambda: self._produce(block_id, step))
            now.batches = batches
            self._log_values(metrics)
            self._score(batches)
        now.block_id = block_id

    def _produce(self, block_id: int, step: int) -> tuple[MicroBatches, dict[str, float]]:
        self.open()
        assert self.feed is not None
        self.feed.begin(block_id, step)
        block = self.feed.take(block_id, step)
        trained = build_training_block(
            block,
            self.plan,
            self.args,
            self._tokenizer.pad_token_id,
            skip_flat=self._only_advantages_matter(),
            oldest_version=self.feed.oldest_version(step),
        )
        return trained.batches, self._finish_block(block, trained, step)

    def _finish_block(self, block: ScoredBlock, trained: TrainingBlock, step: int) -> dict[str, float]:
        """Record what became of a block; gives its metrics."""
        assert self.feed is not None
        self.last_block = block
        trained.dropped += self._not_reached(block, trained, step)
        if self.ledger is not None:
            self.ledger.write(block_record(block, step, trained.dropped))
        metrics = block_metrics(block, trained, self.plan)
        self._say_if_over(metrics["rows/largest_pass_tokens"])
        metrics.update(curriculum_metrics(self.plan, block))
        oldest = trained.oldest_version()
        if oldest is not None:
            metrics["staleness"] = float(step - oldest)
        metrics["num_tokens"] = self._total_tokens(block)
        if self.log_completions:
            self._keep_for_table(block, trained)
        self.watch.note_block(block, trained, step)
        return metrics

    def _say_if_over(self, largest_pass_tokens: float) -> None:
        budget = self.args.max_tokens_per_pass
        if budget is None or largest_pass_tokens <= budget or self._now.said_over:
            return
        self._now.said_over = True
        logger.warning(
            "a row of %d tokens is over max_tokens_per_pass=%d and has a pass of its own, as any like it will; drop "
            "such rows by max_seq_len, or lower max_completion_length.",
            largest_pass_tokens,
            budget,
        )

    def _micro_batches_reached(self, step: int) -> int:
        """Micro-batches of a block's first pass that are trained before the run ends; all but in its last block."""
        left = (self.plan.max_steps - step) * self.plan.gradient_accumulation_steps
        return min(self.plan.steps_per_generation, left)

    def _not_reached(self, block: ScoredBlock, trained: TrainingBlock, step: int) -> list[Dropped]:
        reached, rollouts = self._micro_batches_reached(step), block.rollouts
        if reached == self.plan.steps_per_generation:
            return []
        if self.args.streaming:
            beyond = set(range(reached * self.plan.completions_per_micro_step, len(rollouts)))
        else:
            rest = [batch["rollout_index"].tolist() for batch in all_passes(trained.batches[reached:])]
            beyond = {index for indices in rest for index in indices if index >= 0}
        return [
            Dropped(rollouts[index].key, "run_ended", tokens=rollout_tokens(rollouts[index]))
            for index in sorted(beyond)
        ]

    # -- streaming ------------------------------------------------------------------------------------------

    def _begin_stream(self, block_id: int, step: int) -> None:
        self.open()
        assert self.feed is not None
        self.feed.begin(block_id, step)
        self._now.stream = BlockStream(
            self.feed,
            self.plan,
            self.args,
            self._tokenizer.pad_token_id,
            block_id,
            step,
            skip_flat=self._only_advantages_matter(),
        )

    def _next_part(self, position: Position) -> None:
        """Take the next micro-batch of the block that is being generated; only in the first pass over it."""
        step = position.block_id * self.plan.updates_per_block
        last = position.micro_batch == self._micro_batches_reached(step) - 1
        part, metrics = self._on_rank_0(lambda: self._produce_part(last))
        self._now.batches.append(part.cells)
        if part.rescale is not None:
            self._now.rescales[position.micro_batch] = part.rescale
        self._score([part.cells])
        if last:
            self._log_values(metrics)

    def _produce_part(self, last: bool) -> tuple[StreamedPart, dict[str, float]]:
        stream = self._now.stream
        assert stream is not None
        part = stream.next()
        metrics = self._finish_block(*stream.finish(), stream.optimizer_step) if last else {}
        return part, metrics

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """As transformers'; at the end of a streamed update its gradient gets the right denominator."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if not self.args.streaming:
            return loss
        now = self._now
        now.update_loss = now.update_loss + loss.detach()
        if now.rescale is None:
            return loss
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(now.rescale)
        # transformers adds up what this returns: the sum over the update is to be the loss
        total, now.update_loss = now.update_loss, 0.0
        return loss + total * (now.rescale - 1.0)

    # -- old and reference log-probs --------------------------------------------------------------------------

    @in_stage("old_logprobs")
    def _score(self, batches: MicroBatches) -> None:
        """Old log-probs before these micro-batches are first trained, where they are needed, and the reference's."""
        rank = self.accelerator.process_index
        for batch in all_passes([[cells[rank]] for cells in batches]):
            if not self.args.importance_correction and self.args.may_be_stale:
                # nothing else tells stale tokens from fresh ones: the clipping then acts on current / sampler
                batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
            elif self._trained_more_than_once():
                batch["old_per_token_logps"] = self._old_logps(batch, self.state.global_step)
            if self.beta != 0.0:
                batch["ref_per_token_logps"] = self._reference_logps(batch)

    def _trained_more_than_once(self) -> bool:
        # a whole block's proximal policy is that of its first update, a streamed micro-batch's that of its own
        return self.plan.num_iterations > 1 if self.args.streaming else self.plan.updates_per_block > 1

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

    # -- what is shown ----------------------------------------------------------------------------------------

    def _log_values(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

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

    def _total_tokens(self, block: ScoredBlock) -> float:
        tokens = sum(r.usage.prompt_tokens + r.usage.completion_tokens for r in block.launched)
        self.state.num_input_tokens_seen += tokens
        return float(self.state.num_input_tokens_seen)
