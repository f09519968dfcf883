"""From a scored block to what each rank trains on: micro-batches of tensors, weighted so that rollouts count once.

A block is trained when it is whole, or streamed: each micro-step as soon as its groups are scored, in plan order.
How many rollouts and sampled tokens an update has is then known only with its last micro-step. So all of its
micro-steps are weighted by provisional numbers, and the gradient that they add up to is multiplied by actual /
provisional weight before the optimizer's step. That is one number for every row, as means over each micro-step are
refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.advantages import BlockAdvantages, ScaleRewards, rollout_advantages, why_unscored
from verifiers.train.batching.demonstrations import Demonstrations
from verifiers.train.batching.micro_batches import (
    DEMONSTRATION,
    PADDING,
    MicroBatch,
    MicroBatchLimit,
    MicroSteps,
    Packing,
    TensorDict,
    TrainingSample,
    all_micro_batches,
    balance_by_length,
    balance_by_prefix,
    keep_micro_steps,
    pad_rows,
    shuffle_tensor_dict,
    split_tensor_dict,
)
from verifiers.train.batching.rollout_session import RolloutPrefetcher
from verifiers.train.config import GRPOConfig
from verifiers.train.loss.policy_loss import LOSS_TYPES, UpdateRows, token_weights
from verifiers.train.loss.prefixes import LEAST_SAVED, LEAST_SAVED_ON_GPU, SHARED_ROWS, share_prefixes
from verifiers.types import RolloutKey


@dataclass(frozen=True, slots=True)
class Dropped:
    """A rollout, or one of its rows, that is not trained on.

    Attributes:
        reason: why it got no advantage (see `BlockAdvantages.left_out`), "no_sampled_tokens", "stale",
            "longer_than_max_seq_len", "empty_prompt", "zero_advantage", "zero_variance", "not_finite" or "run_ended".
        row: place of the row in `Rollout.rows`; None where the whole rollout is meant.
        tokens: prompt and completion tokens of what is dropped.
    """

    key: RolloutKey
    reason: str
    row: int | None = None
    tokens: int = 0

    @classmethod
    def whole(cls, rollout: Rollout, reason: str) -> Dropped:
        return cls(rollout.key, reason, tokens=sum(map(_length, rollout.rows)))


@dataclass(slots=True)
class TrainingBlock:
    """One block, ready to train on.

    Attributes:
        micro_steps: tensors by [micro-step][rank][micro-batch]: those of `pad_rows`, `token_weights` (R,) and
            `update_tokens`.
        dropped: rollouts and rows that are not trained on, with their reasons.
    """

    block_id: int
    micro_steps: MicroSteps
    advantages: BlockAdvantages
    dropped: list[Dropped]

    def oldest_version(self) -> int | None:
        """Return the oldest policy version among the trained tokens; None where nothing is trained."""
        batches = all_micro_batches(self.micro_steps)
        versions = [version for batch in batches for version in batch["policy_versions"].tolist()]
        return min((version for version in versions if version >= 0), default=None)


def build_training_block(
    block: ScoredBlock,
    plan: BatchPlan,
    args: GRPOConfig,
    *,
    oldest_version: int | None = None,
    penalties: Mapping[RolloutKey, float] | None = None,
    demonstrations: Demonstrations | None = None,
) -> TrainingBlock:
    """Compute advantages, pick rows, shuffle them, split them into updates, and pack each update.

    Rollouts are shuffled by (seed, block) and cut into the updates of the block by their planned place, so that
    a failed rollout leaves a gap rather than moving the others; all rows of a rollout stay in one update.

    Args:
        oldest_version: rollouts with tokens of an older policy version are dropped; None for none.
        demonstrations: trained on in the same updates, `demonstrations_share` as many as rollouts.
    """
    picked = _pick_rows(block, args, oldest_version, penalties)
    order = plan.shuffle_order(block.block_id, plan.completions_per_block)
    place = {rollout: index for index, rollout in enumerate(order)}
    samples = sorted(picked.samples, key=lambda sample: place[sample.rollout_index])
    number = plan.gradient_accumulation_steps
    micro_steps: MicroSteps = []
    for update in range(plan.steps_per_generation // number):
        counted = [one for one in samples if place[one.rollout_index] // plan.completions_per_update == update]
        trained = [sample for sample in counted if sample.rollout_index not in picked.skipped]
        if demonstrations is not None:
            drawn = max(1, round(args.demonstrations_share * plan.completions_per_update))
            first = block.block_id * (plan.steps_per_generation // number)
            trained += demonstrations.draw(first + update, drawn)
        micro_steps += _pack_update(trained, _UpdateSize.of(counted), number, plan, args)
    return TrainingBlock(block.block_id, micro_steps, picked.advantages, picked.dropped + _replaced(block))


def rows_to_score(block: ScoredBlock, plan: BatchPlan, args: GRPOConfig) -> MicroSteps:
    """Pack the rows of every scored rollout, for log-probs that are needed before there are advantages.

    Rows that `max_seq_len` drops are left out.
    """
    unweighted = {rollout.key: 0.0 for rollout in block.rollouts if rollout.is_scored}
    samples, _ = block_samples(block, unweighted, args.max_seq_len)
    packing = _packing(samples, plan.steps_per_generation, plan, args)
    return _packed({"samples": _with_padding(samples, packing)}, packing, args)


def only_advantages_matter(args: GRPOConfig, experts: bool) -> bool:
    """Return whether a row whose advantage is 0 adds nothing to the loss, so that it can be left out.

    Args:
        experts: the loss has the router's term of a mixture of experts.
    """
    return (
        (args.beta == 0.0 or args.kl_in_reward)
        and args.entropy_coef == 0.0
        and not args.use_adaptive_entropy
        and args.top_entropy_quantile >= 1.0
        and not args.teacher_url
        and args.env_ce_coef == 0.0
        and not experts
        # a mean over a micro-step's own tokens counts every row of it
        and not LOSS_TYPES[args.loss_type].depends_on_micro_steps
    )


# -- streaming -------------------------------------------------------------------------------------------------------


class BlockStream:
    """The micro-steps of one block that is still being generated, in order; on rank 0."""

    def __init__(
        self,
        prefetcher: RolloutPrefetcher,
        plan: BatchPlan,
        args: GRPOConfig,
        block_id: int,
        optimizer_step: int,
    ) -> None:
        self._prefetcher, self._plan, self._args = prefetcher, plan, args
        self._block_id, self.optimizer_step = block_id, optimizer_step
        self.block: ScoredBlock | None = None
        self._micro_steps: MicroSteps = []
        self._dropped: list[Dropped] = []
        self._counted: list[TrainingSample] = []

    def next(self) -> tuple[list[list[MicroBatch]], float | None]:
        """Return each rank's micro-batches of the next micro-step, once its groups are scored.

        With the last micro-step of an update comes the factor for the update's gradient.
        """
        plan, args, number = self._plan, self._args, len(self._micro_steps)
        size, group = plan.completions_per_micro_step, plan.num_generations
        first, last = number * size, (number + 1) * size
        # from the first group on, so that places in it are those in the block
        groups = self._prefetcher.groups(self._block_id, -(-last // group), self.optimizer_step)
        self.block = block = ScoredBlock(self._block_id, groups)
        here = {rollout.key for rollout in block.rollouts[first:last]}
        oldest = self._prefetcher.oldest_version(self.optimizer_step)
        picked = _pick_rows(block, args, oldest)
        self._dropped += [item for item in picked.dropped if item.key in here]
        samples = [one for one in picked.samples if block.rollouts[one.rollout_index].key in here]
        self._counted += samples
        samples = [sample for sample in samples if sample.rollout_index not in picked.skipped]
        planned = plan.completions_per_update
        # near the actual number of tokens, so that losses before they are scaled are of their usual size
        provisional = _UpdateSize(planned, planned * (args.max_completion_length or 1))
        (by_rank,) = _pack_update(samples, provisional, 1, plan, args)
        self._micro_steps.append(by_rank)
        if (number + 1) % plan.gradient_accumulation_steps:
            return by_rank, None
        actual, self._counted = _UpdateSize.of(self._counted), []
        one = torch.ones(1)
        weights = [token_weights(UpdateRows(one, one, *size), args) for size in (actual, provisional)]
        return by_rank, float(weights[0] / weights[1])

    def finish(self) -> tuple[ScoredBlock, TrainingBlock]:
        """Return the whole block and what was trained of it, once every micro-step was handed out."""
        block = self._prefetcher.take(self._block_id, self.optimizer_step)
        advantages = _block_advantages(block, self._args)
        dropped = [*self._dropped, *_replaced(block)]
        return block, TrainingBlock(self._block_id, self._micro_steps, advantages, dropped)


# -- rows ------------------------------------------------------------------------------------------------------------


class _PickedRows(NamedTuple):
    """The rows of a block that count.

    Attributes:
        skipped: rollouts among them that are not computed, since their advantage is 0 on every token. They still
            count in every denominator, so loss and gradient are the same.
        dropped: the rest, and those skipped.
    """

    advantages: BlockAdvantages
    samples: list[TrainingSample]
    skipped: set[int]
    dropped: list[Dropped]


def _pick_rows(
    block: ScoredBlock,
    args: GRPOConfig,
    oldest_version: int | None,
    penalties: Mapping[RolloutKey, float] | None = None,
) -> _PickedRows:
    advantages = _block_advantages(block, args, penalties)
    samples, dropped = block_samples(block, advantages, args.max_seq_len, oldest_version)
    _refuse_forked_ratios(block, samples, args)
    skipped: set[int] = set()
    if args.skip_zero_advantage_rows:
        with_gradient = {sample.rollout_index for sample in samples if sample.has_gradient}
        skipped = {sample.rollout_index for sample in samples} - with_gradient
    dropped += [Dropped.whole(block.rollouts[index], "zero_advantage") for index in sorted(skipped)]
    return _PickedRows(advantages, samples, skipped, dropped)


def _block_advantages(
    block: ScoredBlock, args: GRPOConfig, penalties: Mapping[RolloutKey, float] | None = None
) -> BlockAdvantages:
    return rollout_advantages(
        block,
        scale_rewards=cast("ScaleRewards", args.scale_rewards),
        estimator=args.advantage_estimator,
        penalties=penalties,
        require_full_groups=args.require_full_groups,
        mask_truncated_completions=args.mask_truncated_completions,
        zero_truncated_completions=args.zero_truncated_completions,
        turn_discount=args.turn_discount,
    )


def block_samples(
    block: ScoredBlock,
    advantages: Mapping[RolloutKey, float | list[float]],
    max_seq_len: int | None = None,
    oldest_version: int | None = None,
) -> tuple[list[TrainingSample], list[Dropped]]:
    """Pick the rows of a block that are trained on, in plan order.

    Args:
        max_seq_len: most prompt and completion tokens of a row together; None for no limit.
        oldest_version: rollouts with a token of an older policy version are dropped whole; None for no limit.

    Returns:
        The rows, and what was dropped: whole rollouts (one entry each), and rows that are too long. Rows of a
        rollout without a sampled token carry no loss; they are skipped silently as long as another row of
        the rollout is trained on. Where a row is dropped, the rollout's other rows make up the whole of it.
    """
    reasons = advantages.left_out if isinstance(advantages, BlockAdvantages) else {}
    samples: list[TrainingSample] = []
    dropped: list[Dropped] = []
    for index, rollout in enumerate(block.rollouts):
        if rollout.key not in advantages:
            dropped.append(Dropped.whole(rollout, reasons.get(rollout.key, "no_advantage")))
        elif oldest_version is not None and any(row.oldest_version < oldest_version for row in rollout.rows):
            dropped.append(Dropped.whole(rollout, "stale"))
        else:
            kept, lost = _split_rollout(rollout, advantages[rollout.key], max_seq_len)
            sampled = sum(row.sampled_tokens for row, _ in kept)
            samples += [TrainingSample(row, advantage, index, sampled) for row, advantage in kept]
            if not kept and not lost:
                lost = [Dropped.whole(rollout, "no_sampled_tokens")]
            dropped += lost
    return samples, dropped


def _split_rollout(
    rollout: Rollout, advantage: float | list[float], max_seq_len: int | None
) -> tuple[list[tuple[TokenSequence, float | list[float]]], list[Dropped]]:
    """Split a rollout into rows to train on, each with its share of the advantage, and rows that are dropped."""
    kept: list[tuple[TokenSequence, float | list[float]]] = []
    lost: list[Dropped] = []
    start = 0
    for place, row in enumerate(rollout.rows):
        end = start + row.sampled_tokens
        if end == start:
            continue
        share = advantage[start:end] if isinstance(advantage, list) else advantage
        start = end
        if max_seq_len is not None and _length(row) > max_seq_len:
            lost.append(Dropped(rollout.key, "longer_than_max_seq_len", place, _length(row)))
        elif not row.prompt_ids:
            # The first completion token is predicted from the token before it; without one the
            # trainer would score it from padding.
            lost.append(Dropped(rollout.key, "empty_prompt", place, _length(row)))
        else:
            kept.append((row, share))
    return kept, lost


def _refuse_forked_ratios(block: ScoredBlock, samples: Sequence[TrainingSample], args: GRPOConfig) -> None:
    """Refuse a rollout of several rows under a loss that computes something of each whole row.

    It would weigh otherwise than the same tokens in one row.
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


