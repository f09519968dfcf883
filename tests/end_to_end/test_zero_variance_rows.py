"""Rollouts without an advantage cost no forward pass, and leaving them out changes neither loss nor weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_world
import torch


def zero_variance_for_some(completion: Any, info: Any, prompt: Any) -> float:
    """Return the same for every rollout of a short prompt, whose group has no variance; the length for others."""
    return 1.0 if len(prompt[-1]["content"]) % 2 else float(len(completion[-1]["content"]))


def trained(make_trainer: Callable[..., Any], **overrides: Any) -> Any:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 1}
    values = {
        "skip_zero_advantage_rows": True,
        "optim": "sgd",
        "learning_rate": 0.05,
        "max_grad_norm": 0.0,
        **sizes,
        **overrides,
    }
    trainer = make_trainer(tiny_world.single_turn(reward=zero_variance_for_some), **values)
    trainer.train()
    return trainer


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "luspo"])
def test_skipping_rows_without_an_advantage_changes_no_weight(
    make_trainer: Callable[..., Any], loss_type: str
) -> None:
    settings = {"loss_type": loss_type, **({"epsilon_high": 5.0} if loss_type == "cispo" else {})}
    skipping = trained(make_trainer, **settings)
    computing = trained(make_trainer, **settings, skip_zero_advantage_rows=False)
    skipped = skipping.logged("rows/dropped/zero_advantage")[0]
    assert 0 < skipped < 16
    assert skipping.logged("rows/trained")[0] + skipped == computing.logged("rows/trained")[0]
    assert skipping.logged("reward") == computing.logged("reward")
    before, after = tiny_world.weights(computing), tiny_world.weights(skipping)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("overrides", [{"beta": 0.1}, {"loss_type": "bnpo"}, {"entropy_coef": 0.01}])
def test_rows_are_kept_where_anything_but_the_advantage_reaches_the_loss(
    make_trainer: Callable[..., Any], overrides: dict[str, Any]
) -> None:
    trainer = trained(make_trainer, **overrides)
    assert trainer.logged("rows/trained") == [16.0]


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
