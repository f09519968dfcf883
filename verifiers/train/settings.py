"""What a run's settings mean together with its environment and its plan."""

from __future__ import annotations

from typing import Any

from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig

__all__ = ["refuse_mid_block_saves", "training_sampling_args"]


def refuse_mid_block_saves(args: GRPOConfig, updates_per_block: int) -> None:
    for name, strategy, every in (
        ("save_steps", args.save_strategy, args.save_steps),
        ("eval_steps", args.eval_strategy, args.eval_steps),
    ):
        if strategy == "steps" and every and every >= 1 and every % updates_per_block:
            lower = max(1, int(every) // updates_per_block) * updates_per_block
            raise ConfigError(
                f"{name} is {every:g}, but a block serves {updates_per_block} optimizer steps, and it happens "
                f"between blocks; give {lower} or {lower + updates_per_block}."
            )


def training_sampling_args(env: Any, args: GRPOConfig) -> dict[str, Any]:
    """OpenAI sampling arguments of training rollouts: the environment's, then the trainer's.

    Raises:
        ConfigError: the environment fixes a temperature that the trainer does not share.
    """
    given = dict(getattr(env, "sampling_args", None) or {})
    temperature = given.get("temperature")
    if temperature is not None and temperature != args.temperature:
        raise ConfigError(
            f"the environment samples at temperature {temperature:g}, the trainer scores at {args.temperature:g}: "
            "the ratio between them would be wrong; set both to the same."
        )
    extra = dict(given.pop("extra_body", None) or {})
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