def _replaced(block: ScoredBlock) -> list[Dropped]:
    """Return the records of zero-variance groups that were replaced; failed rollouts in them keep their reason."""
    replaced = [rollout for group in block.filtered for rollout in group.rollouts]
    return [Dropped.whole(one, "zero_variance" if one.is_scored else why_unscored(one)) for one in replaced]


def _length(row: TokenSequence) -> int:
    return len(row.prompt_ids) + len(row.completion_ids)


# -- micro-batches ---------------------------------------------------------------------------------------------------


class _UpdateSize(NamedTuple):
    """Rollouts and sampled tokens of a whole update, with those that are not computed."""

    rollouts: int
    tokens: int

    @classmethod
    def of(cls, samples: Sequence[TrainingSample]) -> _UpdateSize:
        rollouts = {sample.rollout_index for sample in samples}
        return cls(len(rollouts), sum(sample.row.sampled_tokens for sample in samples))


def _pack_update(
    samples: Sequence[TrainingSample],
    size: _UpdateSize,
    micro_steps: int,
    plan: BatchPlan,
    args: GRPOConfig,
) -> MicroSteps:
    """Order, split, weight and pad the rows of some micro-steps of an update of a given size."""
    if args.env_ce_coef:
        # what nobody sampled, the environment said
        samples = [
            one if one.ce_mask else replace(one, ce_mask=[1 - sampled for sampled in one.row.loss_mask])
            for one in samples
        ]
    packing = _packing(samples, micro_steps, plan, args)
    whole = _with_padding(samples, packing)
    sampled_R = torch.tensor([sample.row.sampled_tokens for sample in whole])
    rollout_R = torch.tensor([sample.rollout_sampled_tokens for sample in whole])
    cells = [[row for batch in of_rank for row in batch] for step in packing for of_rank in step]
    cell_R = torch.zeros(len(whole), dtype=torch.float64)
    for cell in cells:
        cell_R[cell] = sampled_R[cell].sum().double()
    trained_in = sum(bool(sampled_R[cell].any()) for cell in cells)
    weights_R = token_weights(UpdateRows(rollout_R, cell_R, *size, trained_in), args)
    columns = {"samples": whole, "token_weights": weights_R, "ce_weights": _ce_weights(whole, args)}
    columns["update_tokens"] = torch.tensor(float(max(size.tokens, 1)))
    return _packed(columns, packing, args)


