"""The KL to the reference in real runs: in the reward, and by a named estimator beside row-wise ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny_world


def test_the_kl_in_the_reward_is_none_at_first_and_grows_with_training(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        tiny_world.Rewriting(),
        max_steps=3,
        beta=0.1,
        kl_in_reward=True,
        advantage_estimator="reinforce_plus_plus",
        learning_rate=1e-3,
        max_completion_length=6,
        num_batches_ahead=0,
    )
    trainer.train()
    kl, penalty = trainer.logged("kl"), trainer.logged("reward/kl_penalty")
    assert (kl[0], penalty[0]) == (pytest.approx(0.0, abs=1e-5), pytest.approx(0.0, abs=1e-5))
    assert abs(kl[2]) > 1e-4
    assert math.copysign(1.0, kl[2]) == math.copysign(1.0, penalty[2])


def test_gspo_with_a_named_kl_clips_nothing_at_the_first_update(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(
        tiny_world.single_turn(),
        max_steps=2,
        num_iterations=2,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=1e-6,
        beta=0.1,
        kl_estimator="k2",
        advantage_estimator="rloo",
        learning_rate=1e-3,
    )
    trainer.train()
    # the first update has ratios of 1, the second moved away from it
    clipped = trainer.logged("clip_ratio/region_mean")
    assert clipped[0] == 0.0
    assert clipped[1] > 0.0
    assert trainer.logged("sampling/clipped_share")[0] == 0.0
