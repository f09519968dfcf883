"""The plan of a run: what is drawn, sampled and evaluated; whatever its environment or host would refuse."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from verifiers.data.adaptive_curriculum import AdaptiveRows, CurriculumPolicy
from verifiers.data.batch_plan import BatchPlan
from verifiers.data.curriculum import Curriculum
from verifiers.data.row_source import HasReplacements, RowSource, StagedRows, rows_by_name
from verifiers.errors import ConfigError
from verifiers.evals.export import check_hub
from verifiers.keywords import warn_once
from verifiers.rollouts.recording_client import refuse_non_text
from verifiers.rollouts.run import refuse_unsupplied
from verifiers.rubrics.scoring import is_turn_reward
from verifiers.train.config import GRPOConfig, setting_name
from verifiers.train.conflicts import refuse_biased_sampling
from verifiers.train.evaluation.eval_sets import EvalSet, choose_eval_sets

_MEASURES = ("reward", "reward_stderr", "prompts", "failed", "seconds")
_FAMILIES = ("rewards/", "tasks/", "outcomes/", "completions/", "pass_at_", "pass_hat_", "best_at_")

# transformers cannot tell whether these are installed
_UNKNOWN_TO_TRANSFORMERS = {"azure_ml": "azureml-sdk", "flyte": "flytekit"}


@dataclasses.dataclass(frozen=True, slots=True)
class RunPlan:
    """A run that nothing refuses."""

    batches: BatchPlan
    sampling_args: dict[str, Any]
    eval_sets: tuple[EvalSet, ...]


def plan_run(
    args: GRPOConfig,
    env: Any,
    curriculum: Curriculum | CurriculumPolicy | None = None,
    *,
    eval_dataset: Any = None,
    eval_env: Any = None,
) -> RunPlan:
    """Return the plan of a run; whatever can be refused before a model is loaded or a server asked is refused here.

    Args: as of `GRPOTrainer`.
    """
    if not issubclass(type(args), GRPOConfig):
        kind = f"{type(args).__module__}.{type(args).__name__}"
        raise ConfigError(f"args is a {kind}; give a verifiers.GRPOConfig, which has the same fields.")
    if isinstance(env, type) or not hasattr(env, "get_dataset"):
        raise ConfigError(f"env is {env!r:.100}; give an environment, such as vf.load_environment('my-env').")
    args.settle()
    _refuse_unwritable(str(args.output_dir))
    _refuse_unknown_reports(args.report_to)
    _refuse_unusable_optimizer(args)
    if args.push_to_hub and os.environ.get("RANK", "0") == "0":
        check_hub(args.hub_model_id or Path(str(args.output_dir)).resolve().name, "push_to_hub=True", args.hub_token)
    batches = plan_batches(args, env, curriculum)
    sampling_args = training_sampling_args(env, args)
    eval_sets = choose_eval_sets(env, eval_dataset, eval_env, most=args.num_eval_prompts)
    _check_eval_sets(args, eval_sets)
    return RunPlan(batches, sampling_args, eval_sets)


# -- what is drawn ---------------------------------------------------------------------------------------------------


def plan_batches(args: GRPOConfig, env: Any, curriculum: Curriculum | CurriculumPolicy | None = None) -> BatchPlan:
    """Return the batch plan of a run over an environment's training rows.

    Args:
        curriculum: stages, or a rule that adapts; None for the environment's own `row_source`, or where it has none
            for its rows in their own or a shuffled order.

    Raises:
        ConfigError: a rubric without reward functions, and no teacher; sizes, stages and datasets that do not go
            together; saves in the middle of a block; a group of environments of which one brings a curriculum that
            would not be followed; a prompt with a part that is not text.
    """
    if getattr(getattr(env, "rubric", None), "is_empty", False) and not args.teacher_url:
        raise ConfigError(
            "the environment's rubric has no reward function, so every reward is 0.0 and nothing is learned; give "
            "the environment rubric=Rubric(funcs=[...])."
        )
    refuse_unsupplied(env)
    if args.turn_discount is None and any(map(is_turn_reward, env.get_reward_funcs())):
        text = "the rubric rewards turns, which trains nothing without turn_discount; set it, such as to 1.0."
        warn_once("verifiers.train", text)
    rows = env.get_dataset()
    if len(rows) == 0:
        raise ConfigError("the environment's training dataset has no rows; give it dataset= with some.")
    plan = args.batch_plan(len(rows))
    _refuse_mid_block(args, plan)
    prompt = rows[0]["prompt"]
    # where one row has parts, all rows were given them
    if not isinstance(prompt, str) and any(isinstance(message.get("content"), list) for message in prompt):
        for number, prompt in enumerate(rows["prompt"]):
            refuse_non_text(prompt, f"the prompt of training row {number}", args.max_images)
    source: RowSource | None = getattr(env, "row_source", None)
    if curriculum is not None:
        if source is not None:
            raise ConfigError(
                "the environment brings a curriculum of its own (row_source), and the run has another; leave one out."
            )
        datasets = datasets_of(env)
        if isinstance(curriculum, Curriculum):
            source = StagedRows(curriculum, datasets)
        else:
            source = AdaptiveRows(curriculum, datasets, lag=args.num_batches_ahead)
    if source is None:
        _refuse_ignored_curricula(env)
        return plan
    plan = dataclasses.replace(plan, source=source)
    if isinstance(source, StagedRows):
        source.curriculum.check(source.sizes, plan.max_steps)
        source.curriculum.check_blocks(source.sizes, plan.blocks, plan.prompts_per_block, plan.updates_per_block)
    elif isinstance(source, AdaptiveRows):
        source.policy.check_block(plan.prompts_per_block)
    if args.dynamic_sampling and not isinstance(source, HasReplacements):
        raise ConfigError(
            "dynamic_sampling replaces groups by other prompts of the same stage, and this curriculum cannot name "
            "any; set dynamic_sampling=False."
        )
    return plan


def _refuse_mid_block(args: GRPOConfig, plan: BatchPlan) -> None:
    """Refuse to save or evaluate every so many steps where that is inside a block."""
    for name, strategy, every in (
        ("save_steps", args.save_strategy, args.save_steps),
        ("eval_steps", args.eval_strategy, args.eval_steps),
    ):
        if strategy != "steps" or not every:
            continue
        if every < 1:
            # a share of the run, which transformers rounds up in the same way
            every = math.ceil(plan.max_steps * every)
        updates = plan.updates_per_block
        if every % updates:
            lower = max(1, int(every) // updates) * updates
            raise ConfigError(
                f"{name} is {every:g}, but a block serves {updates} optimizer steps, and it happens between blocks; "
                f"give {lower} or {lower + updates}."
            )


def _refuse_ignored_curricula(env: Any) -> None:
    members: Mapping[str, Any] = getattr(env, "env_map", None) or {}
    for name, member in members.items():
        if getattr(member, "row_source", None) is not None:
            raise ConfigError(
                f"environment {name!r} of the group brings a curriculum of its own (row_source), which a run over a "
                "group does not follow: train on that environment alone, choose its rows (a RemoteEnv takes "
                "dataset=), or give the run a curriculum over the group's environments."
            )
        _refuse_ignored_curricula(member)


def datasets_of(env: Any) -> dict[str, list[int]]:
    """Return the training rows of an environment by dataset: by member of a group, else by the `task` column."""
    dataset = env.get_dataset()
    if "task" not in dataset.column_names:
        return {"default": list(range(len(dataset)))}
    tasks = [task if task is None else str(task) for task in dataset["task"]]
    members: Mapping[str, Any] | None = getattr(env, "env_map", None)
    if members is None:
        return rows_by_name(tasks)
    # a member's rows may have tasks of their own, which the group knows
    names = {id(member): name for name, member in members.items()}
    name_of = {task: names[id(env.get_env_for_task(task))] for task in set(tasks)}
    return rows_by_name(name_of[task] for task in tasks)


# -- how it is sampled -----------------------------------------------------------------------------------------------


def training_sampling_args(env: Any, args: GRPOConfig) -> dict[str, Any]:
    """Return the OpenAI sampling arguments of training rollouts: the environment's, then the trainer's.

    Raises:
        ConfigError: the environment fixes a temperature that the trainer does not share, or shifts the sampler's
            distribution, which importance sampling would treat as another policy.
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
    refuse_biased_sampling(args, "the environment", {**given, **extra})
    if args.top_k and args.top_k > 0:
        extra["top_k"] = args.top_k
    if args.min_p:
        extra["min_p"] = args.min_p
    if args.repetition_penalty != 1.0:
        extra["repetition_penalty"] = args.repetition_penalty
    if args.chat_template_kwargs:
        extra["chat_template_kwargs"] = args.template_options(extra)
    given.update(temperature=args.temperature, max_tokens=args.max_completion_length)
    if args.top_p < 1.0:
        given["top_p"] = args.top_p
    if extra:
        given["extra_body"] = extra
    return given


