"""Checks of a run's settings by themselves and with its plan."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from verifiers.data.batch_plan import BatchPlan
from verifiers.errors import ConfigError
from verifiers.train.loss.loss_types import LOSS_TYPES
from verifiers.train.validation.loss_settings import refuse_bad_loss
from verifiers.train.weight_sync import WEIGHT_SYNCS

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

__all__ = ["UNSUPPORTED", "refuse_bad_settings", "refuse_mid_block_saves", "refuse_unsupported_fields"]

UNSUPPORTED: dict[str, str] = {
    "generation_kwargs": (
        "give them to the environment, as its sampling_args (what OpenAI's API has no name for goes into "
        "sampling_args['extra_body'])"
    ),
    "vllm_structured_outputs_regex": (
        "give the environment sampling_args={'extra_body': {'structured_outputs': {'regex': ...}}}, and set "
        "vllm_importance_sampling_correction=False"
    ),
    "reward_weights": "give the weights to the environment's rubric, Rubric(funcs=[...], weights=[...])",
    "multi_objective_aggregation": (
        "the rubric adds up the weighted rewards, and the sum is normalised; write a rubric that combines them in "
        "another way"
    ),
    "max_tool_calling_iterations": "give max_turns to the environment",
    "pad_to_multiple_of": "rows are padded to the longest of a micro-batch; bound that by max_tokens_per_micro_batch",
    "use_liger_kernel": (
        "its loss weighs no rows and corrects for no sampler; bound memory by max_tokens_per_micro_batch"
    ),
    "label_smoothing_factor": "there are no labels in this loss; an entropy bonus is entropy_coef",
    "train_sampling_strategy": (
        "shuffle_dataset=False keeps the order of the dataset, and a curriculum chooses among its rows"
    ),
    "ignore_data_skip": "a run that is resumed always resumes with the next block of its plan",
    "enable_jit_checkpoint": "a checkpoint stands between blocks; save often enough by save_steps and resume",
    "vllm_server_timeout": "use server_wait, the seconds to wait for the rollout server",
    "use_transformers_continuous_batching": "rollouts come from a server; start vf-serve or vf-vllm",
    "transformers_continuous_batching_config": "rollouts come from a server; give options to vf-serve or vf-vllm",
    "use_transformers_paged": "rollouts come from a server; start vf-serve or vf-vllm",
    "auto_find_batch_size": "sizes are those of the batch plan; bound memory by max_tokens_per_micro_batch",
}
"""Fields of TRL's config that would change what is trained or how a run goes, with what to use instead."""


def refuse_unsupported_fields(args: GRPOConfig) -> None:
    """Refuse a field of TRL's that nothing here reads, unless it is at TRL's default or empty.

    Raises:
        ConfigError: with what to use instead.
    """
    import trl

    defaults = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    for name, instead in UNSUPPORTED.items():
        value = getattr(args, name)
        if value not in (defaults[name], None, {}, []):
            raise ConfigError(f"{name}={value!r} of TRL has no effect in this trainer: {instead}.")


def refuse_bad_settings(args: GRPOConfig) -> None:
    """Refuse settings that are wrong by themselves or contradict each other.

    Raises:
        ConfigError: with the setting and what to set instead.
    """
    if args.temperature == 0:
        raise ConfigError(
            f"temperature is 0 with num_generations={args.num_generations}: the rollouts of a group would be the "
            "same and no advantage could differ from 0; give a temperature above 0, such as 1.0."
        )
    if args.max_steps < -1 or args.max_steps == 0:
        raise ConfigError(f"max_steps is {args.max_steps}; give 1 or more, or -1 for num_train_epochs.")
    if args.num_generations is not None and args.num_generations < 2:
        raise ConfigError(
            f"num_generations is {args.num_generations}, but a group's advantage compares its rollouts with each "
            "other; give at least 2."
        )
    if args.disable_dropout is False:
        raise ConfigError(
            "disable_dropout is False: the sampler and the old log-probs have no dropout, so the trained pass would "
            "be another policy's; leave it out, and regularize by beta or weight_decay."
        )
    if args.mask_env_responses is False:
        raise ConfigError(
            "mask_env_responses is False: tokens of the environment never carry loss, as the policy did not sample "
            "them; leave it out."
        )
    refuse_bad_loss(args)
    if args.num_batches_ahead is not None and args.num_batches_ahead < 0:
        raise ConfigError(f"num_batches_ahead is {args.num_batches_ahead}; give 0 (on policy) or more.")
    _refuse_bad_asynchrony(args)
    if args.weight_sync not in WEIGHT_SYNCS:
        raise ConfigError(f"weight_sync is {args.weight_sync!r}; choose one of {', '.join(WEIGHT_SYNCS)}.")


def _refuse_bad_asynchrony(args: GRPOConfig) -> None:
    for name in ("max_staleness", "rollout_retries", "dynamic_sampling_max_groups"):
        value = getattr(args, name)
        if value is not None and value < 0:
            raise ConfigError(f"{name} is {value}; give 0 or more.")
    if args.drop_stragglers_after is not None and args.drop_stragglers_after <= 0:
        raise ConfigError(
            f"drop_stragglers_after is {args.drop_stragglers_after:g}; give seconds above 0, or None to wait."
        )

    if args.streaming:
        _refuse_unstreamable(args)


def _refuse_unstreamable(args: GRPOConfig) -> None:
    """Refuse what needs the whole block, or the whole update, before its first micro-batch."""
    if args.advantage_estimator.startswith("reinforce") or args.kl_in_reward:
        name, value = (
            ("kl_in_reward", True) if args.kl_in_reward else ("advantage_estimator", args.advantage_estimator)
        )
        raise ConfigError(
            f"{name}={value!r} needs the rollouts of the whole block before its first micro-batch is trained; set "
            "streaming=False."
        )
    if args.scale_rewards == "batch":
        raise ConfigError(
            "scale_rewards='batch' needs the rewards of the whole block before its first micro-batch is trained; "
            "use 'group' or 'none', or streaming=False."
        )
    if LOSS_TYPES[args.loss_type].depends_on_micro_steps:
        raise ConfigError(
            f"loss_type={args.loss_type!r} divides by each micro-step's own tokens, which streaming cannot weigh; "
            "use 'dapo', or streaming=False."
        )
    if args.top_entropy_quantile < 1.0:
        raise ConfigError(
            f"top_entropy_quantile={args.top_entropy_quantile:g} is a quantile over the tokens of a micro-batch, "
            "which streaming fills with whole groups and not by chance; set it to 1.0, or streaming=False."
        )
    if args.entropy_coef != 0.0 or args.use_adaptive_entropy:
        raise ConfigError(
            "an entropy bonus is a mean over the tokens of the whole update, whose number streaming does not know in "
            "time; set entropy_coef=0.0, or streaming=False."
        )


def refuse_mid_block_saves(args: GRPOConfig, plan: BatchPlan) -> None:
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
            every = math.ceil(plan.max_steps * every)
        updates_per_block = plan.updates_per_block
        if every % updates_per_block:
            lower = max(1, int(every) // updates_per_block) * updates_per_block
            raise ConfigError(
                f"{name} is {every:g}, but a block serves {updates_per_block} optimizer steps, and it happens "
                f"between blocks; give {lower} or {lower + updates_per_block}."
            )
