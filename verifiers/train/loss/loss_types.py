"""Loss types: what the policy gains by each token, and what each token counts in the mean over an update.

A loss type is one entry of `LOSS_TYPES`: an objective, which is maximized, and a mean. Tensors are named by their
shape: R rows of a micro-batch or an update, C completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LossSettings = Any
"""A `GRPOConfig`, or what has those of its settings that the loss reads."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What an objective is made of; log-probs and advantages are 0 on tokens that nobody sampled.

    Attributes:
        logps_RC: log pi, with gradient.
        old_RC: log pi_old.
        sampler_RC: log mu, of the policy that sampled.
        ratio: pi / pi_old with gradient: (R, C) of each token, or (R, 1) of each row.
        correction_RC: pi_old / mu within its bounds, without gradient; 1 off the sampled tokens.
        mask_RC: True on sampled tokens.
    """

    logps_RC: Tensor
    old_RC: Tensor
    sampler_RC: Tensor
    ratio: Tensor
    advantage_RC: Tensor
    correction_RC: Tensor
    mask_RC: Tensor

    def sampled(self, values_RC: Tensor) -> Tensor:
        """Return the values, 0 off the sampled tokens."""
        return torch.where(self.mask_RC, values_RC, 0.0)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return the values of the sampled tokens, one after another."""
        return values.detach().float().expand(self.mask_RC.shape)[self.mask_RC]

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the mean over its sampled tokens of each row that has some."""
        counts_R = self.mask_RC.sum(1)
        sums_R = self.sampled(values.detach().float()).sum(1)
        return (sums_R / counts_R)[counts_R > 0]


@dataclass(frozen=True, slots=True)
class UpdateRows:
    """The rows of one update, or of some of its micro-steps, as a mean sees them.

    Attributes:
        rollout_tokens_R: sampled tokens of each row's rollout, over all rows that it became.
        micro_step_tokens_R: sampled tokens of the micro-step, of one rank, that holds the row.
        rollouts, tokens: of the whole update, over all ranks, with those that are left out for their advantage of 0.
        micro_steps: micro-steps of all ranks that hold a sampled token.
    """

    rollout_tokens_R: Tensor
    micro_step_tokens_R: Tensor
    rollouts: int
    tokens: int
    micro_steps: int = 1


def token_weights(rows: UpdateRows, args: LossSettings) -> Tensor:
    """Return what each sampled token of a row counts (R,) in the mean over the whole update.

    A rollout that became several rows counts as in one, and so do rows however they are packed into micro-batches
    and ranks: the losses of these add up to the mean, and nothing is left to divide.
    """
    rows = replace(rows, rollouts=max(rows.rollouts, 1), tokens=max(rows.tokens, 1))
    weights_R = LOSS_TYPES[args.loss_type].mean(rows, args)
    return torch.where(rows.rollout_tokens_R > 0, weights_R, 0.0).float()


# -- means -----------------------------------------------------------------------------------------------------------


def token_mean(rows: UpdateRows, args: LossSettings) -> Tensor:
    """Count every token of the update the same."""
    return torch.full_like(rows.rollout_tokens_R, 1 / rows.tokens, dtype=torch.float64)


def rollout_mean(rows: UpdateRows, args: LossSettings) -> Tensor:
    """Take the mean over each rollout's tokens, then over rollouts."""
    return 1 / (rows.rollouts * rows.rollout_tokens_R.double())


def rollout_sum(rows: UpdateRows, args: LossSettings) -> Tensor:
    """Take the sum over each rollout's tokens, then the mean over rollouts."""
    return torch.full_like(rows.rollout_tokens_R, 1 / rows.rollouts, dtype=torch.float64)


def rollout_sum_by_longest(rows: UpdateRows, args: LossSettings) -> Tensor:
    """Divide the sum over each rollout's tokens by the most that it may have, then take the mean over rollouts."""
    return rollout_sum(rows, args) / (args.max_completion_length or 1)


def micro_step_mean(rows: UpdateRows, args: LossSettings) -> Tensor:
    """Take the mean over the tokens of each micro-step of a rank, then over these."""
    return 1 / (rows.micro_steps * rows.micro_step_tokens_R.double())


# -- objectives ------------------------------------------------------------------------------------------------------


def clipped(terms: TokenTerms, args: LossSettings) -> Tensor:
    """Return min(r A, clip(r) A) (PPO, arXiv:1707.06347); `delta` bounds r A too (INTELLECT-2, arXiv:2505.07291)."""
    low, high = clip_range(args)
    bounded = terms.ratio if args.delta is None else terms.ratio.clamp(max=args.delta)
    return torch.min(bounded * terms.advantage_RC, terms.ratio.clamp(low, high) * terms.advantage_RC)


def capped(terms: TokenTerms, args: LossSettings) -> Tensor:
    """Return min(r, epsilon_high) A log pi, the first factor without gradient."""
    return terms.ratio.detach().clamp(max=args.epsilon_high) * terms.advantage_RC * terms.logps_RC