def with_one_bos(plan: RunPlan, rows: Any, tokenizer: Any) -> RunPlan:
    """Return the plan with `add_special_tokens` off where every text prompt begins with the BOS that it would add."""
    bos: str = getattr(tokenizer, "bos_token", None) or ""
    adds = bos and tokenizer.encode(bos) == [tokenizer.bos_token_id] * 2
    # a run that evaluates nothing may have no eval rows
    datasets = itertools.chain([rows], (one.dataset for one in plan.eval_sets))
    prompts = (prompt for dataset in datasets for prompt in dataset["prompt"])
    if not adds or not all(isinstance(prompt, str) and prompt.startswith(bos) for prompt in prompts):
        return plan
    extra = {"add_special_tokens": False, **(plan.sampling_args.get("extra_body") or {})}
    return dataclasses.replace(plan, sampling_args={**plan.sampling_args, "extra_body": extra})


# -- what it is evaluated on -----------------------------------------------------------------------------------------


def _check_eval_sets(args: GRPOConfig, sets: Sequence[EvalSet]) -> None:
    """Check that there is something to evaluate on, and that evaluations have the metric for the best model."""
    strategy = setting_name(args.eval_strategy)
    if strategy == "no":
        return
    for eval_set in sets:
        if eval_set.rows is None and getattr(eval_set.env, "eval_dataset", None) is None:
            raise ConfigError(
                f"eval_strategy is {strategy!r}, but {eval_set.env_name} has no eval set; give it an eval_dataset, "
                "give the trainer eval_dataset or eval_env, or set eval_strategy='no'."
            )
        if len(eval_set.dataset) == 0:
            named = f"eval set {eval_set.name!r}" if eval_set.name else "eval set"
            raise ConfigError(
                f"eval_strategy is {strategy!r}, but the {named} of {eval_set.env_name} has 0 rows; give it rows, or "
                "set eval_strategy='no'."
            )
    metric = args.metric_for_best_model
    if metric is None:
        return
    full = metric if metric.startswith("eval_") else f"eval_{metric}"
    prefixes = [eval_set.metric_prefix("eval") + "_" for eval_set in sets]
    measured = [full.removeprefix(prefix) for prefix in prefixes if full.startswith(prefix)]
    if any(name in _MEASURES or name.startswith(_FAMILIES) for name in measured):
        return
    known = [prefix + measure for prefix in prefixes for measure in _MEASURES]
    nearest = difflib.get_close_matches(full, known, n=1, cutoff=0.4) or known[:1]
    raise ConfigError(
        f"metric_for_best_model is {metric!r}, which no evaluation here has; did you mean {nearest[0]!r}? "
        f"There are also {prefixes[0]}rewards/<function> and what docs/reference/metrics.md lists."
    )


