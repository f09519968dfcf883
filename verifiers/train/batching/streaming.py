"""Micro-steps of a block that is still being generated: each as soon as its groups are scored, in plan order.

How many rollouts and sampled tokens an update has is known only with its last micro-step. So all of its micro-steps
are weighted by provisional numbers, and the gradient that they add up to is multiplied by actual / provisional weight
before the optimizer's step. That is one number for every row, as means over each micro-step are refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.collate import Dropped, TrainingSample
from verifiers.train.batching.packing import MicroBatch, MicroSteps
from verifiers.train.batching.prefetch import RolloutPrefetcher
from verifiers.train.batching.training_block import (
    TrainingBlock,
    UpdateSize,
    block_advantages,
    pack_update,
    pick_rows,
    replaced_rollouts,
)
from verifiers.train.config import GRPOConfig
from verifiers.train.loss.loss_types import UpdateRows, token_weights

__all__ = ["BlockStream", "StreamedMicroStep", "refuse_unstreamable"]


@dataclass(frozen=True, slots=True)
class StreamedMicroStep:
    """One micro-step.

    Attributes:
        by_rank: the micro-batches of each rank.
        gradient_scale: with the last micro-step of an update, the factor for the update's gradient; else None.
    """

    by_rank: list[list[MicroBatch]]
    gradient_scale: float | None


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
    _counted: list[TrainingSample] = field(default_factory=list)

    def next(self) -> StreamedMicroStep:
        """Return the next micro-step, once its groups are scored."""
        plan, number = self.plan, len(self._micro_steps)
        size, group = plan.completions_per_micro_step, plan.num_generations
        first, last = number * size, (number + 1) * size
        # from the first group on, so that places in it are those in the block
        groups = self.prefetcher.groups(self.block_id, 0, -(-last // group), self.optimizer_step)
        self.block = block = ScoredBlock(self.block_id, groups)
        here = {rollout.key for rollout in block.rollouts[first:last]}
        oldest = self.prefetcher.oldest_version(self.optimizer_step)
        picked = pick_rows(block, self.args, oldest, skip_zero_advantage=self.skip_zero_advantage)
        self._dropped += [item for item in picked.dropped if item.key in here]
        samples = [one for one in picked.samples if block.rollouts[one.rollout_index].key in here]
        self._counted += samples
        samples = [sample for sample in samples if sample.rollout_index not in picked.skipped]
        planned = plan.completions_per_update
        # near the actual number of tokens, so that losses before they are scaled are of their usual size
        provisional = UpdateSize(planned, planned * (self.args.max_completion_length or 1))
        (by_rank,) = pack_update(samples, provisional, 1, plan, self.args, self.pad_token_id)
        self._micro_steps.append(by_rank)
        if (number + 1) % plan.gradient_accumulation_steps:
            return StreamedMicroStep(by_rank, None)
        actual, self._counted = UpdateSize.of(self._counted), []
        one = torch.ones(1)
        weights = [token_weights(UpdateRows(one, one, *size), self.args) for size in (actual, provisional)]
        return StreamedMicroStep(by_rank, float(weights[0] / weights[1]))

    def finish(self) -> tuple[ScoredBlock, TrainingBlock]:
        """Return the whole block and what was trained of it, once every micro-step was handed out."""
        block = self.prefetcher.take(self.block_id, self.optimizer_step)
        advantages = block_advantages(block, self.args)
        dropped = [*self._dropped, *replaced_rollouts(block)]
        return block, TrainingBlock(self.block_id, self._micro_steps, advantages, dropped)


def refuse_unstreamable(*, experts: bool, deepspeed: bool) -> None:
    """Refuse runs whose gradient cannot be scaled after its last micro-step.

    Args:
        experts: the loss has the router's term of a mixture of experts.
        deepspeed: gradients are DeepSpeed's.

    Raises:
        ConfigError: it is one of the two.
    """
    if experts:
        raise ConfigError(
            "the router loss of a mixture-of-experts model is a mean over each micro-batch, which streaming "
            "would scale with it; set streaming=False."
        )
    if deepspeed:
        raise ConfigError(
            "DeepSpeed keeps gradients to itself, and streaming has to scale them; set streaming=False, or use FSDP."
        )
