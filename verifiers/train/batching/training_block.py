"""From a scored block to what each rank trains on: micro-batches of tensors, weighted so that rollouts count once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout, ScoredBlock
from verifiers.train.batching.advantages import BlockAdvantages, ScaleRewards, rollout_advantages, why_unscored
from verifiers.train.batching.collate import (
    Dropped,
    TrainingSample,
    append_padding,
    block_samples,
    pad_rows,
    rollout_tokens,
    row_lengths,
    row_tensors,
)
from verifiers.train.batching.packing import (
    MicroBatch,
    MicroBatchLimit,
    MicroSteps,
    Packing,
    TensorDict,
    all_micro_batches,
    balance_by_length,
    keep_micro_steps,
    shuffle_tensor_dict,
    split_tensor_dict,
)
from verifiers.train.batching.weighting import num_items_in_batch, row_weights, weight_advantages
from verifiers.train.config import GRPOConfig
from verifiers.train.validation.loss_settings import LOSS_TYPES
from verifiers.types import RolloutKey

__all__ = [
    "TrainingBlock",
    "block_advantages",
    "build_training_block",
    "pack_update",
    "refuse_forked_ratios",
    "replaced_rollouts",
    "rollouts_without_gradient",
    "rows_to_score",
    "zero_advantage",
]


@dataclass(slots=True)
class TrainingBlock:
    """One block, ready to train on.

    Attributes:
        micro_steps: tensors by [micro-step][rank][micro-batch], under the names that TRL's loss reads, and
            `row_weights` (R,), `policy_versions` (R,), `sampled_tokens` (R,).
        dropped: rollouts and rows that are not trained on, with their reasons.
    """

    block_id: int
    micro_steps: MicroSteps
    advantages: BlockAdvantages
    dropped: list[Dropped]

    def oldest_version(self) -> int | None:
        """Return the oldest policy version among the trained tokens; None where nothing is trained."""
        versions = [
            int(v) for batch in all_micro_batches(self.micro_steps) for v in batch["policy_versions"] if v >= 0
        ]
        return min(versions, default=None)


def build_training_block(
    block: ScoredBlock,
    plan: BatchPlan,
    args: GRPOConfig,
    pad_token_id: int,
    *,
    skip_zero_advantage: bool = False,
    oldest_version: int | None = None,
    penalties: Mapping[RolloutKey, float] | None = None,
) -> TrainingBlock:
    """Compute advantages, pick rows, shuffle them, split them into updates, and pack each update.

    Rollouts are shuffled by (seed, block) and cut into the updates of the block by their planned place, so that
    a failed rollout leaves a gap rather than moving the others; all rows of a rollout stay in one update.

    Args:
        skip_zero_advantage: leave out rollouts whose advantage is 0 on every token. They still count in every
            denominator, so loss and gradient are the same; only right where nothing else reaches the loss.
        oldest_version: rollouts with tokens of an older policy version are dropped; None for none.
        penalties: subtracted from the rollouts' rewards before the advantages.
    """
    advantages = block_advantages(block, args, penalties)
    samples, dropped = block_samples(block, advantages, args.max_seq_len, oldest_version)
    refuse_forked_ratios(block, samples, args)
    skipped = rollouts_without_gradient(samples) if skip_zero_advantage else set()
    kept = [sample for sample in samples if sample.rollout_index not in skipped]
    place = {
        rollout: index for index, rollout in enumerate(plan.shuffle_order(block.block_id, plan.completions_per_block))
    }

    def update_of(sample: TrainingSample) -> int:
        return place[sample.rollout_index] // plan.completions_per_update

    updates = plan.steps_per_generation // plan.gradient_accumulation_steps
    sizes, rollouts_elsewhere, tokens_elsewhere = [0] * updates, [set[int]() for _ in range(updates)], [0] * updates
    for sample in samples:
        update = update_of(sample)
        if sample.rollout_index in skipped:
            rollouts_elsewhere[update].add(sample.rollout_index)
            tokens_elsewhere[update] += sample.row.sampled_tokens
        else:
            sizes[update] += 1
    order = sorted(range(len(kept)), key=lambda row: place[kept[row].rollout_index])
    rows = split_tensor_dict(shuffle_tensor_dict(row_tensors(kept), order), sizes)
    micro_steps: MicroSteps = []
    for update in range(updates):
        micro_steps += pack_update(
            rows[update],
            plan,
            args,
            pad_token_id,
            micro_steps=range(plan.gradient_accumulation_steps),
            rollouts_elsewhere=len(rollouts_elsewhere[update]),
            tokens_elsewhere=tokens_elsewhere[update],
        )
    dropped += [zero_advantage(block.rollouts[index]) for index in sorted(skipped)]
    dropped += replaced_rollouts(block)
    return TrainingBlock(block.block_id, micro_steps, advantages, dropped)


def rows_to_score(block: ScoredBlock, plan: BatchPlan, args: GRPOConfig, pad_token_id: int) -> MicroSteps:
    """Pack the rows of every scored rollout, for log-probs that are needed before there are advantages.

    Rows that `max_seq_len` drops are left out.
    """
    unweighted = {rollout.key: 0.0 for rollout in block.rollouts if rollout.is_scored}
    samples, _ = block_samples(block, unweighted, args.max_seq_len)
    rows, packing = _packed(row_tensors(samples), plan.steps_per_generation, plan, args, pad_token_id)
    return packing.nested([pad_rows(part, pad_token_id) for part in split_tensor_dict(rows, packing.sizes)])


def block_advantages(
    block: ScoredBlock, args: GRPOConfig, penalties: Mapping[RolloutKey, float] | None = None
) -> BlockAdvantages:
    """Return the advantages of a block's rollouts under the run's settings."""
    return rollout_advantages(
        block,
        scale_rewards=cast("ScaleRewards", args.scale_rewards),
        estimator=args.advantage_estimator,
        penalties=penalties,
        require_full_groups=args.require_full_groups,
        mask_truncated_completions=args.mask_truncated_completions,
        zero_truncated_completions=args.zero_truncated_completions,
    )


def refuse_forked_ratios(block: ScoredBlock, samples: Sequence[TrainingSample], args: GRPOConfig) -> None:
    """Refuse a rollout of several rows under a loss that computes something of each whole row.

    Raises:
        ConfigError: with the setting; the rollout would weigh otherwise than the same tokens in one row.
    """
    level, geometric = args.importance_sampling_level, (args.geometric_mask_min, args.geometric_mask_max)
    mode, is_weighted = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_correction
    per_row = {
        f"loss_type={args.loss_type!r}": LOSS_TYPES[args.loss_type].multiplies_ratios,
        f"importance_sampling_level={level!r}": level != "token",
        f"geometric_mask_min={geometric[0]}, geometric_mask_max={geometric[1]}": geometric != (None, None),
        f"vllm_importance_sampling_mode={mode!r}": is_weighted and mode.startswith("sequence"),
        f"off_policy_mask_threshold={args.off_policy_mask_threshold}": args.off_policy_mask_threshold is not None,
    }
    setting = next((name for name, is_set in per_row.items() if is_set), None)
    index, rows = Counter(sample.rollout_index for sample in samples).most_common(1)[0] if samples else (0, 0)
    if setting is not None and rows > 1:
        raise ConfigError(
            f"{block.rollouts[index].key} became {rows} rows, since a turn does not extend the one before, and "
            f"{setting} compares policies over each whole row, so the rollout would weigh otherwise than in one row; "
            "use loss_type='dapo' with importance_sampling_level='token', vllm_importance_sampling_mode="
            "'token_truncate', no geometric mask and no off_policy_mask_threshold, or an environment that only "
            "appends messages."
        )


def zero_advantage(rollout: Rollout) -> Dropped:
    """Return the record of a rollout that counts in the denominators and has no gradient."""
    return Dropped(rollout.key, "zero_advantage", tokens=rollout_tokens(rollout))


def replaced_rollouts(block: ScoredBlock) -> list[Dropped]:
    """Return the records of zero-variance groups that were replaced; failed rollouts in them keep their reason."""
    return [
        Dropped(
            rollout.key,
            "zero_variance" if rollout.is_scored else why_unscored(rollout),
            tokens=rollout_tokens(rollout),
        )
        for group in block.filtered
        for rollout in group.rollouts
    ]


def rollouts_without_gradient(samples: list[TrainingSample]) -> set[int]:
    """Return the rollouts whose advantage is 0 on every sampled token."""
    with_gradient = {sample.rollout_index for sample in samples if sample.has_gradient}
    return {sample.rollout_index for sample in samples} - with_gradient


def pack_update(
    rows: TensorDict,
    plan: BatchPlan,
    args: GRPOConfig,
    pad_token_id: int,
    *,
    micro_steps: range,
    rollouts_elsewhere: int,
    tokens_elsewhere: float,
) -> MicroSteps:
    """Order, split, weight and pad the rows of some micro-steps of an update.

    Args:
        rows: what is trained in these micro-steps.
        pad_token_id: fills sequences and stands in padding rows.
        micro_steps: their numbers within the update.
        rollouts_elsewhere, tokens_elsewhere: rollouts and sampled tokens of the update that are in none of `rows`.
    """
    rows, packing = _packed(rows, len(micro_steps), plan, args, pad_token_id)
    weights_R = _weights(rows, packing, args.loss_type, micro_steps, plan, rollouts_elsewhere)
    advantages = rows["advantages"]
    assert advantages is not None
    rows |= {"row_weights": weights_R, "advantages": weight_advantages(advantages, weights_R)}
    padded = [pad_rows(part, pad_token_id) for part in split_tensor_dict(rows, packing.sizes)]
    nested = packing.nested(padded)
    sampled = _tensor(rows, "sampled_tokens")
    items = num_items_in_batch(
        sampled,
        num_micro_steps=plan.gradient_accumulation_steps,
        steps_per_generation=plan.steps_per_generation,
        tokens_without_rows=tokens_elsewhere,
    )
    cells = packing.ranks * plan.gradient_accumulation_steps
    per_token = cells / max(1.0, float(sampled.sum()) + tokens_elsewhere)
    for by_rank in nested:
        for joint in zip(*by_rank, strict=True):
            totals = _joint_totals(joint)
            for batch in joint:
                update_share = torch.tensor(float(batch["sampled_tokens"].sum()) * per_token)
                batch.update(totals, num_items_in_batch=items, update_share=update_share)
    return nested


def _packed(
    rows: TensorDict, micro_steps: int, plan: BatchPlan, args: GRPOConfig, pad_token_id: int
) -> tuple[TensorDict, Packing]:
    """Return rows with their padding rows, in the order of their packing, and the packing."""
    packing = _packing(row_lengths(rows), micro_steps, plan, args)
    return shuffle_tensor_dict(append_padding(rows, packing.padding_rows, pad_token_id), packing.order), packing


def _packing(lengths: list[int], micro_steps: int, plan: BatchPlan, args: GRPOConfig) -> Packing:
    limit = MicroBatchLimit(tokens=args.max_tokens_per_micro_batch)
    if args.max_tokens_per_micro_batch is None:
        limit = MicroBatchLimit(rows=plan.per_device_train_batch_size)
    if args.top_entropy_quantile < 1.0:
        # a quantile over the tokens of a micro-batch: a micro-step has to stay whole
        return keep_micro_steps(lengths, micro_steps, plan.num_processes, MicroBatchLimit())
    if LOSS_TYPES[args.loss_type].mean_over == "micro-batch tokens":
        # each micro-step counts the same, so by length the tokens of short rows would count more
        return keep_micro_steps(lengths, micro_steps, plan.num_processes, limit)
    return balance_by_length(lengths, micro_steps, plan.num_processes, limit)


def _weights(
    rows: TensorDict,
    packing: Packing,
    loss_type: str,
    micro_steps: range,
    plan: BatchPlan,
    rollouts_elsewhere: int,
) -> Tensor:
    """Return the weight of each row, in the order of the packing."""
    places_B3 = torch.tensor([(micro_steps[step], rank, number) for step, rank, number in packing.places()])
    places_R3 = places_B3.repeat_interleave(torch.tensor(packing.sizes), dim=0)
    return row_weights(
        loss_type,
        rollout_index_R=_tensor(rows, "rollout_index"),
        sampled_tokens_R=_tensor(rows, "sampled_tokens"),
        rollout_sampled_tokens_R=_tensor(rows, "rollout_sampled_tokens"),
        micro_step_R=places_R3[:, 0],
        rank_R=places_R3[:, 1],
        micro_batch_R=places_R3[:, 2],
        num_micro_steps=plan.gradient_accumulation_steps,
        num_ranks=packing.ranks,
        rollouts_without_rows=rollouts_elsewhere,
    )


def _joint_totals(joint: tuple[MicroBatch, ...]) -> MicroBatch:
    """Return what all ranks together hold while each runs one micro-batch: TRL's means over a call are over this."""
    return {
        "call_tokens": sum((batch["sampled_tokens"].sum() for batch in joint), torch.tensor(0)),
        "call_rows": torch.tensor(sum(len(batch["is_padding"]) for batch in joint)),
        "call_padding_rows": sum((batch["is_padding"].sum() for batch in joint), torch.tensor(0)),
    }


def _tensor(rows: TensorDict, name: str) -> Tensor:
    column = rows[name]
    assert isinstance(column, Tensor)
    return column
