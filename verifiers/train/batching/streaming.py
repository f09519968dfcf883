"""Micro-steps of a block that is still being generated: each as soon as its groups are scored, in plan order.

The denominator of an update (its rollouts, or its sampled tokens) is known only when its last micro-step is. So all
of its micro-steps are weighted by a provisional one, the same for each, and the gradient that they add up to is
multiplied by provisional / actual before the optimizer's step: every loss type but bnpo divides by one number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.collate import Dropped, block_samples, row_tensors
from verifiers.train.batching.packing import MicroBatch, MicroSteps
from verifiers.train.batching.prefetch import RolloutPrefetcher
from verifiers.train.batching.training_block import (
    TrainingBlock,
    block_advantages,
    pack_update,
    refuse_forked_ratios,
    replaced_rollouts,
    rollouts_without_gradient,
    zero_advantage,
)
from verifiers.train.config import GRPOConfig
from verifiers.train.validation.loss_settings import LOSS_TYPES

__all__ = ["BlockStream", "StreamedMicroStep", "refuse_unstreamable"]


@dataclass(frozen=True, slots=True)
class StreamedMicroStep:
    """One micro-step.

    Attributes:
        by_rank: the micro-batches of each rank.
        rescale: with the last micro-step of an update, the factor for the update's gradient; else None.
    """

    by_rank: list[list[MicroBatch]]
    rescale: float | None


@dataclass(slots=True)
class BlockStream:
    """The micro-steps of one block, in order; on rank 0.

    Attributes:
        optimizer_step: at which the block's first update begins.
        skip_zero_advantage: as in `build_training_block`.
        block: its groups that are scored.
    """

    prefetcher: RolloutPrefetcher
    plan: BatchPlan
    args: GRPOConfig
    pad_token_id: int
    block_id: int
    optimizer_step: int
    skip_zero_advantage: bool = False
    block: ScoredBlock | None = None
    _micro_steps: MicroSteps = field(default_factory=list)
    _dropped: list[Dropped] = field(default_factory=list)
    _rollouts: int = 0
    _tokens: int = 0

    def next(self) -> StreamedMicroStep:
        """Return the next micro-step, once its groups are scored."""
        plan, number = self.plan, len(self._micro_steps)
        size, group = plan.completions_per_micro_step, plan.num_generations
        first, last = number * size, (number + 1) * size
        # from the first group on, so that places in it are those in the block
        groups = self.prefetcher.groups(self.block_id, 0, -(-last // group), self.optimizer_step)
        self.block = block = ScoredBlock(self.block_id, groups)
        here = {rollout.key for rollout in block.rollouts[first:last]}
        samples, dropped = block_samples(
            block,
            block_advantages(block, self.args),
            self.args.max_seq_len,
            self.prefetcher.oldest_version(self.optimizer_step),
        )
        refuse_forked_ratios(block, samples, self.args)
        rollouts = block.rollouts
        samples = [sample for sample in samples if rollouts[sample.rollout_index].key in here]
        self._dropped += [item for item in dropped if item.key in here]
        # rollouts without a gradient count in the denominators all the same
        self._rollouts += len({sample.rollout_index for sample in samples})
        self._tokens += sum(sample.row.sampled_tokens for sample in samples)
        if self.skip_zero_advantage:
            skipped = rollouts_without_gradient(samples)
            self._dropped += [zero_advantage(rollouts[index]) for index in sorted(skipped)]
            samples = [sample for sample in samples if sample.rollout_index not in skipped]
        place = number % plan.gradient_accumulation_steps
        (by_rank,) = pack_update(
            row_tensors(samples),
            plan,
            self.args,
            self.pad_token_id,
            micro_steps=range(place, place + 1),
            rollouts_elsewhere=plan.completions_per_update - len({sample.rollout_index for sample in samples}),
            tokens_elsewhere=self._provisional_tokens() - sum(sample.row.sampled_tokens for sample in samples),
        )
        self._micro_steps.append(by_rank)
        rescale = self._rescale() if place == plan.gradient_accumulation_steps - 1 else None
        return StreamedMicroStep(by_rank, rescale)

    def finish(self) -> tuple[ScoredBlock, TrainingBlock]:
        """Return the whole block and what was trained of it, once every micro-step was handed out."""
        block = self.prefetcher.take(self.block_id, self.optimizer_step)
        advantages = block_advantages(block, self.args)
        dropped = [*self._dropped, *replaced_rollouts(block)]
        return block, TrainingBlock(self.block_id, self._micro_steps, advantages, dropped)

    def _provisional_tokens(self) -> float:
        # near the actual number, so that losses before they are rescaled are of their usual size
        return float(self.plan.completions_per_update * (self.args.max_completion_length or 1))

    def _rescale(self) -> float:
        if LOSS_TYPES[self.args.loss_type].mean_over == "update tokens":
            provisional, actual = self._provisional_tokens(), self._tokens
        else:
            provisional, actual = float(self.plan.completions_per_update), self._rollouts
        self._rollouts = self._tokens = 0
        return provisional / actual if actual else 1.0


def refuse_unstreamable(*, experts: bool, deepspeed: bool) -> None:
    """Refuse runs whose gradient cannot be rescaled after its last micro-step.

    Args:
        experts: the loss has the router's term of a mixture of experts.
        deepspeed: gradients are DeepSpeed's.

    Raises:
        ConfigError: it is one of the two.
    """
    if experts:
        raise ConfigError(
            "the router loss of a mixture-of-experts model is a mean over each micro-batch, which streaming "
            "would rescale; set streaming=False."
        )
    if deepspeed:
        raise ConfigError(
            "DeepSpeed keeps gradients to itself, and streaming has to rescale them; set streaming=False, or use "
            "FSDP."
        )
