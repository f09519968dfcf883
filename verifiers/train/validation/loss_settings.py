"""Checks of what is optimized: the loss, its advantages, the KL term, and importance sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verifiers.errors import ConfigError
from verifiers.train.loss.loss_types import LOSS_TYPES

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

__all__ = ["ADVANTAGE_ESTIMATORS", "IMPORTANCE_SAMPLING_MODES", "refuse_bad_loss"]


IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

IMPORTANCE_SAMPLING_SETTINGS = (
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_cap",
)
"""Settings without an effect where importance sampling is off."""

RATIO_LEVELS = ("token", "sequence")

ADVANTAGE_ESTIMATORS = ("group", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")

KL_ESTIMATORS = (None, "k1", "k2", "k3")


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
    _refuse_bad_ratios(args)
    _refuse_bad_importance_sampling(args)
    _refuse_bad_kl(args)
    _refuse_bad_advantages(args)
    _refuse_bad_micro_batches(args)


def _refuse_bad_ratios(args: GRPOConfig) -> None:
    level = args.importance_sampling_level
    if level not in RATIO_LEVELS:
        raise ConfigError(f"importance_sampling_level is {level!r}; choose one of {', '.join(RATIO_LEVELS)}.")
    loss_type = LOSS_TYPES[args.loss_type]
    if loss_type.multiplies_ratios and level != "token":
        raise ConfigError(
            f"loss_type={args.loss_type!r} weighs by the ratio of the whole row at every level, so "
            f"importance_sampling_level={level!r} would change its metrics alone; leave it out."
        )
    if args.delta is not None and not loss_type.is_clipped:
        raise ConfigError(
            f"delta={args.delta:g} bounds the clipped objective, which loss_type={args.loss_type!r} does not have; "
            "leave it out."
        )


def _refuse_bad_importance_sampling(args: GRPOConfig) -> None:
    if args.vllm_importance_sampling_mode not in IMPORTANCE_SAMPLING_MODES:
        raise ConfigError(
            f"vllm_importance_sampling_mode is {args.vllm_importance_sampling_mode!r}; choose one of "
            f"{', '.join(IMPORTANCE_SAMPLING_MODES)}."
        )
    is_of_rows = args.vllm_importance_sampling_mode.startswith("sequence")
    if LOSS_TYPES[args.loss_type].multiplies_ratios and is_of_rows:
        raise ConfigError(
            f"loss_type={args.loss_type!r} multiplies the tokens' ratios itself, so vllm_importance_sampling_mode="
            f"{args.vllm_importance_sampling_mode!r} counts a row's ratio once a token; use 'token_truncate'."
        )
    given = [name for name in IMPORTANCE_SAMPLING_SETTINGS if getattr(args, name) != getattr(type(args), name)]
    if given and not args.vllm_importance_sampling_correction:
        raise ConfigError(
            f"{', '.join(f'{name}={getattr(args, name)!r}' for name in given)} would change the importance "
            "weights, which are off; set vllm_importance_sampling_correction=True, or leave that out."
        )
    # TRL copies the deprecated cap to clip_max later
    low, cap = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_cap
    high = args.vllm_importance_sampling_clip_max if cap is None else cap
    if (low is not None and not 0 <= low <= 1) or (high is not None and not high >= 1):
        raise ConfigError(
            f"vllm_importance_sampling_clip_min={low} and vllm_importance_sampling_clip_max={high} leave out a ratio "
            "of 1, which is that of every token on policy; give a minimum of 0 to 1, and a maximum of 1 or more."
        )


def _refuse_bad_kl(args: GRPOConfig) -> None:
    estimator = args.kl_estimator
    if estimator not in KL_ESTIMATORS:
        raise ConfigError(f"kl_estimator is {estimator!r}; choose one of k1, k2, k3.")
    if args.beta == 0.0 and (estimator is not None or args.kl_in_reward):
        name, value = ("kl_in_reward", True) if args.kl_in_reward else ("kl_estimator", estimator)
        raise ConfigError(f"{name}={value!r} has no effect with beta=0; set beta, such as 0.001, or leave it out.")
    if args.kl_in_reward and estimator not in (None, "k1"):
        raise ConfigError(
            f"kl_estimator={estimator!r} with kl_in_reward=True: in the reward k1 alone has the gradient of the KL; "
            "leave kl_estimator out, or set kl_in_reward=False."
        )
    if args.kl_in_reward and args.advantage_estimator == "group" and args.scale_rewards not in ("none", False):
        raise ConfigError(
            f"kl_in_reward=True with advantage_estimator='group' and scale_rewards={args.scale_rewards!r}: where "
            "rewards are equal, the division by their deviation scales the KL up to advantages of size 1; set "
            "scale_rewards='none', or advantage_estimator='rloo'."
        )
    if args.kl_in_reward and args.dynamic_sampling:
        raise ConfigError(
            "dynamic_sampling replaces groups whose rewards are all equal, which kl_in_reward=True trains by their "
            "KL; set one of them to False."
        )
    if estimator == "k1" and not args.kl_in_reward and not args.use_bias_correction_kl:
        raise ConfigError(
            "kl_estimator='k1' with use_bias_correction_kl=False is a term whose gradient is 0 in expectation; set "
            "use_bias_correction_kl=True, kl_estimator='k2', or kl_in_reward=True."
        )


def _refuse_bad_advantages(args: GRPOConfig) -> None:
    estimator = args.advantage_estimator
    if estimator not in ADVANTAGE_ESTIMATORS:
        raise ConfigError(f"advantage_estimator is {estimator!r}; choose one of {', '.join(ADVANTAGE_ESTIMATORS)}.")
    if estimator != "group" and args.scale_rewards not in ("group", True):
        raise ConfigError(
            f"scale_rewards={args.scale_rewards!r} has no effect with advantage_estimator={estimator!r}, which has a "
            "scale of its own; leave one of them out."
        )
    if estimator == "reinforce_plus_plus" and args.dynamic_sampling:
        raise ConfigError(
            "dynamic_sampling replaces groups whose rewards are all equal, which advantage_estimator="
            "'reinforce_plus_plus' learns from, as it compares with the whole block; set dynamic_sampling=False, or "
            "'reinforce_plus_plus_baseline', where such a group has one advantage for all, 0 if lengths are equal."
        )


def _refuse_bad_micro_batches(args: GRPOConfig) -> None:
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
