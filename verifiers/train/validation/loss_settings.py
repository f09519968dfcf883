"""Checks of what is optimized: the loss, its advantages, the KL term, and the correction for the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

__all__ = ["IMPORTANCE_SAMPLING_MODES", "LOSS_TYPES", "refuse_bad_loss"]

LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "dapo", "cispo", "vespo", "luspo")
"""Every loss type of trl 1.16."""

IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def refuse_bad_loss(args: GRPOConfig) -> None:
    """Refuse settings of the loss that are wrong by themselves or contradict each other.

    Raises:
        ConfigError: with the setting and what to set instead.
    """
    if args.loss_type not in LOSS_TYPES:
        raise ConfigError(f"loss_type is {args.loss_type!r}; choose one of {', '.join(LOSS_TYPES)}.")
    if args.loss_type == "cispo" and (args.epsilon_high is None or args.epsilon_high <= 1.0):
        raise ConfigError(
            f"loss_type='cispo' cuts the ratio itself to at most epsilon_high, which is {args.epsilon_high}"
            f"{f' (epsilon={args.epsilon:g} is taken)' if args.epsilon_high is None else ''}: on policy, where the "
            "ratio is 1, that would scale every gradient down; set epsilon_high above 1, such as 5.0."
        )
    if args.max_completion_length is None and args.loss_type == "dr_grpo":
        raise ConfigError(
            "loss_type='dr_grpo' divides by max_completion_length, which is None; give it a number of tokens, or "
            "use 'dapo'."
        )
    if args.vllm_importance_sampling_mode not in IMPORTANCE_SAMPLING_MODES:
        raise ConfigError(
            f"vllm_importance_sampling_mode is {args.vllm_importance_sampling_mode!r}; choose one of "
            f"{', '.join(IMPORTANCE_SAMPLING_MODES)}."
        )
    if args.loss_type == "vespo" and args.vllm_importance_sampling_mode.startswith("sequence"):
        raise ConfigError(
            f"loss_type='vespo' multiplies the tokens' ratios itself, so vllm_importance_sampling_mode="
            f"{args.vllm_importance_sampling_mode!r} counts a row's ratio once a token; use 'token_truncate'."
        )
    _refuse_bad_passes(args)


def _refuse_bad_passes(args: GRPOConfig) -> None:
    if args.top_entropy_quantile < 1.0 and (args.entropy_coef != 0.0 or args.use_adaptive_entropy):
        raise ConfigError(
            f"top_entropy_quantile={args.top_entropy_quantile:g} makes an entropy bonus a mean over some tokens "
            "of each micro-batch, which weighs micro-batches and not tokens; set entropy_coef=0.0, or leave it "
            "at 1.0."
        )
    if args.max_tokens_per_micro_batch is None:
        return
    if args.max_tokens_per_micro_batch < 1:
        raise ConfigError(
            f"max_tokens_per_micro_batch is {args.max_tokens_per_micro_batch}; give 1 or more, or None."
        )
    if args.top_entropy_quantile < 1.0:
        raise ConfigError(
            f"top_entropy_quantile={args.top_entropy_quantile:g} is a quantile over the tokens of a micro-batch, so "
            "max_tokens_per_micro_batch would change what is trained; leave one of them out."
        )
