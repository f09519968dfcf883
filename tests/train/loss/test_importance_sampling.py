"""The importance weights between sampler and proximal policy, by numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from verifiers.train.loss.importance_sampling import (
    importance_weights,
    join_mismatches,
    measure_mismatch,
    mismatch_metrics,
)
from verifiers.train.validation.loss_settings import IMPORTANCE_SAMPLING_MODES

RATIOS = [[2.0, 0.5, 4.0], [0.25, 8.0, 1.0]]
"""pi_old / mu of each token; the third of row one and the second of row two are the environment's."""

MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])
SAMPLING = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -0.7]])
OLD = SAMPLING + torch.tensor(RATIOS).log()

# products over sampled tokens: row one 2 x 0.5 = 1, row two 0.25 x 1 = 0.25
EXPECTED: dict[tuple[str, float | None, float | None], list[list[float]]] = {
    ("token_truncate", None, None): [[2, 0.5, 1], [0.25, 1, 1]],
    ("token_truncate", 1.5, None): [[1.5, 0.5, 1], [0.25, 1, 1]],
    ("token_truncate", 1.5, 0.4): [[1.5, 0.5, 1], [0.4, 1, 1]],
    ("token_truncate", None, 0.4): [[2, 0.5, 1], [0.4, 1, 1]],
    ("token_mask", None, None): [[2, 0.5, 1], [0.25, 1, 1]],
    ("token_mask", 1.5, None): [[0, 0.5, 1], [0.25, 1, 1]],
    ("token_mask", 1.5, 0.4): [[0, 0.5, 1], [0, 1, 1]],
    ("sequence_truncate", None, None): [[1, 1, 1], [0.25, 1, 0.25]],
    ("sequence_truncate", 0.5, None): [[0.5, 0.5, 1], [0.25, 1, 0.25]],
    ("sequence_truncate", 3.0, 0.4): [[1, 1, 1], [0.4, 1, 0.4]],
    ("sequence_mask", 3.0, None): [[1, 1, 1], [0.25, 1, 0.25]],
    ("sequence_mask", 0.5, None): [[0, 0, 1], [0.25, 1, 0.25]],
    ("sequence_mask", 3.0, 0.4): [[1, 1, 1], [0, 1, 0]],
}


@pytest.mark.parametrize("case", EXPECTED, ids=str)
def test_weights_by_mode_and_bounds(case: tuple[str, float | None, float | None]) -> None:
    mode, clip_max, clip_min = case
    weights = importance_weights(OLD, SAMPLING, MASK, mode=mode, clip_max=clip_max, clip_min=clip_min)
    assert torch.allclose(weights, torch.tensor(EXPECTED[case], dtype=torch.float32), atol=1e-6)


# geometric means of the rows: (2 x 0.5)^(1/2) = 1 and (0.25 x 1)^(1/2) = 0.5
GEOMETRIC: dict[tuple[str, float | None, float | None], list[list[float]]] = {
    ("token_truncate", None, 0.6): [[1.5, 0.5, 1], [0, 1, 0]],
    ("token_truncate", 2.0, 0.5): [[1.5, 0.5, 1], [0.25, 1, 1]],
    ("token_mask", 2.0, 0.6): [[0, 0.5, 1], [0, 1, 0]],
    ("sequence_truncate", 0.9, None): [[0, 0, 1], [0.25, 1, 0.25]],
}


@pytest.mark.parametrize("case", GEOMETRIC, ids=str)
def test_a_row_outside_the_geometric_bounds_has_no_weight_under_any_mode(
    case: tuple[str, float | None, float | None],
) -> None:
    mode, high, low = case
    bounds: dict[str, Any] = {"clip_max": 1.5, "clip_min": None, "geometric_max": high, "geometric_min": low}
    weights = importance_weights(OLD, SAMPLING, MASK, mode=mode, **bounds)
    assert torch.allclose(weights, torch.tensor(GEOMETRIC[case], dtype=torch.float32), atol=1e-6)


