"""From a scored block to what each rank trains on: micro-batches of tensors, weighted so that rollouts count once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import ScoredBlock
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
from verifiers.train.config import GRPOConfig
from verifiers.train.loss.loss_types import LOSS_TYPES, UpdateRows, token_weights
from verifiers.types import RolloutKey

__all__ = [
    "PickedRows",
    "TrainingBlock",
    "UpdateSize",
    "block_advantages",
    "build_training_block",
    "only_advantages_matter",
    "pack_update",
    "pick_rows",
    "replaced_rollouts",
    "rows_to_score",
]


@dataclass(slots=True)
class TrainingBlock:
    """One block, ready to train on.

    Attributes:
        micro_steps: tensors by [micro-step][rank][micro-batch]: those of `row_tensors`, `pad_rows` and `pack_update`.
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
    picked = pick_rows(block, args, oldest_version, skip_zero_advantage=skip_zero_advantage, penalties=penalties)
    order = plan.shuffle_order(block.block_id, plan.completions_per_block)
    place = {rollout: index for index, rollout in enumerate(order)}
    samples = sorted(picked.samples, key=lambda sample: place[sample.rollout_index])
    micro_steps: MicroSteps = []
    for update in range(plan.steps_per_generation // plan.gradient_accumulation_steps):
        counted = [one for one in samples if place[one.rollout_index] // plan.completions_per_update == update]
        trained = [sample for sample in counted if sample.rollout_index not in picked.skipped]
        size, number = UpdateSize.of(counted), plan.gradient_accumulation_steps
        micro_steps += pack_update(trained, size, number, plan, args, pad_token_id)
    return TrainingBlock(block.block_id, micro_steps, picked.advantages, picked.dropped + replaced_rollouts(block))


class PickedRows(NamedTuple):
    """The rows of a block that count.

    Attributes:
        advantages: of the block's rollouts.
        samples: the rows.
        skipped: rollouts among them that are not computed, since their advantage is 0 on every token.
        dropped: the rest, and those skipped.
    """

    advantages: BlockAdvantages
    samples: list[TrainingSample]
    skipped: set[int]
    dropped: list[Dropped]


def pick_rows(
    block: ScoredBlock,
    args: GRPOConfig,
    oldest_version: int | None,
    *,
    skip_zero_advantage: bool,
    penalties: Mapping[RolloutKey, float] | None = None,
) -> PickedRows:
    """Compute advantages and pick the rows that are trained; arguments as of `build_training_block`."""
    advantages = block_advantages(block, args, penalties)
    samples, dropped = block_samples(block, advantages, args.max_seq_len, oldest_version)
    refuse_forked_ratios(block, samples, args)
    skipped: set[int] = set()
    if skip_zero_advantage:
        with_gradient = {sample.rollout_index for sample in samples if sample.has_gradient}
        skipped = {sample.rollout_index for sample in samples} - with_gradient
    for rollout in (block.rollouts[index] for index in sorted(skipped)):
        dropped.append(Dropped(rollout.key, "zero_advantage", tokens=rollout_tokens(rollout)))
    return PickedRows(advantages, samples, skipped, dropped)


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
    level, is_weighted = args.importance_sampling_level, args.vllm_importance_sampling_correction
    mode = args.vllm_importance_sampling_mode
    per_row = {
        f"loss_type={args.loss_type!r}": LOSS_TYPES[args.loss_type].multiplies_ratios,
        f"importance_sampling_level={level!r}": level != "token",
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
            "'token_truncate' and no off_policy_mask_threshold, or an environment that only appends messages."
        )


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


class UpdateSize(NamedTuple):
    """Rollouts and sampled tokens of a whole update, with those that are not computed."""

    rollouts: int
    tokens: int

    @classmethod
    def of(cls, samples: Sequence[TrainingSample]) -> UpdateSize:
        """Count the rows of an update."""
        rollouts = {sample.rollout_index for sample in samples}
        return cls(len(rollouts), sum(sample.row.sampled_tokens for sample in samples))


def pack_update(
    samples: Sequence[TrainingSample],
    size: UpdateSize,
    micro_steps: int,
    plan: BatchPlan,
    args: GRPOConfig,
    pad_token_id: int,
) -> MicroSteps:
    """Order, split, weight and pad the rows of some micro-steps of an update.

    Args:
        samples: what is computed in these micro-steps.
        size: of the whole update.
        micro_steps: their number.
        pad_token_id: fills sequences and stands in padding rows.
    """
    rows, packing = _packed(row_tensors(samples), micro_steps, plan, args, pad_token_id)
    rows["token_weights"] = token_weights(_update_rows(rows, packing, size), args)
    rows["update_tokens"] = torch.tensor(float(max(size.tokens, 1)))
    return packing.nested([pad_rows(part, pad_token_id) for part in split_tensor_dict(rows, packing.sizes)])


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
    if LOSS_TYPES[args.loss_type].depends_on_micro_steps:
        # each micro-step counts the same, so by length the tokens of short rows would count more
        return keep_micro_steps(lengths, micro_steps, plan.num_processes, limit)
    return balance_by_length(lengths, micro_steps, plan.num_processes, limit)


def _update_rows(rows: TensorDict, packing: Packing, size: UpdateSize) -> UpdateRows:
    sampled_R, rollout_tokens_R = rows["sampled_tokens"], rows["rollout_sampled_tokens"]
    assert isinstance(sampled_R, Tensor)
    assert isinstance(rollout_tokens_R, Tensor)
    micro_steps = torch.tensor([step * packing.ranks + rank for step, rank, _ in packing.places()])
    micro_step_R = micro_steps.repeat_interleave(torch.tensor(packing.sizes))
    held = torch.bincount(micro_step_R, weights=sampled_R.double())
    return UpdateRows(rollout_tokens_R, held[micro_step_R], *size, micro_steps=int((held > 0).sum()))


def only_advantages_matter(args: GRPOConfig, beta: float, experts: bool) -> bool:
    """Return whether a row whose advantage is 0 adds nothing to the loss, so that it can be left out.

    Args:
        beta: coefficient of the KL term.
        experts: the loss has the router's term of a mixture of experts.
    """
    return (
        args.skip_zero_advantage_rows
        and beta == 0.0
        and args.entropy_coef == 0.0
        and not args.use_adaptive_entropy
        and args.top_entropy_quantile >= 1.0
        and not experts
        # a mean over a micro-step's own tokens counts every row of it
        and not LOSS_TYPES[args.loss_type].depends_on_micro_steps
    )
