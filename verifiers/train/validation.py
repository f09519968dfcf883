"""Checks of a run's settings: by themselves, with its environment and plan, with its processes, and with its host."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.train.weight_sync.choice import WEIGHT_SYNCS

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig
    from verifiers.train.evaluation.eval_sets import EvalSet

__all__ = [
    "IMPORTANCE_SAMPLING_MODES",
    "LOSS_TYPES",
    "UNSUPPORTED",
    "adjust_ddp_timeout",
    "adjust_evaluation",
    "check_eval_sets",
    "check_output_dir",
    "check_processes",
    "check_report_to",
    "check_start",
    "needs_the_metric",
    "refuse_bad_settings",
    "refuse_mid_block_saves",
    "refuse_short_ddp_timeout",
    "refuse_unsupported_fields",
]

LOSS_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "dapo", "cispo", "vespo", "luspo")

IMPORTANCE_SAMPLING_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

UNSUPPORTED: dict[str, str] = {
    "generation_kwargs": (
        "give them to the environment, as its sampling_args (what OpenAI's API has no name for goes into "
        "sampling_args['extra_body'])"
    ),
    "vllm_structured_outputs_regex": (
        "give the environment sampling_args={'extra_body': {'structured_outputs': {'regex': ...}}}, and set "
        "importance_correction=False"
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
    if args.num_batches_ahead < 0:
        raise ConfigError(f"num_batches_ahead is {args.num_batches_ahead}; give 0 (on policy) or more.")
    _refuse_bad_asynchrony(args)
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
    if args.weight_sync not in WEIGHT_SYNCS:
        raise ConfigError(f"weight_sync is {args.weight_sync!r}; choose one of {', '.join(WEIGHT_SYNCS)}.")
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
    if args.scale_rewards == "batch":
        raise ConfigError(
            "scale_rewards='batch' needs the rewards of the whole block before its first micro-batch is trained; "
            "use 'group' or 'none', or streaming=False."
        )
    if args.loss_type == "bnpo":
        raise ConfigError(
            "loss_type='bnpo' divides by each micro-batch's own tokens, which streaming cannot weigh; use "
            "'dapo', or streaming=False."
        )
    if args.top_entropy_quantile < 1.0:
        raise ConfigError(
            f"top_entropy_quantile={args.top_entropy_quantile:g} is a quantile over the tokens of a micro-batch, "
            "which streaming fills with whole groups and not by chance; set it to 1.0, or streaming=False."
        )
    if args.entropy_coef != 0.0 or args.use_adaptive_entropy:
        raise ConfigError(
            "an entropy bonus is a mean over each micro-batch, which streaming would rescale with the loss; set "
            "entropy_coef=0.0, or streaming=False."
        )


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


# -- evaluations ---------------------------------------------------------------------------------------------------

_SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")
_MEASURES = ("reward", "reward_stderr", "prompts", "failed", "seconds", "wait_seconds")
_FAMILIES = ("rewards/", "tasks/", "outcomes/", "completions/", "pass_at_", "pass_hat_", "best_at_")


def needs_the_metric(args: GRPOConfig) -> bool:
    """Return whether training cannot continue before an evaluation ends, as its result sets the learning rate."""
    return _name(args.lr_scheduler_type) in _SCHEDULES_BY_METRIC


def adjust_evaluation(args: GRPOConfig) -> None:
    """Check a run's settings of evaluation; the reward becomes the metric for the best model where none is named.

    Raises:
        ConfigError: settings that contradict each other.
    """
    generations = args.num_generations_eval or 1
    if generations > 1 and args.eval_temperature == 0:
        raise ConfigError(
            f"num_generations_eval is {generations} with eval_temperature=0: greedy answers of a prompt are all the "
            "same; give a temperature above 0, or num_generations_eval=1."
        )
    for name in ("eval_max_concurrent", "eval_timeout"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value:g}; give a number above 0, or leave it out.")
    best = args.load_best_model_at_end or _name(args.save_strategy) == "best"
    if args.metric_for_best_model is None and (best or needs_the_metric(args)):
        args.metric_for_best_model = "eval_reward"
    if not args.eval_overlap:
        return
    if _name(args.save_strategy) == "best":
        raise ConfigError(
            "save_strategy='best' with eval_overlap=True: whether to save is known only when the weights have moved "
            "on; use save_strategy='steps' (the best checkpoint is always kept), or eval_overlap=False."
        )
    if needs_the_metric(args):
        raise ConfigError(
            f"lr_scheduler_type={_name(args.lr_scheduler_type)!r} with eval_overlap=True: the learning rate of the "
            "next step is made of the evaluation; set eval_overlap=False."
        )


def check_eval_sets(args: GRPOConfig, sets: Sequence[EvalSet]) -> None:
    """Check that there is something to evaluate on, and that evaluations have the metric for the best model.

    Raises:
        ConfigError: no eval set, or a metric that no evaluation of these sets has.
    """
    if _name(args.eval_strategy) == "no":
        return
    for eval_set in sets:
        if eval_set.rows is None and getattr(eval_set.env, "eval_dataset", None) is None:
            raise ConfigError(
                f"eval_strategy is {_name(args.eval_strategy)!r}, but {eval_set.env_name} has no eval set; give "
                "it an eval_dataset, give the trainer eval_dataset or eval_env, or set eval_strategy='no'."
            )
    metric = args.metric_for_best_model
    if metric is None:
        return
    full = metric if metric.startswith("eval_") else f"eval_{metric}"
    prefixes = [eval_set.metric_prefix("eval") + "_" for eval_set in sets]
    if full == "eval_wait_seconds" or any(_is_measure(full, prefix) for prefix in prefixes):
        return
    known = [prefix + measure for prefix in prefixes for measure in _MEASURES]
    nearest = difflib.get_close_matches(full, known, n=1, cutoff=0.4) or known[:1]
    raise ConfigError(
        f"metric_for_best_model is {metric!r}, which no evaluation here has; did you mean {nearest[0]!r}? "
        f"There are also {prefixes[0]}rewards/<function> and what docs/reference/metrics.md lists."
    )


def _is_measure(metric: str, prefix: str) -> bool:
    rest = metric.removeprefix(prefix)
    return rest != metric and (rest in _MEASURES or rest.startswith(_FAMILIES))


def _name(value: object) -> str:
    return str(getattr(value, "value", value))


# -- several processes ---------------------------------------------------------------------------------------------

_DEFAULT_DDP_TIMEOUT_S = 1800
# writing weights and environments' own code have no deadline and take seconds
_MARGIN_S = 300
# the longest timeout that torch can represent
_LONGEST_S = 30 * 86400.0


def adjust_ddp_timeout(args: GRPOConfig) -> None:
    """Raise `ddp_timeout`, where it is transformers' default, to what the other ranks may wait for rank 0."""
    needed_s = max(sum(seconds for _, seconds in waits) for waits in _waits_of_rank_0(args))
    if args.ddp_timeout == _DEFAULT_DDP_TIMEOUT_S and needed_s < _LONGEST_S:
        args.ddp_timeout = max(_DEFAULT_DDP_TIMEOUT_S, math.ceil(needed_s) + _MARGIN_S)


