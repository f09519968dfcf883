"""From a scored block to what each rank trains on: micro-batches of tensors, weighted so that rollouts count once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from verifiers.data.plan import BatchPlan
from verifiers.rollouts.rollout import Rollout, ScoredBlock
from verifiers.train.advantages import BlockAdvantages, ScaleRewards, rollout_advantages
from verifiers.train.buffers import shuffle_tensor_dict, split_tensor_dict
from verifiers.train.collate import (
    Dropped,
    TrainingRow,
    block_rows,
    pad_rows,
    rollout_tokens,
    rows_to_tensors,
    trim_columns,
)
from verifiers.train.config import GRPOConfig
from verifiers.train.row_weights import num_items_in_batch, row_weights, weight_advantages

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
        batches: tensors by [micro-batch][rank], under the names that TRL's loss reads, and `row_weights` (R,),
            `policy_versions` (R,), `sampled_tokens` (R,).
        dropped: rollouts and rows that are not trained on, with their reasons.
    """

    block_id: int
    batches: list[list[dict[str, Tensor]]]
    advantages: BlockAdvantages
    dropped: list[Dropped]

    def oldest_version(self) -> int | None:
        """The oldest policy version among the trained tokens; None where nothing is trained."""
        versions = [int(v) for cells in self.batches for cell in cells for v in cell["policy_versions"] if v >= 0]
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
    """Compute advantages, pick rows, and deal them over updates, micro-batches and ranks.

    Rollouts are shuffled by (seed, block) and cut into the updates of one pass by their planned place, so that
    a failed rollout leaves a gap rather than moving the others; all rows of a rollout stay in one update.
    Padding rows fill each update up and are spread over its micro-batches.

    Args:
        skip_flat: leave out rollouts whose advantage is 0 on every token. They count in every denominator as before,
            so loss and gradient are the same; only right where nothing but the advantages reaches the loss.
        oldest_version: rollouts with tokens of an older policy version are dropped; None for none.
    """
    advantages = block_advantages(block, args)
    rows, dropped = block_rows(block, advantages, args.max_seq_len, oldest_version)
    batches: list[list[dict[str, Tensor]]] = []
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
    """What is recorded of groups that were replaced by others."""
    rollouts = [rollout for group in block.filtered for rollout in group.rollouts]
    return [Dropped(rollout.key, "zero_variance", tokens=rollout_tokens(rollout)) for rollout in rollouts]


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
) -> list[list[dict[str, Tensor]]]:
    """Tensors by [micro-batch][rank] of some micro-batches of an update, weighted as parts of the whole update.

    Args:
        rows: what is trained in these micro-batches.
        micro_batches: their numbers within the update.
        rollouts_elsewhere, tokens_elsewhere: rollouts and sampled tokens of the update that are in none of `rows`.
    """
    ranks = plan.num_processes
    cells = len(micro_batches) * ranks
    padded = pad_rows(rows, cells, pad_token_id)
    # dealt like cards, so that padding rows, which stand at the end, do not fill one micro-batch alone
    dealt = [row for cell in range(cells) for row in range(cell, len(padded), cells)]
    tensors = shuffle_tensor_dict(rows_to_tensors(padded, pad_token_id), dealt)
    cell_R = torch.arange(cells).repeat_interleave(len(padded) // cells)
    weights_R = row_weights(
        args.loss_type,
        rollout_index_R=_given(tensors, "rollout_index"),
        sampled_tokens_R=_given(tensors, "sampled_tokens"),
        rollout_sampled_tokens_R=_given(tensors, "rollout_sampled_tokens"),
        micro_batch_R=micro_batches.start + cell_R // ranks,
        rank_R=cell_R % ranks,
        num_micro_batches=plan.gradient_accumulation_steps,
        num_ranks=ranks,
        rollouts_without_rows=rollouts_elsewhere,
    )
    tensors["row_weights"] = weights_R
    tensors["advantages"] = weight_advantages(_given(tensors, "advantages"), weights_R)
    tensors["num_items_in_batch"] = num_items_in_batch(
        _given(tensors, "sampled_tokens"),
        num_micro_batches=plan.gradient_accumulation_steps,
        steps_per_generation=plan.steps_per_generation,
        tokens_without_rows=tokens_elsewhere,
    )
    parts = [
        trim_columns({k: v for k, v in part.items() if v is not None}) for part in split_tensor_dict(tensors, cells)
    ]
    return [parts[start : start + ranks] for start in range(0, cells, ranks)]


def _given(tensors: dict[str, Tensor | None], name: str) -> Tensor:
    value = tensors[name]
    assert value is not None, name
    return value
