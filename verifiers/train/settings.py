"""What a run's settings mean together with its environment and its plan."""

from __future__ import annotations

import math
from typing import Any

from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig

__all__ = ["refuse_mid_block_saves", "training_sampling_args"]


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "logit_bias": ({},),
}
"""Sampling arguments that change the sampler's distribution, with the values under which they do not."""


def refuse_mid_block_saves(args: GRPOConfig, updates_per_block: int) -> None:
    """Refuse to save or evaluate every so many steps where that is inside a block.

    Raises:
        ConfigError: with the nearest numbers that are not.
    """
    for name, strategy, every in (
        ("save_steps", args.save_strategy, args.save_steps),
        ("eval_steps", args.eval_strategy, args.eval_steps),
    ):
        if strategy != "steps" or not every:
            continue
        if every < 1:
            # a share of the run, which transformers rounds up in the same way
            every = math.ceil(args.max_steps * every)
        if every % updates_per_block:
            lower = max(1, int(every) // updates_per_block) * updates_per_block
            raise ConfigError(
                f"{name} is {every:g}, but a block serves {updates_per_block} optimizer steps, and it happens "
                f"between blocks; give {lower} or {lower + updates_per_block}."
            )


def training_sampling_args(env: Any, args: GRPOConfig) -> dict[str, Any]:
    """OpenAI sampling arguments of training rollouts: the environment's, then the trainer's.

    Raises:
        ConfigError: the environment fixes a temperature that the trainer does not share, or cuts or shifts the
            sampler's distribution, which the importance correction would take for another policy.
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
    if args.importance_correction or args.may_be_stale:
        _refuse_biased_sampling({**given, **extra})
    if args.top_k and args.top_k > 0:
        extra["top_k"] = args.top_k
    if args.min_p:
        extra["min_p"] = args.min_p
    if args.repetition_penalty != 1.0:
        extra["repetition_penalty"] = args.repetition_penalty
    given.update(temperature=args.temperature, max_tokens=args.max_completion_length)
    if args.top_p < 1.0:
        given["top_p"] = args.top_p
    if extra:
        given["extra_body"] = extra
    return given


def _refuse_biased_sampling(given: dict[str, Any]) -> None:
    for name, neutral in NEUTRAL.items():
        value = given.get(name)
        if value is not None and value not in neutral:
            raise ConfigError(
                f"the environment samples with {name}={value!r}, under which importance_correction is biased, for "
                f"the sampler's log-probs are those of another distribution; leave {name} out, or set "
                "importance_correction=False."
            )
