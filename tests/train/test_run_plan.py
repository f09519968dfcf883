"""Names of a curriculum's datasets, and its state in a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

import verifiers as vf
from verifiers.data.adaptive_curriculum import AdaptiveRows, LevelsPolicy
from verifiers.data.batch_plan import make_plan
from verifiers.data.curriculum import staged_curriculum_from
from verifiers.data.row_source import StagedRows
from verifiers.errors import CheckpointError, ConfigError
from verifiers.keywords import warn_once
from verifiers.rollouts.rollout import Group, ScoredBlock
from verifiers.train.checkpoint.run_directory import restore_curriculum, still_planned
from verifiers.train.config import GRPOConfig
from verifiers.train.run_plan import datasets_of, plan_batches, plan_run

STAGES = staged_curriculum_from({"stages": [{"name": "all", "datasets": ["a", {"id": "b", "weight": 2}]}]})


def env_with(tasks: list[str] | None, count: int = 6) -> vf.SingleTurnEnv:
    rows: list[dict[str, Any]] = [{"question": str(row), "answer": ""} for row in range(count)]
    for row, task in zip(rows, tasks or (), strict=False):
        row["task"] = task
    return vf.SingleTurnEnv(dataset=rows)


def test_datasets_are_members_of_a_group_else_tasks_else_the_whole() -> None:
    assert datasets_of(env_with(None)) == {"default": [0, 1, 2, 3, 4, 5]}
    assert datasets_of(env_with(["x", "y"] * 3)) == {"x": [0, 2, 4], "y": [1, 3, 5]}
    # two members whose rows have the same task, and one whose rows have none
    group = vf.EnvGroup([env_with(["x"] * 6), env_with(["x", "y"] * 3), env_with(None, 2)], ["a", "b", "c"])
    assert datasets_of(group) == {"a": list(range(6)), "b": list(range(6, 12)), "c": [12, 13]}


def config(**settings: Any) -> GRPOConfig:
    sizes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 4, "use_cpu": True, "bf16": False}
    return GRPOConfig("outputs/none", **{**sizes, "gradient_accumulation_steps": 1, **settings})


def test_the_plan_of_a_run_asks_the_curriculum_or_what_the_environment_brings() -> None:
    group = vf.EnvGroup([env_with(None), env_with(None)], ["a", "b"])
    assert plan_batches(config(), group).source is None
    plan = plan_batches(config(), group, STAGES)
    assert {row // 6 for row in plan.example_ids(0)} == {0, 1}
    group.row_source = plan.source
    assert plan_batches(config(), group).source is plan.source
    with pytest.raises(ConfigError, match="brings a curriculum of its own"):
        plan_batches(config(), group, STAGES)


def test_saves_inside_a_block_are_refused_with_the_plan_so_that_a_dry_run_sees_them() -> None:
    saving = config(num_iterations=2, save_strategy="steps", save_steps=3)
    with pytest.raises(ConfigError, match=r"save_steps is 3, but a block serves 2 optimizer steps.*give 2 or 4"):
        plan_batches(saving, vf.EnvGroup([env_with(None)], ["a"]))


def test_a_checkpoints_blocks_are_kept_where_their_prompts_are_still_the_plans() -> None:
    source = StagedRows(STAGES, {"a": range(20), "b": range(20, 60)})
    plan = make_plan(per_device_train_batch_size=4, num_generations=2, max_steps=3, num_prompts=60, source=source)

    def block(block_id: int, rows: list[int], filtered: list[int] | None = None) -> ScoredBlock:
        replaced = [Group(row, []) for row in filtered or []]
        return ScoredBlock(block_id, [Group(row, []) for row in rows], 0, 0.0, filtered=replaced)

    planned, replacements = plan.example_ids(1), plan.replacement_ids(1, 1)
    same, other = block(1, planned), block(1, [planned[0], replacements[0]])
    replaced = block(1, [planned[0], *replacements], planned[1:])
    late = block(3, plan.example_ids(3))
    assert still_planned(plan, [same, other, replaced, late]) == [same, replaced]


def test_an_adaptive_run_does_not_go_on_without_its_state() -> None:
    source = AdaptiveRows(LevelsPolicy(("a",)), {"a": range(20)}, lag=0)
    plan = make_plan(per_device_train_batch_size=4, num_generations=2, max_steps=3, num_prompts=20, source=source)
    with pytest.raises(CheckpointError, match="holds no state of an adaptive curriculum"):
        restore_curriculum(plan, {})
    restore_curriculum(plan, {"curriculum": source.state()})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"optim": "adamw_8bit"}, "optim is 'adamw_8bit'.*bitsandbytes"),
        ({"optim": "galore_adamw", "optim_target_modules": "all-linear"}, "galore_torch"),
        ({"optim": "grokadamw"}, "grokadamw"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_type is 'warmup_stable_decay'.*num_decay_steps"),
        ({"report_to": ["wandb"]}, "pip install wandb"),
        ({"report_to": ["flyte"]}, "pip install flytekit"),
    ],
)
def test_an_optimizer_schedule_or_logger_that_cannot_be_used_is_refused_with_the_plan(
    settings: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bitsandbytes", "galore_torch", "grokadamw"):
        monkeypatch.setattr(f"transformers.trainer_optimizer.is_{name}_available", lambda: False)
    rubric = vf.Rubric([lambda completion: 1.0])
    with pytest.raises(ConfigError, match=told):
        plan_run(config(**settings), vf.SingleTurnEnv(dataset=env_with(None).get_dataset(), rubric=rubric))


@pytest.mark.parametrize(("name", "told"), [("me/x", "offline"), ("no--name", "no--name")])
def test_a_hub_that_cannot_be_pushed_to_is_refused_with_the_plan(
    name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = config(push_to_hub=True, hub_model_id=name, hub_token="hf_none")
    with pytest.raises(ConfigError, match=f"push_to_hub=True: nothing can be pushed to '{name}'.*{told}"):
        plan_run(settings, env_with(None))


def test_rewards_of_turns_that_train_nothing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    env = vf.SingleTurnEnv(dataset=[{"question": "q"}] * 8, rubric=vf.Rubric([vf.turn_reward(lambda: [1.0])]))
    plan_batches(config(turn_discount=1.0), env)
    assert "turn_discount" not in caplog.text
    plan_batches(config(), env)
    assert "trains nothing without turn_discount" in caplog.text
