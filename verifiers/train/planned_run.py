"""The plan of a run: its batch plan, over the rows of the environment or the datasets of a curriculum."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from verifiers.data.adaptive_curriculum import AdaptiveRows, CurriculumPolicy
from verifiers.data.batch_plan import BatchPlan
from verifiers.data.curriculum import Curriculum
from verifiers.data.row_source import HasReplacements, RowSource, StagedRows, rows_by_name
from verifiers.errors import ConfigError
from verifiers.rollouts.recording_client import refuse_non_text
from verifiers.train.config import GRPOConfig
from verifiers.train.validation.run_settings import refuse_mid_block_saves

__all__ = ["datasets_of", "planned_run"]


def planned_run(
    args: GRPOConfig, env: Any, curriculum: Curriculum | CurriculumPolicy | None = None, *, warn: bool = True
) -> BatchPlan:
    """Return the plan of a run over an environment's training rows.

    Args:
        curriculum: stages, or a rule that adapts; None for the environment's own `row_source`, or where it has none
            for its rows in their own or a shuffled order.
        warn: say where the run is longer than its curriculum.

    Raises:
        ConfigError: a rubric without reward functions; sizes, stages and datasets that do not go together; saves in
            the middle of a block; a group of environments of which one brings a curriculum that would not be
            followed; a prompt with a part that is not text.
    """
    if getattr(getattr(env, "rubric", None), "is_empty", False):
        raise ConfigError(
            "the environment's rubric has no reward function, so every reward is 0.0 and nothing is learned; give "
            "the environment rubric=Rubric(funcs=[...])."
        )
    rows = env.get_dataset()
    if len(rows) == 0:
        raise ConfigError("the environment's training dataset has no rows; give it dataset= with some.")
    plan = args.batch_plan(len(rows))
    refuse_mid_block_saves(args, plan)
    prompt = rows[0]["prompt"]
    # a column holds one type throughout, so where the first content is text all are
    if not isinstance(prompt, str) and any(isinstance(message.get("content"), list) for message in prompt):
        for number, prompt in enumerate(rows["prompt"]):
            refuse_non_text(prompt, f"the prompt of training row {number}")
    source: RowSource | None = getattr(env, "row_source", None)
    if curriculum is not None:
        if source is not None:
            raise ConfigError(
                "the environment brings a curriculum of its own (row_source), and the run has another; leave one out."
            )
        source = _source(args, env, curriculum)
    if source is None:
        _check_members(env)
        return plan
    plan = dataclasses.replace(plan, source=source)
    if isinstance(source, StagedRows):
        source.curriculum.check(source.sizes, plan.max_steps if warn else None)
        source.check_blocks(plan.blocks, plan.prompts_per_block, plan.updates_per_block)
    elif isinstance(source, AdaptiveRows):
        source.check_blocks(plan.prompts_per_block)
    if args.dynamic_sampling and not isinstance(source, HasReplacements):
        raise ConfigError(
            "dynamic_sampling replaces groups by other prompts of the same stage, and this curriculum cannot name "
            "any; set dynamic_sampling=False."
        )
    return plan


def _check_members(env: Any) -> None:
    members: Mapping[str, Any] = getattr(env, "env_map", None) or {}
    for name, member in members.items():
        if getattr(member, "row_source", None) is not None:
            raise ConfigError(
                f"environment {name!r} of the group brings a curriculum of its own (row_source), which a run over a "
                "group does not follow: train on that environment alone, choose its rows (a RemoteEnv takes "
                "dataset=), or give the run a curriculum over the group's environments."
            )
        _check_members(member)


def _source(args: GRPOConfig, env: Any, curriculum: Curriculum | CurriculumPolicy) -> RowSource:
    datasets = datasets_of(env)
    if isinstance(curriculum, Curriculum):
        return StagedRows(curriculum, datasets)
    return AdaptiveRows(curriculum, datasets, lag=args.num_batches_ahead)


def datasets_of(env: Any) -> dict[str, list[int]]:
    """Return the training rows of an environment by dataset: by member of a group, else by the `task` column."""
    dataset = env.get_dataset()
    if "task" not in dataset.column_names:
        return {"default": list(range(len(dataset)))}
    tasks = dataset["task"]
    members: Mapping[str, Any] | None = getattr(env, "env_map", None)
    if members is None:
        return rows_by_name(tasks)
    # a member's rows may have tasks of their own, which the group knows
    names = {id(member): name for name, member in members.items()}
    name_of = {task: names[id(env.get_env_for_task(task))] for task in set(tasks)}
    return rows_by_name(name_of[task] for task in tasks)
