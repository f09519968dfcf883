"""Row weights by themselves: advantages, coefficients, and what is refused."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from typing import Any

import pytest
import torch

from verifiers.errors import ConfigError
from verifiers.train.batching.weighting import (
    WeightedBeta,
    WeightedCoefficient,
    num_items_in_batch,
    row_weights,
    weight_advantages,
)
from verifiers.train.validation.loss_settings import LOSS_TYPES


def test_advantages_per_token_are_weighted_row_by_row() -> None:
    weights = torch.tensor([2.0, 0.5])
    per_token = weight_advantages(torch.tensor([[1.0, -2.0], [4.0, 6.0]]), weights)
    assert per_token.tolist() == [[2.0, -4.0], [2.0, 3.0]]
    assert weight_advantages(torch.tensor([1.0, 4.0]), weights).tolist() == [2.0, 2.0]


def test_a_weighted_beta_is_a_float_except_against_a_matrix() -> None:
    beta = WeightedBeta(0.5, torch.tensor([1.0, 3.0]))
    assert beta == 0.5
    assert isinstance(beta, float)
    assert beta * 2 == 2 * beta == 1.0
    assert f"{beta:.2f}" == "0.50"
    expected = [[0.5, 0.5], [1.5, 1.5]]
    assert (beta * torch.ones(2, 2)).tolist() == expected
    with pytest.raises(ConfigError, match="2 row weights"):
        beta * torch.ones(3, 2)


def test_a_weighted_coefficient_is_a_float_except_against_a_tensor() -> None:
    coefficient = WeightedCoefficient(0.5, 3.0)
    assert (coefficient * torch.tensor(2.0)).item() == 3.0
    assert coefficient * 2 == 2 * coefficient == 1.0
    # TRL's adaptive control
    assert min(coefficient + 0.1, 1.0) == pytest.approx(0.6)
    assert coefficient == 0.5


def test_a_row_outside_the_update_is_refused() -> None:
    ones = torch.ones(2).long()
    arguments: dict[str, Any] = {
        "rollout_index_R": torch.arange(2),
        "sampled_tokens_R": ones,
        "rollout_sampled_tokens_R": ones,
        "num_ranks": 1,
    }
    with pytest.raises(ConfigError, match=r"micro-step numbers \[1, 1\] must lie in 0 .. 0"):
        row_weights("grpo", micro_step_R=ones, rank_R=ones * 0, num_micro_steps=1, **arguments)
    with pytest.raises(ConfigError, match="rank numbers"):
        row_weights("grpo", micro_step_R=ones, rank_R=-ones, num_micro_steps=2, **arguments)
    with pytest.raises(ConfigError, match="different lengths"):
        row_weights("grpo", micro_step_R=ones[:1], rank_R=ones * 0, num_micro_steps=2, **arguments)


def test_an_update_larger_than_its_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 micro-steps does not fit a block of 2"):
        num_items_in_batch(torch.tensor([3, 5]), num_micro_steps=4, steps_per_generation=2)


def test_every_loss_type_of_trl_is_known() -> None:
    import inspect
    import re

    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._compute_loss)
    compared = " ".join(re.findall(r"self\.loss_type (?:==|in) (\[.*?\]|\".*?\")", source))
    assert set(re.findall(r'"(\w+)"', compared)) == set(LOSS_TYPES)
