"""Micro-batches of a block that is still being generated: each as soon as its groups are scored, in plan order.

The denominator of an update (its rollouts, or its sampled tokens) is known only when its last micro-batch is. So all
of its micro-batches are weighted by a provisional one, the same for each, and the gradient that they add up to is
multiplied by provisional / actual before the optimizer's step: every loss type but bnpo divides by one number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verifiers.data.plan import BatchPlan
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.advantages import BlockAdvantages
from verifiers.train.block import (
    TrainingBlock,
    block_advantages,
    flat_rollouts,
    replaced_rollouts,
    weighted_cells,
    zero_advantage,
)
from verifiers.train.collate import Dropped, block_rows
from verifiers.train.config import GRPOConfig
from verifiers.train.feed import BlockFeed
from verifiers.train.passes import MicroBatches, Pass
from verifiers.train.row_weights import TOKEN_MEAN

__all__ = ["BlockStream", "StreamedPart"]


@dataclass(frozen=True, slots=True)
class StreamedPart:
    """One micro-batch.

    Attributes:
        cells: its passes by rank.
        rescale: with the last micro-batch of an update, what the update's gradient is multiplied by; else None.
    """

    cells: list[list[Pass]]
    rescale: float | None


@dataclass(slots=True)
class BlockStream:
    """The micro-batches of one block, in order; on rank 0.

    Attributes:
        optimizer_step: at which the block's first update begins.
        skip_flat: as in `build_training_block`.
    """

    feed: BlockFeed
    plan: BatchPlan
    args: GRPOConfig
    pad_token_id: int
    block_id: int
    optimizer_step: int
    skip_flat: bool = False
    _parts: MicroBatches = field(default_factory=list)
    _dropped: list[Dropped] = field(default_factory=list)
    _rollouts: int = 0
    _tokens: int = 0

    def next(self) -> StreamedPart:
        """The next micro-batch; waits until its groups are scored."""
        plan, number = self.plan, len(self._parts)
        size, group = plan.completions_per_micro_step, plan.num_generations
        first, last = number * size, (number + 1) * size
        start, stop = first // group, -(-last // group)
        groups = self.feed.groups(self.block_id, start, stop, self.optimizer_step)
        block = ScoredBlock(self.block_id, groups)
        here = {
            rollout.key for index, rollout in enumerate(block.rollouts, start=start * group) if first <= index < last
        }
        rows, dropped = block_rows(
            block,
            block_advantages(block, self.args),
            self.args.max_seq_len,
            self.feed.oldest_version(self.optimizer_step),
        )
        rollouts = block.rollouts
        rows = [row for row in rows if rollouts[row.rollout_index].key in here]
        self._dropped += [item for item in dropped if item.key in here]
        # flat ones add nothing to the gradient, but they count
        self._rollouts += len({row.rollout_index for row in rows})
        self._tokens += sum(row.row.sampled_tokens for row in rows)
        if self.skip_flat:
            flat = flat_rollouts(rows)
            self._dropped += [zero_advantage(rollouts[index]) for index in sorted(flat)]
            rows = [row for row in rows if row.rollout_index not in flat]
        place = number % plan.gradient_accumulation_steps
        (cells,) = weighted_cells(
            rows,
            plan,
            self.args,
            self.pad_token_id,
            micro_batches=range(place, place + 1),
            rollouts_elsewhere=plan.completions_per_update - len({row.rollout_index for row in rows}),
            tokens_elsewhere=self._provisional_tokens() - sum(row.row.sampled_tokens for row in rows),
        )
        self._parts.append(cells)
        return StreamedPart(cells, self._rescale() if place == plan.gradient_accumulation_steps - 1 else None)

    def finish(self) -> tuple[ScoredBlock, TrainingBlock]:
        """The whole block and what was trained of it, once every micro-batch was handed out."""
        block = self.feed.take(self.block_id, self.optimizer_step)
        advantages: BlockAdvantages = block_advantages(block, self.args)
        dropped = [*self._dropped, *replaced_rollouts(block)]
        return block, TrainingBlock(self.block_id, self._parts, advantages, dropped)

    def _provisional_tokens(self) -> float:
        # near the actual number, so that losses before the correction are of their usual size
        return float(self.plan.completions_per_update * (self.args.max_completion_length or 1))

    def _rescale(self) -> float:
        if self.args.loss_type in TOKEN_MEAN:
            provisional, actual = self._provisional_tokens(), self._tokens
        else:
            provisional, actual = float(self.plan.completions_per_update), self._rollouts
        self._rollouts = self._tokens = 0
        return provisional / actual if actual else 1.0
