from __future__ import annotations

import pytest

from verifiers.errors import ConfigError
from verifiers.evals.statistics import beta_cdf, beta_quantile, clopper_pearson, t_quantile


# from published tables of binomial limits
@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),
    [(0, 10, 0, 0.308497), (10, 10, 0.691503, 1), (1, 10, 0.002529, 0.445016), (5, 10, 0.187086, 0.812914)],
)
def test_exact_intervals_are_those_of_the_tables(right: int, trials: int, low: float, high: float) -> None:
    assert clopper_pearson(right, trials) == pytest.approx((low, high), abs=1e-6)


@pytest.mark.parametrize(("right", "trials"), [(3, 7), (40, 1000), (1, 2), (999, 1000)])
def test_exact_intervals_leave_half_the_error_to_each_side(right: int, trials: int) -> None:
    import math

    low, high = clopper_pearson(right, trials, 0.9)
    # the binomial tails themselves
    at_least = math.fsum(math.comb(trials, i) * low**i * (1 - low) ** (trials - i) for i in range(right, trials + 1))
    at_most = math.fsum(math.comb(trials, i) * high**i * (1 - high) ** (trials - i) for i in range(right + 1))
    assert (at_least, at_most) == pytest.approx((0.05, 0.05), rel=1e-7)


def test_the_beta_distribution_matches_closed_forms() -> None:
    for x in (0.01, 0.3, 0.5, 0.97):
        assert beta_cdf(x, 1, 1) == pytest.approx(x)
        assert beta_cdf(x, 3, 1) == pytest.approx(x**3)
        assert beta_cdf(x, 2, 2) == pytest.approx(3 * x**2 - 2 * x**3)
        assert beta_quantile(beta_cdf(x, 2.5, 7), 2.5, 7) == pytest.approx(x, rel=1e-9)


def test_impossible_arguments_are_refused() -> None:
    for right, trials in ((0, 0), (3, 2), (-1, 4)):
        with pytest.raises(ConfigError, match=f"{right} of {trials}"):
            clopper_pearson(right, trials)
    for probability, degrees in ((1.0, 3), (0.5, 0), (0.9, float("nan"))):
        with pytest.raises(ConfigError, match="degree of freedom"):
            t_quantile(probability, degrees)