def test_every_mode_is_worked_out() -> None:
    assert {mode for mode, _, _ in EXPECTED} == set(IMPORTANCE_SAMPLING_MODES)


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_where_the_policies_agree_the_weight_is_exactly_one(mode: str) -> None:
    weights = importance_weights(SAMPLING, SAMPLING, MASK, mode=mode, clip_max=3.0, clip_min=0.5)
    assert torch.equal(weights, torch.ones(2, 3))


@pytest.mark.parametrize("mode", IMPORTANCE_SAMPLING_MODES)
def test_what_is_recorded_of_environment_tokens_does_not_matter(mode: str) -> None:
    options: dict[str, Any] = {"mode": mode, "clip_max": 3.0, "clip_min": None}
    usual = importance_weights(OLD, SAMPLING, MASK, **options)
    for value in (0.0, -50.0, float("nan"), float("inf")):
        odd = torch.where(MASK.bool(), SAMPLING, value)
        assert torch.equal(importance_weights(OLD, odd, MASK, **options), usual)


def test_the_mismatch_adds_up_over_sampled_tokens() -> None:
    weights = importance_weights(OLD, SAMPLING, MASK, mode="token_truncate", clip_max=1.5, clip_min=None)
    mismatch = measure_mismatch(OLD, SAMPLING, MASK, weights)
    assert mismatch is not None
    ratios = [2.0, 0.5, 0.25, 1.0]
    assert mismatch.tokens == 4
    assert mismatch.kl_sum == pytest.approx(sum(r - 1 - math.log(r) for r in ratios), abs=1e-6)
    assert mismatch.ratio_sum == pytest.approx(sum(ratios), abs=1e-6)
    assert (mismatch.ratio_min, mismatch.ratio_max) == pytest.approx((0.25, 2.0), abs=1e-6)
    assert mismatch.difference_max == pytest.approx(math.log(4), abs=1e-6)
    assert mismatch.clipped == 1


def test_the_estimated_divergence_is_never_negative_and_zero_only_where_they_agree() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        old, sampling = -torch.rand(3, 5), -torch.rand(3, 5)
        mismatch = measure_mismatch(old, sampling, torch.ones(3, 5), None)
        assert mismatch is not None
        assert mismatch.kl_sum > 0
    same = measure_mismatch(SAMPLING, SAMPLING, MASK, None)
    assert same is not None
    assert same.kl_sum == 0.0


def test_padding_alone_has_no_mismatch() -> None:
    assert measure_mismatch(OLD, SAMPLING, torch.zeros(2, 3), None) is None


def test_a_sequences_ratio_is_what_sequence_modes_measure_and_clip() -> None:
    old = torch.log(torch.tensor([[2.0, 3.0, 9.0], [0.5, 1.0, 1.0]]))
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    weights = importance_weights(old, torch.zeros(2, 3), mask, mode="sequence_truncate", clip_max=5.0, clip_min=None)
    mismatch = measure_mismatch(old, torch.zeros(2, 3), mask, weights, "sequence_truncate")
    assert mismatch is not None
    assert (mismatch.ratio_min, mismatch.ratio_max) == pytest.approx((0.5, 6.0))
    assert mismatch.ratio_sum == pytest.approx(2 * 6.0 + 3 * 0.5)
    # the first row's two tokens; the ratios of single tokens, of which none is above the bound, do not matter
    assert mismatch.clipped == 2
    assert mismatch.difference_max == pytest.approx(math.log(3))


def test_micro_batches_and_ranks_of_unequal_size_join_into_the_mismatch_of_all_their_tokens() -> None:
    torch.manual_seed(0)
    old, sampling = torch.randn(5, 7), torch.randn(5, 7)
    mask = (torch.rand(5, 7) < 0.6).long()
    whole = measure_mismatch(old, sampling, mask, None)
    parts = [measure_mismatch(old[rows], sampling[rows], mask[rows], None) for rows in ([0], [1, 2, 3], [4])]
    joined = join_mismatches([part for part in parts if part is not None])
    assert whole is not None
    assert joined is not None
    assert mismatch_metrics(joined) == pytest.approx(mismatch_metrics(whole))
    assert join_mismatches([]) is None
