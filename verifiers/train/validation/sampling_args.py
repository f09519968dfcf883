"""Sampling arguments of training rollouts: the environment's and the trainer's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.inference.wire import NEUTRAL, unless_neutral

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

__all__ = [
    "refuse_biased_sampling",
    "training_sampling_args",
    "with_template_options",
]


def training_sampling_args(env: Any, args: GRPOConfig) -> dict[str, Any]:
    """Return the OpenAI sampling arguments of training rollouts: the environment's, then the trainer's.

    Raises:
        ConfigError: the environment fixes a temperature that the trainer does not share, or cuts or shifts the
            sampler's distribution, which importance sampling would treat as another policy.
    """
    for member in getattr(env, "envs", None) or ():
        # a group's environments add what they were given to each call
        training_sampling_args(member, args)
    given = dict(getattr(env, "sampling_args", None) or {})
    temperature = given.get("temperature")
    if temperature is not None and temperature != args.temperature:
        raise ConfigError(
            f"the environment samples at temperature {temperature:g}, the trainer scores at {args.temperature:g}: "
            "the ratio between them would be wrong; set both to the same."
        )
    extra = dict(given.pop("extra_body", None) or {})
    refuse_biased_sampling(args, {**given, **extra})
    if args.top_k and args.top_k > 0:
        extra["top_k"] = args.top_k
    if args.min_p:
        extra["min_p"] = args.min_p
    if args.repetition_penalty != 1.0:
        extra["repetition_penalty"] = args.repetition_penalty
    if args.chat_template_kwargs:
        extra["chat_template_kwargs"] = with_template_options(extra, args)
    given.update(temperature=args.temperature, max_tokens=args.max_completion_length)
    if args.top_p < 1.0:
        given["top_p"] = args.top_p
    if extra:
        given["extra_body"] = extra
    return given


def with_template_options(extra: Mapping[str, Any], args: GRPOConfig) -> dict[str, Any]:
    """Return the options of chat templates: the environment's, then the trainer's."""
    # a string was read as JSON when the config was made
    options: Any = args.chat_template_kwargs or {}
    return {**(extra.get("chat_template_kwargs") or {}), **options}


def refuse_biased_sampling(args: GRPOConfig, given: Mapping[str, Any] | None = None) -> None:
    """Refuse what makes the sampler's log-probs those of another distribution, wherever they are used.

    Args:
        given: sampling arguments of an environment; those of the trainer when left out.

    Raises:
        ConfigError: with what to leave out or to set.
    """
    if not args.vllm_importance_sampling_correction and not args.may_be_stale and not args.kl_in_reward:
        return
    whose = "the environment"
    if given is None:
        whose = "the trainer"
        given = {name: getattr(args, name) for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
    for name in NEUTRAL:
        if (value := unless_neutral(name, given)) is None:
            continue
        if args.kl_in_reward:
            raise ConfigError(
                f"{whose} samples with {name}={value!r}, under which kl_in_reward is the KL of another distribution "
                f"than the policy's; leave {name} out, or set kl_in_reward=False."
            )
        if args.vllm_importance_sampling_correction:
            raise ConfigError(
                f"{whose} samples with {name}={value!r}, under which importance weights are biased, for the "
                f"sampler's log-probs are those of another distribution; leave {name} out, or set "
                "vllm_importance_sampling_correction=False."
            )
        raise ConfigError(
            f"{whose} samples with {name}={value!r} with num_batches_ahead={args.num_batches_ahead} and without "
            "vllm_importance_sampling_correction: the ratio to the sampler's log-probs is then all that tells stale "
            f"tokens from fresh ones, and they are those of another distribution; leave {name} out, or set "
            "num_batches_ahead=0."
        )