def _ce_weights(samples: Sequence[TrainingSample], args: GRPOConfig) -> Tensor:
    """Return what each token in the `ce_mask` of a row counts (R,), in the mean of its kind over the update."""
    counts_R = torch.tensor([sum(sample.ce_mask) for sample in samples], dtype=torch.float64)
    is_shown_R = torch.tensor([sample.rollout_index == DEMONSTRATION for sample in samples])
    weights_R = torch.zeros(len(samples))
    for of_kind_R, coef in ((is_shown_R, args.demonstrations_coef), (~is_shown_R, args.env_ce_coef)):
        weights_R[of_kind_R] = coef / max(1.0, float(counts_R[of_kind_R].sum()))
    return weights_R


def _packing(samples: Sequence[TrainingSample], micro_steps: int, plan: BatchPlan, args: GRPOConfig) -> Packing:
    lengths = [_length(sample.row) for sample in samples]
    limit = MicroBatchLimit(tokens=args.max_tokens_per_micro_batch)
    if args.max_tokens_per_micro_batch is None:
        limit = MicroBatchLimit(rows=plan.per_device_train_batch_size)
    if args.top_entropy_quantile < 1.0:
        # a quantile over the tokens of a micro-batch: a micro-step has to stay whole
        return keep_micro_steps(lengths, micro_steps, plan.num_processes, MicroBatchLimit())
    if LOSS_TYPES[args.loss_type].depends_on_micro_steps:
        # each micro-step counts the same, so by length the tokens of short rows would count more
        return keep_micro_steps(lengths, micro_steps, plan.num_processes, limit)
    # one prompt is one text that shows the same images
    prompts = [(*row.prompt_ids[:-1], (*row.prompt_ids[-1:], *row.images)) for row in (one.row for one in samples)]
    saved = sum(map(len, prompts)) - sum(map(len, set(prompts)))
    if args.share_prefixes and saved >= _least_saved(args) * sum(lengths) > 0:
        return balance_by_prefix(lengths, prompts, micro_steps, plan.num_processes, limit)
    return balance_by_length(lengths, micro_steps, plan.num_processes, limit)


