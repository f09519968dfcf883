"""Weights per row under which TRL's own aggregation counts every rollout of an update once.

TRL's losses (trl 1.16, `GRPOTrainer._compute_loss`) average over rows, tokens or micro-steps. Without weights
a rollout split into two rows counts twice, and a padding row dilutes the rest. The gradient of an update is the
mean over W ranks of the sum of TRL's loss over A micro-steps, each of one micro-batch or several. With B the rows of
a micro-batch (padding included), N the rollouts of the update, T the sampled tokens (T_step those of a rank's
micro-step) and l the loss of a token:

    loss type           TRL's loss of a micro-batch        wanted for the update              weight of a row
    grpo, sapo          1/(A B) sum_row 1/T_row sum l      1/N sum_rollout 1/T_rollout sum l  W A B/N T_row/T_rollout
    dr_grpo             1/(A B L) sum_row sum l            1/(N L) sum_rollout sum l          W A B/N
    luspo               1/(A B) sum_row sum l              1/N sum_rollout sum l              W A B/N
    bnpo                1/(A T_batch) sum l                mean over M filled micro-steps     W A/M T_batch/T_step
    dapo, cispo, vespo  sum l / (num_items/W x A/S)        1/T_update sum l                   1

The weight multiplies the row's advantages. It is positive, so signs and clipping stay as they are:
min(w A r, w A clip(r)) = w min(A r, A clip(r)). A KL term does not contain the advantages: see `WeightedBeta`.

TRL's entropy bonus and its router loss of mixture-of-experts models are means over each micro-batch, divided by A,
that no row weight reaches. Their coefficients are weighted instead, by W A T_batch/T_update: see
`WeightedCoefficient`.

What a loss computes from a whole sequence (sequence-level ratios, vespo's gamma weight) it computes per row, so
`refuse_forked_ratios` refuses such a loss for a rollout of several rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verifiers.errors import ConfigError
from verifiers.train.batching.packing import Column
from verifiers.train.validation.loss_settings import LOSS_TYPES

__all__ = [
    "WeightedBeta",
    "WeightedCoefficient",
    "num_items_in_batch",
    "row_weights",
    "weight_advantages",
]


def row_weights(
    loss_type: str,
    *,
    rollout_index_R: Tensor,
    sampled_tokens_R: Tensor,
    rollout_sampled_tokens_R: Tensor,
    micro_step_R: Tensor,
    rank_R: Tensor,
    num_micro_steps: int,
    num_ranks: int,
    micro_batch_R: Tensor | None = None,
    rollouts_without_rows: int = 0,
) -> Tensor:
    """Return the weights of the R rows of one update: those of all its ranks and all its micro-steps.

    Args:
        loss_type: one of `LOSS_TYPES`.
        rollout_index_R: the rollout each row belongs to; negative for padding rows.
        sampled_tokens_R: sampled tokens of each row.
        rollout_sampled_tokens_R: sampled tokens of its rollout, over all rows.
        micro_step_R: micro-step that holds the row, 0 .. num_micro_steps - 1.
        rank_R: rank that holds the row, 0 .. num_ranks - 1.
        num_micro_steps: A, micro-steps of the update on each rank; 1 in evaluation.
        num_ranks: W, ranks whose gradients are averaged.
        micro_batch_R: micro-batch of its micro-step and rank that holds the row, from 0; one each when left out.
        rollouts_without_rows: rollouts of the update that count in N though no row of theirs is computed, because
            their advantage is 0. Not where the mean is over a micro-batch's tokens, which are the rows' own.

    Returns:
        (R,) float32, on the device of `rollout_index_R`; 0 on rows without a sampled token.

    Raises:
        ConfigError: for an unknown loss type, tensors of different lengths, a micro-step or rank out of range,
            or a rollout of which a row is missing: all rows of a rollout must be in one update.
    """
    if loss_type not in LOSS_TYPES:
        raise ConfigError(f"loss_type is {loss_type!r}; choose one of {', '.join(LOSS_TYPES)}.")
    mean_over = LOSS_TYPES[loss_type].mean_over
    _check_places(micro_step_R, num_micro_steps, "micro-step")
    _check_places(rank_R, num_ranks, "rank")
    micro_batch_R = torch.zeros_like(rank_R) if micro_batch_R is None else micro_batch_R
    described = (rollout_index_R, sampled_tokens_R, rollout_sampled_tokens_R, micro_step_R, rank_R, micro_batch_R)
    lengths = [len(tensor) for tensor in described]
    if len(set(lengths)) > 1:
        raise ConfigError(f"rows of an update are described by tensors of different lengths: {lengths}")
    counted_R = (rollout_index_R >= 0) & (sampled_tokens_R > 0)
    _check_rollouts_are_whole(
        rollout_index_R[counted_R], sampled_tokens_R[counted_R], rollout_sampled_tokens_R[counted_R]
    )

    sums = num_micro_steps * num_ranks
    cell_R = rank_R * num_micro_steps + micro_step_R
    micro_batch_R = micro_batch_R * sums + cell_R
    if mean_over == "update tokens":
        weights_R = torch.ones(len(cell_R), dtype=torch.float64, device=cell_R.device)
    elif mean_over == "micro-batch tokens":
        filled = len(cell_R[counted_R].unique())
        tokens_R = sampled_tokens_R.double()
        shares_R = _totals(tokens_R, micro_batch_R) / _totals(tokens_R, cell_R).clamp(min=1)
        weights_R = shares_R * sums / max(filled, 1)
    else:
        rollouts = len(rollout_index_R[counted_R].unique()) + rollouts_without_rows
        weights_R = torch.bincount(micro_batch_R)[micro_batch_R].double() * sums / max(rollouts, 1)
        if mean_over == "row means":
            weights_R = weights_R * sampled_tokens_R / rollout_sampled_tokens_R.clamp(min=1)
    return torch.where(counted_R, weights_R, 0.0).float()


def _totals(values_R: Tensor, part_R: Tensor) -> Tensor:
    """Return for each row the sum over the rows of its part."""
    return torch.bincount(part_R, weights=values_R)[part_R]


def num_items_in_batch(
    sampled_tokens_R: Tensor, *, num_micro_steps: int, steps_per_generation: int, tokens_without_rows: float = 0
) -> Tensor:
    """Return what makes TRL divide a mean over an update's tokens by their number.

    TRL takes the value for the tokens of a whole block and scales it by A/S, an even share of the block's S
    micro-steps; updates of a block hold different numbers of tokens, so the true count is scaled by S/A here.

    Args:
        sampled_tokens_R: sampled tokens of the update's rows, over all ranks and micro-steps.
        num_micro_steps: A, micro-steps of the update (TRL's `current_gradient_accumulation_steps`).
        steps_per_generation: S, micro-steps of the block on each rank. In evaluation A and S are both 1.
        tokens_without_rows: sampled tokens of rollouts that count though no row of theirs is computed.

    Returns:
        0-dim float32 tensor.

    Raises:
        ConfigError: where an update has more micro-steps than a block: TRL clamps the value at 1, so that
            few tokens would be divided by too much.
    """
    if not 0 < num_micro_steps <= steps_per_generation:
        raise ConfigError(
            f"an update of {num_micro_steps} micro-steps does not fit a block of {steps_per_generation}; "
            "steps_per_generation must be a multiple of gradient_accumulation_steps"
        )
    tokens = sampled_tokens_R.sum().double() + tokens_without_rows
    return (tokens * steps_per_generation / num_micro_steps).float()


def weight_advantages(advantages: Column, weights_R: Tensor) -> Column:
    """Multiply the advantages of each row by its weight: a tensor (R,) or (R, C), or one 1-D tensor a row."""
    if isinstance(advantages, list):
        return [weight * row for weight, row in zip(weights_R, advantages, strict=True)]
    return advantages * (weights_R if advantages.dim() == 1 else weights_R.unsqueeze(1))


class WeightedBeta(float):
    """A KL coefficient that weights each row when it is multiplied with a (R, C) tensor of KL terms.

    TRL adds `self.beta * per_token_kl` after the advantages, so weights on the advantages do not reach it, and its
    mask cannot carry them: the mask is in the denominator too, where a row's weight cancels. This number is
    compared, formatted and logged like the float it is; only the product with a matrix differs, and only with the
    number on the left, as TRL writes it (`tensor * number` is decided by the tensor). Set it as `trainer.beta`
    around one call of `_compute_loss`, with the weights of that micro-batch's rows.

    Args:
        beta: the KL coefficient.
        weights_R: weights of the micro-batch's rows, from `row_weights`.

    Attributes:
        kl_RC: terms that take the place of TRL's; None for TRL's own.
    """

    weights_R: Tensor  # noqa: N815
    kl_RC: Tensor | None = None  # noqa: N815

    def __new__(cls, beta: float, weights_R: Tensor) -> WeightedBeta:
        self = super().__new__(cls, beta)
        self.weights_R = weights_R
        return self

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, Tensor):
            return float(self) * other
        if other.dim() != 2 or len(other) != len(self.weights_R):
            raise ConfigError(
                f"the KL terms have shape {tuple(other.shape)}, but there are {len(self.weights_R)} row weights"
            )
        return (other if self.kl_RC is None else self.kl_RC) * (float(self) * self.weights_R.to(other).unsqueeze(1))


class WeightedCoefficient(float):
    """A coefficient that counts `weight` times where it is multiplied with a tensor, and once everywhere else.

    For terms of TRL's loss that are means over a micro-batch, such as the entropy bonus; in place of the trainer's
    own coefficient around one call of `_compute_loss`, and with the number on the left, as for `WeightedBeta`. What
    TRL's adaptive control adds to it stays what it is.
    """

    weight: float

    def __new__(cls, coefficient: float, weight: float) -> WeightedCoefficient:
        self = super().__new__(cls, coefficient)
        self.weight = weight
        return self

    def __mul__(self, other: Any) -> Any:
        return float(self) * other * (self.weight if isinstance(other, Tensor) else 1.0)


def _check_places(places_R: Tensor, count: int, what: str) -> None:
    if count < 1 or bool(((places_R < 0) | (places_R >= count)).any()):
        raise ConfigError(f"{what} numbers {places_R.tolist()} must lie in 0 .. {count - 1}")


def _check_rollouts_are_whole(rollout_index_R: Tensor, sampled_R: Tensor, rollout_sampled_R: Tensor) -> None:
    rollouts, place_R = rollout_index_R.unique(return_inverse=True)
    present = torch.zeros(len(rollouts), dtype=torch.int64, device=place_R.device)
    present.index_add_(0, place_R, sampled_R.long())
    wrong_R = present[place_R] != rollout_sampled_R
    if bool(wrong_R.any()):
        first = int(wrong_R.nonzero()[0])
        raise ConfigError(
            f"rollout {int(rollout_index_R[first])} has {int(rollout_sampled_R[first])} sampled tokens, but its rows "
            f"in this update hold {int(present[place_R[first]])}; keep all rows of a rollout in one update"
        )