def refuse_short_ddp_timeout(args: GRPOConfig, processes: int) -> None:
    """Refuse deadlines of rank 0 that end after the other ranks' wait for it, which would hide what was wrong.

    Raises:
        ConfigError: with what to set instead.
    """
    if processes == 1:
        return
    for waits in _waits_of_rank_0(args):
        needed_s = sum(seconds for _, seconds in waits)
        if needed_s >= args.ddp_timeout:
            listed = " + ".join(f"{name}={seconds:g}" for name, seconds in waits)
            raise ConfigError(
                f"ddp_timeout={args.ddp_timeout:g}, but rank 0 may wait {needed_s:g} s ({listed}) while the other "
                f"processes wait for it; set ddp_timeout above {needed_s:g}, leave it out, or lower the others."
            )


def _waits_of_rank_0(args: GRPOConfig) -> list[list[tuple[str, float]]]:
    """Return the deadlines of rank 0's waits while the other ranks wait in one collective: settings and seconds.

    A block is the longest: the server, rollouts that end before the push, an evaluation that ends before it, the
    update of another server, servers that are away, the push, its probe, and the block itself.
    """
    block = ["server_wait"]
    if args.drain_before_sync or (args.drain_before_sync is None and args.weight_sync == "lora"):
        block.append("async_generation_timeout")
    evaluation = "async_generation_timeout" if args.eval_timeout is None else "eval_timeout"
    evaluates = getattr(args.eval_strategy, "value", args.eval_strategy) != "no"
    if evaluates and args.eval_overlap:
        block.append(evaluation)
    probe = max(
        ("async_generation_timeout", "rollout_timeout", "weight_sync_timeout"), key=lambda name: getattr(args, name)
    )
    block += [
        "weight_sync_timeout",
        "server_restart_timeout",
        "weight_sync_timeout",
        probe,
        "async_generation_timeout",
    ]
    found = [block, [evaluation]] if evaluates else [block]
    return [[(name, float(getattr(args, name))) for name in names] for names in found]