# -- where it is written ---------------------------------------------------------------------------------------------


def _refuse_unwritable(output_dir: str) -> None:
    """Refuse a directory that cannot be made or written to; leaves nothing behind."""
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


def _refuse_unknown_reports(names: list[str]) -> None:
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
    own = {name for name, package in _UNKNOWN_TO_TRANSFORMERS.items() if find_spec(package.removesuffix("-sdk"))}
    missing = sorted({*names} - {*get_available_reporting_integrations(), *own})
    if missing:
        packages = " ".join(_UNKNOWN_TO_TRANSFORMERS.get(name, name).replace("_", "-") for name in missing)
        raise ConfigError(
            f"report_to has {', '.join(map(repr, missing))}, whose package is not installed; run: pip install "
            f"{packages}; or leave it out."
        )


def _refuse_unusable_optimizer(args: GRPOConfig) -> None:
    """Refuse an optimizer or a schedule that transformers refuses later, such as for a package that is missing."""
    import torch
    from transformers import Trainer, get_scheduler

    setting = f"optim is {setting_name(args.optim)!r}"
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)
        setting = f"lr_scheduler_type is {setting_name(args.lr_scheduler_type)!r}"
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
        get_scheduler(args.lr_scheduler_type, optimizer, 1, 100, cast(Any, args.lr_scheduler_kwargs))
    except (ImportError, ValueError, TypeError) as error:
        # some are made for a model's layers, and there is none yet
        if "to pass a model" not in str(error).replace("`", ""):
            raise ConfigError(f"{setting}, which cannot be used here ({error}).") from error
