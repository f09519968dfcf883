from __future__ import annotations

import itertools
import math

import pytest

from verifiers.errors import ConfigError
from verifiers.evals.statistics import best_at_k, pass_at_k, pass_hat_k, sizes_up_to


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(10, 3, 1, 0.3), (10, 3, 5, 0.916667), (5, 1, 2, 0.4), (4, 4, 4, 1), (4, 0, 1, 0), (4, 2, 5, math.nan)],
)
def test_pass_at_k_is_the_unbiased_estimate(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_pass_at_k_of_large_counts_is_finite() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)


def test_pass_hat_k_is_the_chance_that_all_are_right() -> None:
    assert pass_hat_k(10, 3, 2) == pytest.approx(0.066667, abs=1e-6)
    assert pass_hat_k(4, 4, 4) == 1
    assert pass_hat_k(4, 1, 2) == 0
    assert math.isnan(pass_hat_k(4, 4, 5))


@pytest.mark.parametrize("counts", [(4, 5, 1), (4, -1, 1), (4, 2, 0)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int]) -> None:
    for rate in (pass_at_k, pass_hat_k):
        with pytest.raises(ConfigError, match=f"n={counts[0]}, c={counts[1]}, k={counts[2]}"):
            rate(*counts)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_best_at_k_is_the_mean_of_the_best_over_all_choices(k: int) -> None:
    rewards = [0.3, -2.0, 0.3, 1.5, 0.0, 4.0]
    choices = [max(choice) for choice in itertools.combinations(rewards, k)]
    assert best_at_k(rewards, k) == pytest.approx(sum(choices) / len(choices))


def test_best_at_k_of_right_and_wrong_is_pass_at_k() -> None:
    for right, k in itertools.product(range(9), range(1, 9)):
        assert best_at_k([1.0] * right + [0.0] * (8 - right), k) == pytest.approx(pass_at_k(8, right, k))


def test_best_at_k_of_many_rollouts_is_finite() -> None:
    assert best_at_k([0.0] * 9_999 + [1.0], 5_000) == pytest.approx(0.5)
    assert math.isnan(best_at_k([1.0], 2))
    assert math.isnan(best_at_k([], 1))
    with pytest.raises(ConfigError, match="not 0"):
        best_at_k([1.0], 0)


def test_the_sizes_are_powers_of_two_and_the_number_itself() -> None:
    assert [sizes_up_to(n) for n in (0, 1, 2, 3, 8, 12)] == [
        [],
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]