def check_processes(accelerator: Any, args: GRPOConfig) -> None:
    """Refuse deadlines and sharding under which the processes of a run cannot work together.

    Raises:
        ConfigError: with what to set instead.
    """
    from accelerate.utils import DistributedType

    refuse_short_ddp_timeout(args, accelerator.num_processes)
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError(
            "FSDP's first version is on its way out of transformers and is not supported; set fsdp_version: 2 in the "
            "file that accelerate launch reads (examples/accelerate/fsdp.yaml)."
        )
    plugin = accelerator.state.deepspeed_plugin if kind == DistributedType.DEEPSPEED else None
    splits_parameters = kind == DistributedType.FSDP or (plugin is not None and plugin.zero_stage == 3)
    if args.rollout_device is not None and splits_parameters:
        raise ConfigError(
            f"rollout_device={args.rollout_device!r} copies weights inside of one process, and here each holds "
            "a part of them; leave it out and start a rollout server (vf-vllm, vf-serve)."
        )


# -- the host ------------------------------------------------------------------------------------------------------

# transformers cannot tell whether these are installed
_UNKNOWN_TO_TRANSFORMERS = ("azure_ml", "flyte")


def check_start(config: GRPOConfig) -> None:
    """Refuse settings that would end a run after its server was started; leaves nothing behind.

    Raises:
        ConfigError: with the setting that is to be mended.
    """
    check_output_dir(str(config.output_dir))
    check_report_to(config.report_to)
    refuse_short_ddp_timeout(config, config.world_size)


def check_output_dir(output_dir: str) -> None:
    """Refuse a directory that cannot be made or written to."""
    there = Path(output_dir).absolute()
    while not os.path.lexists(there):
        there = there.parent
    try:
        # permissions do not tell: file systems may be full, read-only, or no place for files
        os.rmdir(tempfile.mkdtemp(prefix=".verifiers-", dir=there))
    except OSError as error:
        raise ConfigError(
            f"output_dir {output_dir!r} cannot be written to: {error.strerror or error} in {str(there)!r}; give a "
            "directory that can."
        ) from error


def check_report_to(names: list[str]) -> None:
    """Refuse logging integrations that transformers does not know, and those whose package is missing."""
    if not names:
        return
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            nearest = difflib.get_close_matches(str(name), INTEGRATION_TO_CALLBACK, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"it takes {', '.join(INTEGRATION_TO_CALLBACK)}."
            raise ConfigError(f"report_to has {name!r}, which transformers cannot report to; {hint}")
    missing = sorted({*names} - {*get_available_reporting_integrations(), *_UNKNOWN_TO_TRANSFORMERS})
    if missing:
        packages = " ".join(name.replace("_", "-") for name in missing)
        raise ConfigError(
            f"report_to has {', '.join(map(repr, missing))}, whose package is not installed; run: pip install "
            f"{packages}; or leave it out."
        )
