"""Importance weights between the sampler's policy mu and the proximal policy pi_old, and how far apart they are.

A truncated weight w = min(pi_old / mu, cap), without gradient, multiplies each token's objective: decoupled PPO
(Hilton et al., arXiv:2110.00641), with the truncation of Yao et al. ("Your efficient RL framework secretly
brings you off-policy RL training", 2025). "token_mask" with both bounds is IcePop (Ling team, arXiv:2510.18855), and
the mask of rows by the geometric mean of their ratios is that of Liu, Li et al. ("When speed kills stability", 2025).
Clipping acts on pi / pi_old and is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Mismatch",
    "geometric_ratios",
    "importance_ratios",
    "importance_weights",
    "join_mismatches",
    "measure_mismatch",
    "mismatch_metrics",
]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over the sampled tokens of one micro-batch, so that ranks and micro-batches can be added up.

    Attributes:
        kl_sum: sum of r - 1 - log r with r = pi_old / mu: an unbiased, never negative estimate of
            KL(mu || pi_old) (Schulman, "Approximating KL divergence", 2020), in nats.
        ratio_sum, ratio_min, ratio_max: of r as the mode sees it, over sampled tokens.
        difference_max: largest |log pi_old - log mu|, in nats.
        clipped: tokens whose weight the bounds changed.
        tokens: sampled tokens.
    """

    kl_sum: float
    ratio_sum: float
    ratio_min: float
    ratio_max: float
    difference_max: float
    clipped: float
    tokens: float


def importance_ratios(old_logps_RC: Tensor, sampling_logps_RC: Tensor, loss_mask_RC: Tensor, mode: str) -> Tensor:
    """Return pi_old / mu (R, C) as a mode sees it: of each token, or in "sequence_" modes of each row."""
    log_ratio_RC = torch.where(loss_mask_RC.bool(), old_logps_RC - sampling_logps_RC, 0.0)
    if mode.startswith("sequence"):
        return log_ratio_RC.sum(-1, keepdim=True).exp().expand_as(log_ratio_RC)
    return log_ratio_RC.exp()


def geometric_ratios(old_logps_RC: Tensor, sampling_logps_RC: Tensor, loss_mask_RC: Tensor) -> Tensor:
    """Return the geometric mean (R, 1) of pi_old / mu over each row's sampled tokens; 1.0 where there are none."""
    sampled_RC = loss_mask_RC.bool()
    log_ratio_RC = torch.where(sampled_RC, old_logps_RC - sampling_logps_RC, 0.0)
    return (log_ratio_RC.sum(-1, keepdim=True) / sampled_RC.sum(-1, keepdim=True).clamp(min=1)).exp()


def importance_weights(
    old_logps_RC: Tensor,
    sampling_logps_RC: Tensor,
    loss_mask_RC: Tensor,
    *,
    mode: str,
    clip_max: float | None,
    clip_min: float | None,
    geometric_max: float | None = None,
    geometric_min: float | None = None,
) -> Tensor:
    """Return the weights (R, C), 1.0 where `loss_mask_RC` is 0.

    Args:
        old_logps_RC, sampling_logps_RC: log pi_old and log mu of each token, in nats.
        loss_mask_RC: 1 on sampled tokens.
        mode: "token_" or "sequence_" (the product over a row's sampled tokens) and "truncate" (ratios are cut to
            the bounds) or "mask" (ratios outside the bounds become 0).
        clip_max, clip_min: the bounds; None for none.
        geometric_max, geometric_min: rows whose geometric mean ratio is outside are 0 on every token; None for none.
    """
    sampled_RC = loss_mask_RC.bool()
    ratio_RC = importance_ratios(old_logps_RC, sampling_logps_RC, loss_mask_RC, mode)
    if mode.endswith("truncate"):
        weights_RC = ratio_RC.clamp(min=clip_min, max=clip_max) if clip_min or clip_max else ratio_RC
    else:
        weights_RC = torch.where(_inside(ratio_RC, clip_min, clip_max), ratio_RC, 0.0)
    if geometric_max is not None or geometric_min is not None:
        ratio_R1 = geometric_ratios(old_logps_RC, sampling_logps_RC, loss_mask_RC)
        weights_RC = torch.where(_inside(ratio_R1, geometric_min, geometric_max), weights_RC, 0.0)
    return torch.where(sampled_RC, weights_RC, 1.0)


def _inside(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    keep = torch.ones_like(ratio, dtype=torch.bool)
    if high is not None:
        keep &= ratio <= high
    if low is not None:
        keep &= ratio >= low
    return keep


def measure_mismatch(
    old_logps_RC: Tensor,
    sampling_logps_RC: Tensor,
    loss_mask_RC: Tensor,
    weights_RC: Tensor | None,
    mode: str = "token_truncate",
) -> Mismatch | None:
    """Measure how far the sampler and the proximal policy are apart; None where no token was sampled.

    Args:
        weights_RC: what `importance_weights` made of the ratios; None without importance sampling.
        mode: its mode. The ratios measured are those that it sees, each counted once a sampled token.
    """
    sampled_RC = loss_mask_RC.bool()
    log_ratio = (old_logps_RC - sampling_logps_RC)[sampled_RC].double()
    if not len(log_ratio):
        return None
    ratio = importance_ratios(old_logps_RC.double(), sampling_logps_RC.double(), loss_mask_RC, mode)[sampled_RC]
    clipped = 0.0
    if weights_RC is not None:
        clipped = float(((weights_RC[sampled_RC].double() - ratio).abs() > 1e-5 * ratio.clamp(min=1.0)).sum())
    return Mismatch(
        kl_sum=float((log_ratio.exp() - 1 - log_ratio).sum()),
        ratio_sum=float(ratio.sum()),
        ratio_min=float(ratio.min()),
        ratio_max=float(ratio.max()),
        difference_max=float(log_ratio.abs().max()),
        clipped=clipped,
        tokens=float(len(log_ratio)),
    )


def join_mismatches(parts: Sequence[Mismatch]) -> Mismatch | None:
    """Return the mismatch over all tokens of several micro-batches or ranks; None where there are none."""
    parts = [part for part in parts if part.tokens]
    if not parts:
        return None
    return Mismatch(
        kl_sum=sum(part.kl_sum for part in parts),
        ratio_sum=sum(part.ratio_sum for part in parts),
        ratio_min=min(part.ratio_min for part in parts),
        ratio_max=max(part.ratio_max for part in parts),
        difference_max=max(part.difference_max for part in parts),
        clipped=sum(part.clipped for part in parts),
        tokens=sum(part.tokens for part in parts),
    )


def mismatch_metrics(mismatch: Mismatch) -> dict[str, float]:
    """Return a mismatch under the names of metrics: means over sampled tokens, and extremes."""
    tokens = mismatch.tokens
    return {
        "mismatch_kl": mismatch.kl_sum / tokens,
        "sampling/importance_sampling_ratio/mean": mismatch.ratio_sum / tokens,
        "sampling/importance_sampling_ratio/min": mismatch.ratio_min,
        "sampling/importance_sampling_ratio/max": mismatch.ratio_max,
        "sampling/sampling_logp_difference/max": mismatch.difference_max,
        "sampling/clipped_share": mismatch.clipped / tokens,
    }
