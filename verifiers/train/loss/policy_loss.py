"""The loss of a policy on one micro-batch: objective, importance weights, KL and entropy, token by token.

A loss type is one entry of `LOSS_TYPES`: an objective, which is maximized, and a mean: what each token counts in an
update. Tensors are named by their shape: R rows of a micro-batch or an update, C completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True, slots=True)
class MeasuredLoss:
    """What was measured beside a loss, without gradient.

    Attributes:
        policy_loss: the loss without the entropy bonus.
        values: by the name of the metric, one value for each sampled token or for each row that has some.
        is_finite_R: False where a row's loss is not finite.
    """

    policy_loss: Tensor
    values: dict[str, Tensor]
    is_finite_R: Tensor


def policy_loss(
    logps_RC: Tensor,
    entropy_RC: Tensor,
    batch: Mapping[str, Tensor],
    args: LossSettings,
    *,
    entropy_coef: float = 0.0,
    trained_RC: Tensor | None = None,
    others_RCK: Tensor | None = None,
) -> tuple[Tensor, MeasuredLoss]:
    """Return the sum over tokens of weight x loss; over the micro-batches of an update that is its mean.

    Args:
        logps_RC: log pi of each completion token, with gradient.
        entropy_RC: entropies of their distributions, with gradient.
        batch: the micro-batch: `loss_mask`, `advantages` and `sampler_logps` (R, C), `token_weights` (R,),
            `ce_mask` (R, C) and `ce_weights` (R,) where tokens are trained by cross-entropy,
            `update_tokens`, and where there are any `old_logps` (those of this pass, if not) and `reference_logps`.
        entropy_coef: coefficient of the mean entropy over the update's tokens.
        trained_RC: tokens whose objective counts; all that were sampled when left out.
        others_RCK: log pi of `teacher_ids`, with gradient, where the batch has them.
    """
    loss_type, terms = LOSS_TYPES[args.loss_type], token_terms(logps_RC, batch, args)
    objective_RC = loss_type.objective(terms, args)
    if not loss_type.multiplies_ratios:
        objective_RC = objective_RC * terms.correction_RC
    if args.off_policy_mask_threshold is not None:
        objective_RC = objective_RC * _near_sampler(terms, args.off_policy_mask_threshold)
    if trained_RC is not None:
        objective_RC = objective_RC * trained_RC
    values = {"entropy": terms.of_tokens(entropy_RC), **loss_type.measure(terms, args), **_mismatch(terms, args)}
    if "reference_logps" in batch:
        reference_RC, estimator = terms.sampled(batch["reference_logps"]), args.kl_estimator or "k3"
        # k3 is multiplied by the ratio of the row where that is the objective's, as in TRL
        ratio = terms.ratio if estimator == "k3" else policy_ratios(terms.logps_RC, terms.old_RC, terms.mask_RC)
        corrected = args.use_bias_correction_kl
        kl_RC = kl_terms(terms.logps_RC, reference_RC, ratio, estimator, corrected=corrected)
        objective_RC = objective_RC - args.beta * kl_RC
        k3_RC = kl_terms(terms.logps_RC, reference_RC, terms.ratio, "k3", corrected=corrected)
        values["kl"] = terms.of_tokens(k3_RC)
    if "teacher_logps" in batch:
        values["teacher_kl"] = terms.of_tokens(terms.sampler_RC - terms.sampled(batch["teacher_logps"]))
    if others_RCK is not None:
        teacher_RCK = batch["teacher_ids_logps"]
        forward_RC = terms.sampled((teacher_RCK.exp() * (teacher_RCK - others_RCK)).sum(-1))
        objective_RC = objective_RC - args.teacher_coef * forward_RC
        values["teacher_forward_kl"] = terms.of_tokens(forward_RC)
    losses_R = -(batch["token_weights"].unsqueeze(1) * terms.sampled(objective_RC)).sum(1)
    if "ce_mask" in batch:
        ce_RC = torch.where(batch["ce_mask"].bool(), -logps_RC, 0.0)
        losses_R = losses_R + batch["ce_weights"] * ce_RC.sum(1)
        is_shown_R = batch["rollout_index"] < 0
        for name, of_kind_R in (("ce/demonstrations", is_shown_R), ("ce/environment", ~is_shown_R)):
            values[name] = ce_RC.detach()[of_kind_R][batch["ce_mask"][of_kind_R].bool()]
    loss = losses_R.sum()
    measured = MeasuredLoss(loss.detach(), values, losses_R.detach().isfinite())
    if entropy_coef:
        loss = loss - entropy_coef * terms.sampled(entropy_RC).sum() / batch["update_tokens"]
    return loss, measured


def token_terms(logps_RC: Tensor, batch: Mapping[str, Tensor], args: LossSettings) -> TokenTerms:
    """Return what the objective is made of; arguments as of `policy_loss`."""
    mask_RC = batch["loss_mask"].bool()
    # tokens that nobody sampled may hold anything; a ratio of zeros cannot overflow
    logps_RC, sampler_RC, advantage_RC = (
        torch.where(mask_RC, values_RC, 0.0) for values_RC in (logps_RC, batch["sampler_logps"], batch["advantages"])
    )
    if not args.use_rewards:
        advantage_RC = torch.zeros_like(advantage_RC)
    if "teacher_logps" in batch and "teacher_ids" not in batch:
        teacher_RC = torch.where(mask_RC, batch["teacher_logps"], 0.0)
        advantage_RC = advantage_RC + args.teacher_coef * (teacher_RC - sampler_RC)
    old_RC = torch.where(mask_RC, batch["old_logps"], 0.0) if "old_logps" in batch else logps_RC.detach()
    ratio = policy_ratios(logps_RC, old_RC, mask_RC, args.importance_sampling_level)
    correction_RC = torch.ones_like(old_RC)
    if args.vllm_importance_sampling_correction:
        correction_RC = importance_weights(old_RC, sampler_RC, mask_RC, args)
    return TokenTerms(logps_RC, old_RC, sampler_RC, ratio, advantage_RC, correction_RC, mask_RC)


def policy_ratios(logps_RC: Tensor, old_RC: Tensor, mask_RC: Tensor, level: str = "token") -> Tensor:
    """Return pi / pi_old of each token (R, C), or at the level "sequence" its geometric mean over each row (R, 1).

    The second is the ratio of GSPO (Zheng et al., "Group sequence policy optimization", arXiv:2507.18071).
    """
    log_ratio_RC = torch.where(mask_RC, logps_RC - old_RC, 0.0)
    if level == "token":
        return log_ratio_RC.exp()
    return (log_ratio_RC.sum(1, keepdim=True) / mask_RC.sum(1, keepdim=True).clamp(min=1)).exp()


def kl_terms(logps_RC: Tensor, reference_RC: Tensor, ratio: Tensor, estimator: str, *, corrected: bool) -> Tensor:
    """Return an estimate (R, C) of KL(pi || pi_ref) at each token, in nats, to be put into the loss.

    With d = log pi - log pi_ref, k1 is d, k2 is d^2 / 2 and k3 is e^-d - 1 + d (Schulman, "Approximating KL
    divergence", 2020). As a term of a loss k2 has the gradient of the KL in expectation, and k1 none. The factor
    pi / pi_old, with gradient for k1 and k3 and without for k2, gives all three that of the KL, off policy too
    (Liu et al., arXiv:2510.01555).

    Args:
        logps_RC: log pi, with gradient.
        reference_RC: log pi_ref.
        ratio: pi / pi_old, with gradient.
        corrected: multiply by that factor.
    """
    difference_RC = logps_RC - reference_RC
    if estimator == "k1":
        kl_RC = difference_RC
    elif estimator == "k2":
        kl_RC, ratio = difference_RC.square() / 2, ratio.detach()
    else:
        kl_RC = (-difference_RC).exp() - 1 + difference_RC
    return kl_RC * ratio if corrected else kl_RC


def importance_weights(old_RC: Tensor, sampler_RC: Tensor, mask_RC: Tensor, args: LossSettings) -> Tensor:
    """Return the weights (R, C) between the sampler's policy mu and the proximal pi_old; 1.0 off the sampled tokens.

    A truncated weight min(pi_old / mu, cap), without gradient, multiplies each token's objective: decoupled PPO
    (Hilton et al., arXiv:2110.00641), with the truncation of Yao et al. ("Your efficient RL framework secretly brings
    you off-policy RL training", 2025). "token_mask" with both bounds is IcePop (Ling team, arXiv:2510.18855).
    Clipping acts on pi / pi_old and is not touched.

    The mode is "token_" or "sequence_" (the product over a row's sampled tokens) and "truncate" (ratios are cut to
    the bounds) or "mask" (ratios outside the bounds become 0).

    Args:
        old_RC, sampler_RC: log pi_old and log mu of each token, in nats.
        mask_RC: 1 on sampled tokens.
        args: mode and bounds, `vllm_importance_sampling_...`; None is no bound.
    """
    mode, low = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_min
    high = args.vllm_importance_sampling_clip_max
    ratio_RC = _sampler_ratios(old_RC, sampler_RC, mask_RC, mode)
    low, high = 0.0 if low is None else low, float("inf") if high is None else high
    if mode.endswith("truncate"):
        weights_RC = ratio_RC.clamp(low, high)
    else:
        weights_RC = torch.where((ratio_RC >= low) & (ratio_RC <= high), ratio_RC, 0.0)
    return torch.where(mask_RC.bool(), weights_RC, 1.0)


def _sampler_ratios(old_RC: Tensor, sampler_RC: Tensor, mask_RC: Tensor, mode: str) -> Tensor:
    """Return pi_old / mu (R, C) as a mode sees it: of each token, or in "sequence_" modes of each row."""
    log_ratio_RC = torch.where(mask_RC.bool(), old_RC - sampler_RC, 0.0)
    if mode.startswith("sequence"):
        return log_ratio_RC.sum(1, keepdim=True).exp().expand_as(log_ratio_RC)
    return log_ratio_RC.exp()


def measure_mismatch(
    old_RC: Tensor, sampler_RC: Tensor, mask_RC: Tensor, weights_RC: Tensor | None, args: LossSettings
) -> dict[str, Tensor]:
    """Return how far the sampler and the proximal policy are apart at each sampled token, by the name of the metric.

    `mismatch_kl` is r - 1 - log r with r = pi_old / mu: an unbiased, never negative estimate of KL(mu || pi_old) in
    nats (Schulman, "Approximating KL divergence", 2020). The ratios are those that the mode sees.

    Args:
        weights_RC: what `importance_weights` made of the ratios; None without importance sampling.
    """
    sampled_RC = mask_RC.bool()
    old_RC, sampler_RC = old_RC.double(), sampler_RC.double()
    log_ratio = (old_RC - sampler_RC)[sampled_RC]
    ratio = _sampler_ratios(old_RC, sampler_RC, mask_RC, args.vllm_importance_sampling_mode)[sampled_RC]
    weight = ratio if weights_RC is None else weights_RC[sampled_RC].double()
    return {
        "mismatch_kl": log_ratio.exp() - 1 - log_ratio,
        "sampling/importance_sampling_ratio/mean": ratio,
        "sampling/importance_sampling_ratio/min": ratio,
        "sampling/importance_sampling_ratio/max": ratio,
        "sampling/sampling_logp_difference/max": log_ratio.abs(),
        "sampling/clipped_share": ((weight - ratio).abs() > 1e-5 * ratio.clamp(min=1.0)).double(),
    }


def _mismatch(terms: TokenTerms, args: LossSettings) -> dict[str, Tensor]:
    if args.vllm_importance_sampling_correction:
        return measure_mismatch(terms.old_RC, terms.sampler_RC, terms.mask_RC, terms.correction_RC, args)
    # of tokens that may be stale the old log-probs are the sampler's own
    old_RC = terms.logps_RC.detach() if args.may_be_stale else terms.old_RC
    return measure_mismatch(old_RC, terms.sampler_RC, terms.mask_RC, None, args)


def _near_sampler(terms: TokenTerms, threshold: float) -> Tensor:
    """Return False on rows of a negative advantage that are far off policy (DeepSeek-V3.2, arXiv:2512.02556)."""
    counts_R1 = terms.mask_RC.sum(1, keepdim=True).clamp(min=1)
    kl_R1 = (terms.sampler_RC - terms.logps_RC.detach()).sum(1, keepdim=True) / counts_R1
    return (terms.advantage_RC >= 0) | (kl_R1 <= threshold)
