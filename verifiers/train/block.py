"""From a scored block to what each rank trains on: micro-batches of tensors, weighted so that rollouts count once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from verifiers.data.plan import BatchPlan
from verifiers.rollouts.rollout import Rollout, ScoredBlock
from verifiers.train.advantages import BlockAdvantages, ScaleRewards, rollout_advantages, why_unscored
from verifiers.train.collate import Dropped, TrainingRow, block_rows, rollout_tokens, row_length
from verifiers.train.config import GRPOConfig
from verifiers.train.dealing import Dealt, PassLimit, deal_in_order, deal_longest_first
from verifiers.train.passes import MicroBatches, all_passes, weighted_passes

__all__ = [
    "TrainingBlock",
    "block_advantages",
    "build_training_block",
    "flat_rollouts",
    "replaced_rollouts",
    "weighted_cells",
    "zero_advantage",
]


@dataclass(slots=True)
class TrainingBlock:
    """One block, ready to train on.

    Attributes:
        batches: tensors by [micro-batch][rank][pass], under the names that TRL's loss reads, and `row_weights` (R,),
            `policy_versions` (R,), `sampled_tokens` (R,).
        dropped: rollouts and rows that are not trained on, with their reasons.
    """

    block_id: int
    batches: MicroBatches
    advantages: BlockAdvantages
    dropped: list[Dropped]

    def oldest_version(self) -> int | None:
        """The oldest policy version among the trained tokens; None where nothing is trained."""
        versions = [int(v) for batch in all_passes(self.batches) for v in batch["policy_versions"] if v >= 0]
        return min(versions, default=None)


def build_training_block(
    block: ScoredBlock,
    plan: BatchPlan,
    args: GRPOConfig,
    pad_token_id: int,
    *,
    skip_flat: bool = False,
    oldest_version: int | None = None,
) -> TrainingBlock:
    """Compute advantages, pick rows, and deal them over updates, micro-batches, ranks and passes.

    Rollouts are shuffled by (seed, block) and cut into the updates of the block by their planned place, so that
    a failed rollout leaves a gap rather than moving the others; all rows of a rollout stay in one update.
    Within an update rows are dealt by length, see `train.dealing`.

    Args:
        skip_flat: leave out rollouts whose advantage is 0 on every token. They count in every denominator as before,
            so loss and gradient are the same; only right where nothing but the advantages reaches the loss.
        oldest_version: rollouts with tokens of an older policy version are dropped; None for none.
    """
    advantages = block_advantages(block, args)
    rows, dropped = block_rows(block, advantages, args.max_seq_len, oldest_version)
    batches: MicroBatches = []
    flat = flat_rollouts(rows) if skip_flat else set()
    for update_rows in _rows_by_update(rows, plan, block.block_id):
        kept = [row for row in update_rows if row.rollout_index not in flat]
        skipped = [row for row in update_rows if row.rollout_index in flat]
        batches += weighted_cells(
            kept,
            plan,
            args,
            pad_token_id,
            micro_batches=range(plan.gradient_accumulation_steps),
            rollouts_elsewhere=len({row.rollout_index for row in skipped}),
            tokens_elsewhere=sum(row.row.sampled_tokens for row in skipped),
        )
    dropped += [zero_advantage(block.rollouts[index]) for index in sorted(flat)]
    dropped += replaced_rollouts(block)
    return TrainingBlock(block.block_id, batches, advantages, dropped)


def block_advantages(block: ScoredBlock, args: GRPOConfig) -> BlockAdvantages:
    """The advantages of a block's rollouts under the run's settings."""
    return rollout_advantages(
        block,
        scale_rewards=cast("ScaleRewards", args.scale_rewards),
        require_full_groups=args.require_full_groups,
        mask_truncated_completions=args.mask_truncated_completions,
        zero_truncated_completions=args.zero_truncated_completions,
    )


def zero_advantage(rollout: Rollout) -> Dropped:
    """What is recorded of a rollout that counts in the denominators and has no gradient."""
    return Dropped(rollout.key, "zero_advantage", tokens=rollout_tokens(rollout))


def replaced_rollouts(block: ScoredBlock) -> list[Dropped]:
    """What is recorded of flat groups that were taken out of the block; failed rollouts in them keep their reason."""
    return [
        Dropped(
            rollout.key,
            "zero_variance" if rollout.is_scored else why_unscored(rollout),
            tokens=rollout_tokens(rollout),
        )
        for group in block.filtered
        for rollout in group.rollouts
    ]


def flat_rollouts(rows: list[TrainingRow]) -> set[int]:
    """Rollouts whose advantage is 0 on every sampled token: their gradient is 0."""
    steep = {
        row.rollout_index
        for row in rows
        if (any(row.advantage) if isinstance(row.advantage, list) else row.advantage)
    }
    return {row.rollout_index for row in rows} - steep


def _rows_by_update(rows: list[TrainingRow], plan: BatchPlan, block_id: int) -> list[list[TrainingRow]]:
    """The rows of each update of one pass, in shuffled order."""
    order = plan.shuffle_order(block_id, plan.completions_per_block)
    place = {rollout: index for index, rollout in enumerate(order)}
    updates_per_pass = plan.steps_per_generation // plan.gradient_accumulation_steps
    by_update: list[list[TrainingRow]] = [[] for _ in range(updates_per_pass)]
    for row in sorted(rows, key=lambda row: place[row.rollout_index]):
        by_update[place[row.rollout_index] // plan.completions_per_update].append(row)
    return by_update


def weighted_cells(
    rows: list[TrainingRow],
    plan: BatchPlan,
    args: GRPOConfig,
    pad_token_id: int,
    *,
    micro_batches: range,
    rollouts_elsewhere: int,
    tokens_elsewhere: float,
) -> MicroBatches:
    """Tensors of some micro-batches of an update, weighted as parts of the whole update.

    Args:
        rows: what is trained in these micro-batches.
        micro_batches: their numbers within the update.
        rollouts_elsewhere, tokens_elsewhere: rollouts and sampled tokens of the update that are in none of `rows`.
    """
    return weighted_passes(
        rows,
        _dealt(rows, len(micro_batches), plan, args),
        pad_token_id,
        loss_type=args.loss_type,
        micro_batches=micro_batches,
        num_micro_batches=plan.gradient_accumulation_steps,
        steps_per_generation=plan.steps_per_generation,
        rollouts_elsewhere=rollouts_elsewhere,
        tokens_elsewhere=tokens_elsewhere,
    )


def _dealt(rows: list[TrainingRow], micro_batches: int, plan: BatchPlan, args: GRPOConfig) -> Dealt:
    """Which rows share a pass."""
    lengths = [row_length(row) for row in rows]
    limit = PassLimit(tokens=args.max_tokens_per_pass)
    if args.max_tokens_per_pass is None:
        limit = PassLimit(rows=plan.per_device_train_batch_size)
    if args.top_entropy_quantile < 1.0:
        # a quantile over the tokens of a pass: a micro-batch has to stay whole
        return deal_in_order(lengths, micro_batches, plan.num_processes, PassLimit())
    if args.loss_type == "bnpo":
        # each micro-batch counts the same, so by length the tokens of short rows would count more
        return deal_in_order(lengths, micro_batches, plan.num_processes, limit)
    return deal_longest_first(lengths, micro_batches, plan.num_processes, limit)