def _least_saved(args: GRPOConfig) -> float:
    return LEAST_SAVED if args.device.type == "cpu" else LEAST_SAVED_ON_GPU


def _with_padding(samples: Sequence[TrainingSample], packing: Packing) -> list[TrainingSample]:
    placed = sum(len(batch) for step in packing for of_rank in step for batch in of_rank)
    return [*samples, *[PADDING] * (placed - len(samples))]


def _packed(rows: TensorDict, packing: Packing, args: GRPOConfig) -> MicroSteps:
    """Return the padded micro-batches of a packing, by [micro-step][rank][micro-batch]."""
    batches = [batch for step in packing for of_rank in step for batch in of_rank]
    order = [row for batch in batches for row in batch]
    parts = split_tensor_dict(shuffle_tensor_dict(rows, order), [len(batch) for batch in batches])
    padded = iter([_laid_out(pad_rows(part.pop("samples")) | part, args) for part in parts])
    return [[[next(padded) for _ in of_rank] for of_rank in step] for step in packing]


def _laid_out(batch: MicroBatch, args: GRPOConfig) -> MicroBatch:
    """Add the layout of prefixes that are computed once, where that saves enough."""
    if not args.share_prefixes:
        return batch
    ids_RT, most = batch["input_ids"], args.max_tokens_per_micro_batch
    # packed by what it shares, it may be too large without
    is_too_large = most is not None and ids_RT.numel() > most
    layout = share_prefixes(
        ids_RT,
        batch["attention_mask"],
        batch.get("images"),
        least_saved=0.0 if is_too_large else _least_saved(args),
    )
    return batch if layout is None else batch | {SHARED_ROWS: layout}
