"""The loss of a policy on one micro-batch: objective, importance weights, KL and entropy, token by token.

A loss type is one entry of `LOSS_TYPES`: an objective, which is maximized, and a mean: what each token counts in an
update. Tensors are named by their shape: R rows of a micro-batch or an update, T tokens of the longest.
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
        logps_RT: log pi, with gradient.
        old_RT: log pi_old.
        sampler_RT: log mu, of the policy that sampled.
        ratio: pi / pi_old with gradient: (R, T) of each token, or (R, 1) of each row.
        correction_RT: pi_old / mu within its bounds, without gradient; 1 off the sampled tokens.
        mask_RT: True on sampled tokens.
    """

    logps_RT: Tensor
    old_RT: Tensor
    sampler_RT: Tensor
    ratio: Tensor
    advantage_RT: Tensor
    correction_RT: Tensor
    mask_RT: Tensor

    def sampled(self, values_RT: Tensor) -> Tensor:
        """Return the values, 0 off the sampled tokens."""
        return torch.where(self.mask_RT, values_RT, 0.0)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return the values of the sampled tokens, one after another."""
        return values.detach().float().expand(self.mask_RT.shape)[self.mask_RT]

    def of_rows(self, values: Tensor) -> Tensor:
        """Return the mean over its sampled tokens of each row that has some."""
        counts_R = self.mask_RT.sum(1)
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
    return torch.min(bounded * terms.advantage_RT, terms.ratio.clamp(low, high) * terms.advantage_RT)


def capped(terms: TokenTerms, args: LossSettings) -> Tensor:
    """Return min(r, epsilon_high) A log pi, the first factor without gradient."""
    return terms.ratio.detach().clamp(max=args.epsilon_high) * terms.advantage_RT * terms.logps_RT


def softly_gated(terms: TokenTerms, args: LossSettings) -> Tensor:
    """Return 4 / t sigmoid(t (r - 1)) A, with a temperature t by the sign of A."""
    temperature_RT = torch.where(terms.advantage_RT > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
    return (temperature_RT * (terms.ratio - 1)).sigmoid() * 4 / temperature_RT * terms.advantage_RT


def gamma_weighted(terms: TokenTerms, args: LossSettings) -> Tensor:
    """Return phi(w) A log pi, the first factor without gradient."""
    return gamma_weights(terms, args) * terms.advantage_RT * terms.logps_RT


def clip_range(args: LossSettings) -> tuple[float, float]:
    """Return the ratios between which the objective has a gradient whatever the advantage."""
    return 1 - args.epsilon, 1 + (args.epsilon if args.epsilon_high is None else args.epsilon_high)


@torch.no_grad()
def gamma_weights(terms: TokenTerms, args: LossSettings) -> Tensor:
    """Return phi(w) = e^l w^k e^(-l w) (R, T): w is the product of a row's pi / mu; k and l go by the sign of A."""
    least = math.log(1e-8)
    row_log_w_R1 = (terms.logps_RT - terms.old_RT).clamp(-20, 20).sum(1, keepdim=True)
    row_log_w_R1 = row_log_w_R1 + terms.correction_RT.log().clamp(least, 20).sum(1, keepdim=True)
    log_w_R1 = row_log_w_R1.clamp(least, 20)
    is_good_RT = terms.advantage_RT >= 0
    k_RT = torch.where(is_good_RT, args.vespo_k_pos, args.vespo_k_neg)
    l_RT = torch.where(is_good_RT, args.vespo_lambda_pos, args.vespo_lambda_neg).clamp(min=1e-4)
    return (l_RT + k_RT * log_w_R1 - l_RT * log_w_R1.exp()).exp().nan_to_num(0.0, 0.0, 0.0)


# -- what is logged of them ------------------------------------------------------------------------------------------


def clip_ratios(terms: TokenTerms, args: LossSettings) -> dict[str, Tensor]:
    """Return which sampled tokens are clipped, and the share of them in each row."""
    low, high = clip_range(args)
    low_RT = (terms.ratio < low) & (terms.advantage_RT < 0)
    high_RT = (terms.ratio > high) & (terms.advantage_RT > 0)
    return {
        "clip_ratio/low_mean": terms.of_tokens(low_RT),
        "clip_ratio/high_mean": terms.of_tokens(high_RT),
        "clip_ratio/region_mean": terms.of_tokens(low_RT | high_RT),
        "clip_ratio/low_min": terms.of_rows(low_RT),
        "clip_ratio/high_max": terms.of_rows(high_RT),
    }


