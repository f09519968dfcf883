"""Groups that lag, fail or teach nothing: what is trained of them, and why the rest is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch

import verifiers as vf
from verifiers.reports.training_run import training_data
from verifiers.testing import FakeOpenAIServer
from verifiers.train.checkpoint.block_log import read_block_log


def reasons(directory: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for record in read_block_log(directory):
        for item in record["dropped"]:
            found[item["reason"]] = found.get(item["reason"], 0) + 1
    return found


def of_every_third_prompt(completion: Any, prompt: Any = None, **kwargs: Any) -> float:
    """Return a reward without variance for the other prompts."""
    index = sum(map(ord, prompt[-1]["content"]))
    return tiny_world.vowels(completion) if index % 3 == 0 else 1.0


def test_zero_variance_groups_are_replaced_by_other_prompts_and_recorded(
    make_fake_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    env = tiny_world.single_turn(count=40, reward=of_every_third_prompt)
    with FakeOpenAIServer(tiny_world.letters) as fake:
        options = {"dynamic_sampling": True, "dynamic_sampling_max_groups": 30, "max_steps": 3, "beta": 0.01}
        trainer = make_fake_trainer(env, fake.url, output_dir=tmp_path, streaming=True, **options)
        trainer.train()
    assert trainer.logged("rows/trained") == [8.0, 8.0, 8.0]
    replaced = trainer.logged("rollouts/groups_replaced")
    assert sum(replaced) > 0
    assert trainer.logged("frac_reward_zero_std") == [count / (2 + count) for count in replaced]
    assert reasons(tmp_path) == {"zero_variance": 4 * sum(replaced)}
    assert trainer.logged("rollouts/launched") == [8 + 4 * count for count in replaced]
    for record in read_block_log(tmp_path):
        ended = tiny_world.ended(record)
        assert len(set(ended)) == len(ended)
        assert set(trainer.plan.requests(record["block_id"])) <= set(ended)


@pytest.mark.parametrize(
    ("settings", "lost", "trained"),
    [
        ({"require_full_groups": True}, {"environment_error": 1, "group_incomplete": 3}, 4.0),
        ({"rollout_retries": 1}, {}, 8.0),
    ],
)
def test_a_group_with_a_failure_is_dropped_whole_or_its_rollout_run_again_where_that_is_asked(
    make_fake_trainer: Callable[..., Any],
    tmp_path: Path,
    settings: dict[str, Any],
    lost: dict[str, int],
    trained: float,
) -> None:
    class FailsOnce(vf.SingleTurnEnv):
        begun = 0

        async def rollout(self, *args: Any, **kwargs: Any) -> Any:
            self.begun += 1
            if self.begun == 1:
                raise LookupError("once")
            return await super().rollout(*args, **kwargs)

    env = FailsOnce(dataset=tiny_world.rows(), rubric=vf.Rubric(funcs=[tiny_world.vowels]))
    with FakeOpenAIServer(tiny_world.letters) as fake:
        trainer = make_fake_trainer(env, fake.url, output_dir=tmp_path, max_steps=1, num_iterations=1, **settings)
        trainer.train()
    assert reasons(tmp_path) == lost
    assert trainer.logged("rows/trained") == [trained]


@pytest.mark.parametrize(("per_token", "streaming"), [(False, False), (True, True)])
def test_an_environments_own_advantages_reach_the_loss(
    make_fake_trainer: Callable[..., Any], per_token: bool, streaming: bool
) -> None:
    class Judges(vf.SingleTurnEnv):
        """The advantage of a token is its place; of a rollout, 7."""

        async def rollout(self, *args: Any, **kwargs: Any) -> Any:
            completion, state = await super().rollout(*args, **kwargs)
            sampled = len(state["responses"][0].choices[0].token_ids)
            state["advantage"] = [float(place) for place in range(sampled)] if per_token else 7.0
            return completion, state

    env = Judges(dataset=tiny_world.rows(), rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
    with FakeOpenAIServer(tiny_world.letters) as fake:
        options = {
            "vllm_importance_sampling_correction": False,
            "loss_type": "dapo",
            "max_steps": 1,
            "streaming": streaming,
        }
        trainer = make_fake_trainer(env, fake.url, dynamic_sampling=True, **options)
        trainer.train()
    # a given advantage is a signal though the rewards are all equal
    assert trainer.logged("rollouts/groups_replaced") == [0.0]
    for batch in trainer.seen:
        mask = batch["loss_mask"].bool()
        places = (mask.cumsum(1) - 1).float()
        expected = torch.where(mask, places if per_token else 7.0, 0.0)
        assert torch.equal(batch["advantages"], expected)


def test_each_environment_of_a_mixture_has_metrics_of_its_own(make_fake_trainer: Callable[..., Any]) -> None:
    members = [
        vf.SingleTurnEnv(dataset=tiny_world.rows(8), rubric=vf.Rubric(funcs=[reward]))
        for reward in (tiny_world.vowels, lambda completion: 3.0)
    ]
    env = vf.EnvGroup(envs=members, env_names=["vowels", "threes"])
    with FakeOpenAIServer(tiny_world.letters) as fake:
        trainer = make_fake_trainer(env, fake.url, max_steps=4, per_device_train_batch_size=8)
        trainer.train()
    assert set(trainer.logged("tasks/threes/reward")) == {3.0}
    assert set(trainer.logged("tasks/threes/frac_reward_zero_std")) == {1.0}
    assert set(trainer.logged("tasks/vowels/frac_reward_zero_std")) == {0.0}
    prompts = sum(trainer.logged("tasks/threes/prompts")) + sum(trainer.logged("tasks/vowels/prompts"))
    assert prompts == 16


def test_what_the_run_ends_before_is_recorded_too(make_fake_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """The last block has two updates, and the run one."""
    with FakeOpenAIServer(tiny_world.letters) as fake:
        options = {"max_steps": 3, "steps_per_generation": 4, "streaming": True}
        trainer = make_fake_trainer(tiny_world.single_turn(), fake.url, output_dir=tmp_path, **options)
        trainer.train()
    whole, half = read_block_log(tmp_path)
    assert (len(whole["trained"]), whole["dropped"]) == (16, [])
    assert {item["reason"] for item in half["dropped"]} == {"run_ended"}
    assert len(half["trained"]) == 8
    assert tiny_world.ended(half) == sorted(trainer.plan.requests(1))


@pytest.mark.parametrize(("reward", "cause"), [(0.0, "every reward was 0"), (1.0, "every reward was 1")])
def test_a_run_that_learns_nothing_is_told_in_log_end_and_report(
    make_fake_trainer: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    reward: float,
    cause: str,
) -> None:
    env = tiny_world.single_turn(count=40, reward=lambda completion: reward)
    with FakeOpenAIServer(tiny_world.letters) as fake:
        options = {"max_steps": 4, "skip_zero_advantage_rows": True}
        make_fake_trainer(env, fake.url, output_dir=tmp_path, **options).train()
    told = [record.message for record in caplog.records if "learns nothing" in record.message]
    assert len(told) == 1
    assert f"the run learns nothing: {cause}" in told[0]
    printed = capsys.readouterr().out.splitlines()
    (line,) = [line for line in printed if line.startswith("learns nothing: ")]
    assert f"{cause} " in line
    assert "over the last 4 blocks; try " in line
    assert cause in training_data(tmp_path)["learning"]["text"]


# -- rollouts without an advantage --------------------------------------------------------------------------------


def test_a_block_in_which_no_group_has_variance_is_trained_and_changes_nothing(
    make_trainer: Callable[..., Any],
) -> None:
    trainer = make_trainer(
        tiny_world.single_turn(reward=lambda completion: 1.0), weight_decay=0.0, skip_zero_advantage_rows=True
    )
    before = tiny_world.weights(trainer)
    trainer.train()
    assert trainer.logged("rows/trained") == [0.0, 0.0]
    assert trainer.logged("frac_reward_zero_std") == [1.0, 1.0]
    # what is a mean over trained tokens is not told where there are none
    for name in ("entropy", "clip_ratio/region_mean", "clip_ratio/low_min", "staleness", "mismatch_kl"):
        assert trainer.logged(name) == [], name
    assert trainer.logged("loss") == [0.0, 0.0]
    assert all(torch.equal(before[name], tensor) for name, tensor in tiny_world.weights(trainer).items())
