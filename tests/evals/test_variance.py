from __future__ import annotations

import math

import numpy as np
import pytest

from verifiers.evals.summary import split_variance


def test_variance_is_split_as_in_the_analysis_of_variance() -> None:
    # means 2, 6, 4 around 4; MSB = 2 * 8 / 2 = 8, MSW = 6 / 3 = 2, n0 = 2
    split = split_variance([[1.0, 3.0], [5.0, 7.0], [3.0, 5.0]])
    assert (split.between, split.within, split.rollouts_per_prompt) == pytest.approx((3, 2, 2))
    assert split.share_between == pytest.approx(0.6)
    assert split.design_effect == pytest.approx(1.6)
    assert split.stderr_with_twice_the_rollouts == pytest.approx(math.sqrt(3.5 / 4))


def test_unequal_groups_are_estimated_without_bias() -> None:
    random = np.random.default_rng(2)
    sizes = [1, 2, 8, 8, 3, 5, 8, 4, 8, 1] * 3
    between, within = [], []
    for _ in range(1500):
        split = split_variance([random.normal(random.normal(0, 2), 1, size).tolist() for size in sizes])
        between.append(split.between)
        within.append(split.within)
    assert np.mean(between) == pytest.approx(4, rel=0.05)
    assert np.mean(within) == pytest.approx(1, rel=0.02)


def test_the_size_of_unequal_groups_is_that_of_the_analysis_of_variance() -> None:
    groups = [[0.0], [8.0], [3.0, 5.0] * 8]
    split = split_variance(groups)
    size = (18 - (1 + 1 + 256) / 18) / 2
    assert split.rollouts_per_prompt == pytest.approx(size)
    assert split.within == pytest.approx(16 / 15)
    # around the mean of all rollouts, 4: squares between are 16 + 16 + 0
    assert split.between == pytest.approx((32 / 2 - 16 / 15) / size)


def test_a_negative_share_is_none() -> None:
    split = split_variance([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert (split.between, split.share_between, split.design_effect) == (0, 0, 1)
    assert split.advice == "more rollouts"


def test_prompts_that_decide_alone_call_for_more_prompts() -> None:
    split = split_variance([[1.0] * 4, [0.0] * 4, [1.0] * 4])
    assert (split.within, split.share_between, split.design_effect) == pytest.approx((0, 1, 4))
    assert split.stderr_with_twice_the_rollouts == 1
    assert split.advice == "more prompts"


def test_what_cannot_be_told_is_nan() -> None:
    for rewards in ([], [[1.0, 0.0]], [[1.0], [0.0]], [[], [1.0, 0.0]]):
        split = split_variance(rewards)
        assert math.isnan(split.share_between)
        assert split.advice == ""
    same = split_variance([[1.0, 1.0], [1.0, 1.0]])
    assert math.isnan(same.share_between)
    assert math.isnan(same.stderr_with_twice_the_rollouts)
    assert same.advice == ""