def cap_ratio(terms: TokenTerms, args: LossSettings) -> dict[str, Tensor]:
    """Return which sampled tokens of a positive advantage are capped."""
    return {"cispo_clip_ratio": terms.of_tokens((terms.ratio > args.epsilon_high) & (terms.advantage_RT > 0))}


def gamma_means(terms: TokenTerms, args: LossSettings) -> dict[str, Tensor]:
    """Return phi(w) of each row."""
    return {"vespo/phi_seq_mean": terms.of_rows(gamma_weights(terms, args))}


@dataclass(frozen=True, slots=True)
class LossType:
    """An objective and the mean that is taken of it.

    Attributes:
        objective: gives what is gained by each token (R, T), before importance weights and the KL.
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
    logps_RT: Tensor,
    entropy_RT: Tensor,
    batch: Mapping[str, Tensor],
    args: LossSettings,
    *,
    entropy_coef: float = 0.0,
    trained_RT: Tensor | None = None,
    others_RTK: Tensor | None = None,
) -> tuple[Tensor, MeasuredLoss]:
    """Return the sum over tokens of weight x loss; over the micro-batches of an update that is its mean.

    Args:
        logps_RT: log pi of each sampled token, with gradient; any numbers elsewhere.
        entropy_RT: entropies of their distributions, with gradient.
        batch: the micro-batch: `loss_mask`, `advantages` and `sampler_logps` (R, T), `token_weights` (R,),
            `ce_mask` (R, T) and `ce_weights` (R,) where tokens are trained by cross-entropy,
            `update_tokens`, and where there are any `old_logps` (those of this pass, if not) and `reference_logps`.
        entropy_coef: coefficient of the mean entropy over the update's tokens.
        trained_RT: tokens whose objective counts; all that were sampled when left out.
        others_RTK: log pi of `teacher_ids`, with gradient, where the batch has them.
    """
    loss_type, terms = LOSS_TYPES[args.loss_type], token_terms(logps_RT, batch, args)
    objective_RT = loss_type.objective(terms, args)
    if not loss_type.multiplies_ratios:
        objective_RT = objective_RT * terms.correction_RT
    if args.off_policy_mask_threshold is not None:
        objective_RT = objective_RT * _near_sampler(terms, args.off_policy_mask_threshold)
    if trained_RT is not None:
        objective_RT = objective_RT * trained_RT
    values = {"entropy": terms.of_tokens(entropy_RT), **loss_type.measure(terms, args), **_mismatch(terms, args)}
    if "reference_logps" in batch:
        reference_RT, estimator = terms.sampled(batch["reference_logps"]), args.kl_estimator or "k3"
        # k3 is multiplied by the ratio of the row where that is the objective's, as in TRL
        ratio = terms.ratio if estimator == "k3" else policy_ratios(terms.logps_RT, terms.old_RT, terms.mask_RT)
        corrected = args.use_bias_correction_kl
        kl_RT = kl_terms(terms.logps_RT, reference_RT, ratio, estimator, corrected=corrected)
        objective_RT = objective_RT - args.beta * kl_RT
        k3_RT = kl_terms(terms.logps_RT, reference_RT, terms.ratio, "k3", corrected=corrected)
        values["kl"] = terms.of_tokens(k3_RT)
    if "teacher_logps" in batch:
        values["teacher_kl"] = terms.of_tokens(terms.sampler_RT - terms.sampled(batch["teacher_logps"]))
    if others_RTK is not None:
        teacher_RTK = batch["teacher_ids_logps"]
        forward_RT = terms.sampled((teacher_RTK.exp() * (teacher_RTK - others_RTK)).sum(-1))
        objective_RT = objective_RT - args.teacher_coef * forward_RT
        values["teacher_forward_kl"] = terms.of_tokens(forward_RT)
    losses_R = -(batch["token_weights"].unsqueeze(1) * terms.sampled(objective_RT)).sum(1)
    if "ce_mask" in batch:
        ce_RT = torch.where(batch["ce_mask"].bool(), -logps_RT, 0.0)
        losses_R = losses_R + batch["ce_weights"] * ce_RT.sum(1)
        is_shown_R = batch["rollout_index"] < 0
        for name, of_kind_R in (("ce/demonstrations", is_shown_R), ("ce/environment", ~is_shown_R)):
            values[name] = ce_RT.detach()[of_kind_R][batch["ce_mask"][of_kind_R].bool()]
    loss = losses_R.sum()
    measured = MeasuredLoss(loss.detach(), values, losses_R.detach().isfinite())
    if entropy_coef:
        loss = loss - entropy_coef * terms.sampled(entropy_RT).sum() / batch["update_tokens"]
    return loss, measured


def token_terms(logps_RT: Tensor, batch: Mapping[str, Tensor], args: LossSettings) -> TokenTerms:
    """Return what the objective is made of; arguments as of `policy_loss`."""
    mask_RT = batch["loss_mask"].bool()
    # tokens that nobody sampled may hold anything; a ratio of zeros cannot overflow
    logps_RT, sampler_RT, advantage_RT = (
        torch.where(mask_RT, values_RT, 0.0) for values_RT in (logps_RT, batch["sampler_logps"], batch["advantages"])
    )
    if not args.use_rewards:
        advantage_RT = torch.zeros_like(advantage_RT)
    if "teacher_logps" in batch and "teacher_ids" not in batch:
        teacher_RT = torch.where(mask_RT, batch["teacher_logps"], 0.0)
        advantage_RT = advantage_RT + args.teacher_coef * (teacher_RT - sampler_RT)
    old_RT = torch.where(mask_RT, batch["old_logps"], 0.0) if "old_logps" in batch else logps_RT.detach()
    ratio = policy_ratios(logps_RT, old_RT, mask_RT, args.importance_sampling_level)
    correction_RT = torch.ones_like(old_RT)
    if args.vllm_importance_sampling_correction:
        correction_RT = importance_weights(old_RT, sampler_RT, mask_RT, args)
    return TokenTerms(logps_RT, old_RT, sampler_RT, ratio, advantage_RT, correction_RT, mask_RT)


def policy_ratios(logps_RT: Tensor, old_RT: Tensor, mask_RT: Tensor, level: str = "token") -> Tensor:
    """Return pi / pi_old of each token (R, T), or at the level "sequence" its geometric mean over each row (R, 1).

    The second is the ratio of GSPO (Zheng et al., "Group sequence policy optimization", arXiv:2507.18071).
    """
    log_ratio_RT = torch.where(mask_RT, logps_RT - old_RT, 0.0)
    if level == "token":
        return log_ratio_RT.exp()
    return (log_ratio_RT.sum(1, keepdim=True) / mask_RT.sum(1, keepdim=True).clamp(min=1)).exp()


def kl_terms(logps_RT: Tensor, reference_RT: Tensor, ratio: Tensor, estimator: str, *, corrected: bool) -> Tensor:
    """Return an estimate (R, T) of KL(pi || pi_ref) at each token, in nats, to be put into the loss.

    With d = log pi - log pi_ref, k1 is d, k2 is d^2 / 2 and k3 is e^-d - 1 + d (Schulman, "Approximating KL
    divergence", 2020). As a term of a loss k2 has the gradient of the KL in expectation, and k1 none. The factor
    pi / pi_old, with gradient for k1 and k3 and without for k2, gives all three that of the KL, off policy too
    (Liu et al., arXiv:2510.01555).

    Args:
        logps_RT: log pi, with gradient.
        reference_RT: log pi_ref.
        ratio: pi / pi_old, with gradient.
        corrected: multiply by that factor.
    """
    difference_RT = logps_RT - reference_RT
    if estimator == "k1":
        kl_RT = difference_RT
    elif estimator == "k2":
        kl_RT, ratio = difference_RT.square() / 2, ratio.detach()
    else:
        kl_RT = (-difference_RT).exp() - 1 + difference_RT
    return kl_RT * ratio if corrected else kl_RT


def importance_weights(old_RT: Tensor, sampler_RT: Tensor, mask_RT: Tensor, args: LossSettings) -> Tensor:
    """Return the weights (R, T) between the sampler's policy mu and the proximal pi_old; 1.0 off the sampled tokens.

    A truncated weight min(pi_old / mu, cap), without gradient, multiplies each token's objective: decoupled PPO
    (Hilton et al., arXiv:2110.00641), with the truncation of Yao et al. ("Your efficient RL framework secretly brings
    you off-policy RL training", 2025). "token_mask" with both bounds is IcePop (Ling team, arXiv:2510.18855).
    Clipping acts on pi / pi_old and is not touched.

    The mode is "token_" or "sequence_" (the product over a row's sampled tokens) and "truncate" (ratios are cut to
    the bounds) or "mask" (ratios outside the bounds become 0).

    Args:
        old_RT, sampler_RT: log pi_old and log mu of each token, in nats.
        mask_RT: 1 on sampled tokens.
        args: mode and bounds, `vllm_importance_sampling_...`; None is no bound.
    """
    mode, low = args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_min
    high = args.vllm_importance_sampling_clip_max
    ratio_RT = _sampler_ratios(old_RT, sampler_RT, mask_RT, mode)
    low, high = 0.0 if low is None else low, float("inf") if high is None else high
    if mode.endswith("truncate"):
        weights_RT = ratio_RT.clamp(low, high)
    else:
        weights_RT = torch.where((ratio_RT >= low) & (ratio_RT <= high), ratio_RT, 0.0)
    return torch.where(mask_RT.bool(), weights_RT, 1.0)


def _sampler_ratios(old_RT: Tensor, sampler_RT: Tensor, mask_RT: Tensor, mode: str) -> Tensor:
    """Return pi_old / mu (R, T) as a mode sees it: of each token, or in "sequence_" modes of each row."""
    log_ratio_RT = torch.where(mask_RT.bool(), old_RT - sampler_RT, 0.0)
    if mode.startswith("sequence"):
        return log_ratio_RT.sum(1, keepdim=True).exp().expand_as(log_ratio_RT)
    return log_ratio_RT.exp()


def measure_mismatch(
    old_RT: Tensor, sampler_RT: Tensor, mask_RT: Tensor, weights_RT: Tensor | None, args: LossSettings
) -> dict[str, Tensor]:
    """Return how far the sampler and the proximal policy are apart at each sampled token, by the name of the metric.

    `mismatch_kl` is r - 1 - log r with r = pi_old / mu: an unbiased, never negative estimate of KL(mu || pi_old) in
    nats (Schulman, "Approximating KL divergence", 2020). The ratios are those that the mode sees.

    Args:
        weights_RT: what `importance_weights` made of the ratios; None without importance sampling.
    """
    sampled_RT = mask_RT.bool()
    old_RT, sampler_RT = old_RT.double(), sampler_RT.double()
    log_ratio = (old_RT - sampler_RT)[sampled_RT]
    ratio = _sampler_ratios(old_RT, sampler_RT, mask_RT, args.vllm_importance_sampling_mode)[sampled_RT]
    weight = ratio if weights_RT is None else weights_RT[sampled_RT].double()
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
        return measure_mismatch(terms.old_RT, terms.sampler_RT, terms.mask_RT, terms.correction_RT, args)
    # of tokens that may be stale the old log-probs are the sampler's own
    old_RT = terms.logps_RT.detach() if args.may_be_stale else terms.old_RT
    return measure_mismatch(old_RT, terms.sampler_RT, terms.mask_RT, None, args)


def _near_sampler(terms: TokenTerms, threshold: float) -> Tensor:
    """Return False on rows of a negative advantage that are far off policy (DeepSeek-V3.2, arXiv:2512.02556)."""
    counts_R1 = terms.mask_RT.sum(1, keepdim=True).clamp(min=1)
    kl_R1 = (terms.sampler_RT - terms.logps_RT.detach()).sum(1, keepdim=True) / counts_R1
    return (terms.advantage_RT >= 0) | (kl_R1 <= threshold)