def softly_gated(terms: TokenTerms, args: LossSettings) -> Tensor:
    """Return 4 / t sigmoid(t (r - 1)) A, with a temperature t by the sign of A."""
    temperature_RC = torch.where(terms.advantage_RC > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
    return (temperature_RC * (terms.ratio - 1)).sigmoid() * 4 / temperature_RC * terms.advantage_RC


def gamma_weighted(terms: TokenTerms, args: LossSettings) -> Tensor:
    """Return phi(w) A log pi, the first factor without gradient."""
    return gamma_weights(terms, args) * terms.advantage_RC * terms.logps_RC


def clip_range(args: LossSettings) -> tuple[float, float]:
    """Return the ratios between which the objective has a gradient whatever the advantage."""
    return 1 - args.epsilon, 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)


@torch.no_grad()
def gamma_weights(terms: TokenTerms, args: LossSettings) -> Tensor:
    """Return phi(w) = e^l w^k e^(-l w) (R, C): w is the product of a row's pi / mu; k and l go by the sign of A."""
    least = math.log(1e-8)
    row_log_w_R1 = (terms.logps_RC - terms.old_RC).clamp(-20, 20).sum(1, keepdim=True)
    row_log_w_R1 = row_log_w_R1 + terms.correction_RC.log().clamp(least, 20).sum(1, keepdim=True)
    log_w_R1 = row_log_w_R1.clamp(least, 20)
    is_good_RC = terms.advantage_RC >= 0
    k_RC = torch.where(is_good_RC, args.vespo_k_pos, args.vespo_k_neg)
    l_RC = torch.where(is_good_RC, args.vespo_lambda_pos, args.vespo_lambda_neg).clamp(min=1e-4)
    return (l_RC + k_RC * log_w_R1 - l_RC * log_w_R1.exp()).exp().nan_to_num(0.0, 0.0, 0.0)


# -- what is logged of them ------------------------------------------------------------------------------------------


def clip_ratios(terms: TokenTerms, args: LossSettings) -> dict[str, Tensor]:
    """Return which sampled tokens are clipped, and the share of them in each row."""
    low, high = clip_range(args)
    low_RC = (terms.ratio < low) & (terms.advantage_RC < 0)
    high_RC = (terms.ratio > high) & (terms.advantage_RC > 0)
    return {
        "clip_ratio/low_mean": terms.of_tokens(low_RC),
        "clip_ratio/high_mean": terms.of_tokens(high_RC),
        "clip_ratio/region_mean": terms.of_tokens(low_RC | high_RC),
        "clip_ratio/low_min": terms.of_rows(low_RC),
        "clip_ratio/high_max": terms.of_rows(high_RC),
    }


def cap_ratio(terms: TokenTerms, args: LossSettings) -> dict[str, Tensor]:
    """Return which sampled tokens of a positive advantage are capped."""
    return {"cispo_clip_ratio": terms.of_tokens((terms.ratio > args.epsilon_high) & (terms.advantage_RC > 0))}


def gamma_means(terms: TokenTerms, args: LossSettings) -> dict[str, Tensor]:
    """Return phi(w) of each row."""
    return {"vespo/phi_seq_mean": terms.of_rows(gamma_weights(terms, args))}


@dataclass(frozen=True, slots=True)
class LossType:
    """An objective and the mean that is taken of it.

    Attributes:
        objective: gives what is gained by each token (R, C), before importance weights and the KL.
        mean: gives the weight of each row's tokens (R,); see `token_weights`. Streaming takes it for a product of a
            number of the row and a number of the update.
        measure: gives values to log, by name: of sampled tokens or of rows.
        multiplies_ratios: the objective multiplies the ratios and the corrections of a row's tokens itself.
    """

    objective: Callable[[TokenTerms, LossSettings], Tensor]
    mean: Callable[[UpdateRows, LossSettings], Tensor]
    measure: Callable[[TokenTerms, LossSettings], dict[str, Tensor]] = lambda terms, args: {}
    multiplies_ratios: bool = False

    @property
    def is_clipped(self) -> bool:
        """True where the objective is clipped, and `delta` bounds it."""
        return self.objective is clipped

    @property
    def depends_on_micro_steps(self) -> bool:
        """True where the rows that share a micro-step decide what their tokens count."""
        return self.mean is micro_step_mean


LOSS_TYPES = {
    # DeepSeekMath, arXiv:2402.03300
    "grpo": LossType(clipped, rollout_mean, clip_ratios),
    # arXiv:2511.20347
    "sapo": LossType(softly_gated, rollout_mean),
    # TRL's own; its name is that of arXiv:2506.02864
    "bnpo": LossType(clipped, micro_step_mean, clip_ratios),
    # arXiv:2503.20783
    "dr_grpo": LossType(clipped, rollout_sum_by_longest, clip_ratios),
    # arXiv:2503.14476
    "dapo": LossType(clipped, token_mean, clip_ratios),
    # MiniMax-M1, arXiv:2506.13585
    "cispo": LossType(capped, token_mean, cap_ratio),
    # arXiv:2602.10693
    "vespo": LossType(gamma_weighted, token_mean, gamma_means, multiplies_ratios=True),
    # arXiv:2602.05261
    "luspo": LossType(clipped, rollout_sum, clip_ratios),
}
"""Every loss type by its name in TRL, with its paper."""
