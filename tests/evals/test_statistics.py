from __future__ import annotations

import math
import random
import time

import pytest

from verifiers.errors import ConfigError
from verifiers.evals.statistics import (
    Estimate,
    mean_and_stderr_clustered,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    t_quantile,
)

FIVE_PROMPTS = [[1, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]


def test_the_error_of_a_mean_is_clustered_by_prompt() -> None:
    estimate = mean_and_stderr_clustered(FIVE_PROMPTS)
    assert estimate.mean == 0.5
    assert estimate.stderr == pytest.approx(0.176777, abs=1e-6)
    assert (estimate.low, estimate.high) == pytest.approx((0.009189, 0.990811), abs=1e-6)
    assert (estimate.prompts, estimate.rollouts) == (5, 20)


def test_more_rollouts_of_the_same_prompts_do_not_narrow_the_interval() -> None:
    once, often = (mean_and_stderr_clustered([rewards * times for rewards in FIVE_PROMPTS]) for times in (1, 50))
    assert (often.low, often.high) == pytest.approx((once.low, once.high))


def test_unequal_numbers_of_rollouts_give_the_ratio_estimate() -> None:
    estimate = mean_and_stderr_clustered([[1, 1, 1], [0], [1, 0]])
    # residual sums of the clusters around 4/6: 1, -2/3, -1/3
    assert estimate.mean == pytest.approx(4 / 6)
    assert estimate.stderr == pytest.approx(math.sqrt(3 / 2 * (1 + 4 / 9 + 1 / 9)) / 6)
    assert estimate.high - estimate.mean == pytest.approx(4.302652729911 * estimate.stderr)


def test_prompts_without_a_scored_rollout_are_left_out() -> None:
    assert mean_and_stderr_clustered([*FIVE_PROMPTS, []]) == mean_and_stderr_clustered(FIVE_PROMPTS)


@pytest.mark.parametrize(("reward", "low", "high"), [(1.0, 0.691503, 1), (0.0, 0, 0.308497)])
def test_all_right_or_all_wrong_gives_the_exact_interval_over_prompts(reward: float, low: float, high: float) -> None:
    estimate = mean_and_stderr_clustered([[reward] * 4] * 10)
    assert (estimate.mean, estimate.stderr) == (reward, 0)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=1e-6)


def test_equal_prompt_means_do_not_claim_certainty() -> None:
    estimate = mean_and_stderr_clustered([[1, 0]] * 10)
    assert estimate.stderr == 0
    assert (estimate.low, estimate.high) == pytest.approx((0.5 - 0.154248, 0.5 + 0.154248), abs=1e-6)
    rounded = mean_and_stderr_clustered([[0.7] * n for n in (1, 3, 7)])
    assert rounded.stderr == 0
    assert rounded.high > rounded.mean > rounded.low
    unbounded = mean_and_stderr_clustered([[5.0], [5.0]])
    assert math.isnan(unbounded.low)
    assert math.isnan(unbounded.high)


def test_one_prompt_has_a_mean_and_no_interval() -> None:
    estimate = mean_and_stderr_clustered([[1, 0, 1, 1]])
    assert (estimate.mean, estimate.prompts, estimate.rollouts) == (0.75, 1, 4)
    assert all(map(math.isnan, (estimate.stderr, estimate.low, estimate.high)))


def test_no_rollouts_have_no_mean() -> None:
    for nothing in ([], [[], []]):
        estimate = mean_and_stderr_clustered(nothing)
        assert math.isnan(estimate.mean)
        assert (estimate.prompts, estimate.rollouts) == (0, 0)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    draw = random.Random(1)
    covered = 0
    trials = 800
    for _ in range(trials):
        difficulties = [draw.betavariate(0.5, 0.5) for _ in range(25)]
        rewards = [[float(draw.random() < p) for _ in range(8)] for p in difficulties]
        estimate = mean_and_stderr_clustered(rewards)
        covered += estimate.low <= 0.5 <= estimate.high
    assert 0.92 < covered / trials < 0.975


# from a table, and confirmed with 40-digit arithmetic
@pytest.mark.parametrize(
    ("probability", "degrees", "value"),
    [
        (0.975, 1, 12.7062047361747),
        (0.975, 2, 4.30265272974946),
        (0.975, 4, 2.77644510519779),
        (0.975, 10, 2.22813885198627),
        (0.95, 5, 2.01504837333302),
        (0.995, 30, 2.74999565356722),
        (0.975, 100, 1.98397151852356),
        (0.975, 1000, 1.96233908082641),
        (0.9995, 3, 12.9239786366545),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(probability: float, degrees: int, value: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(value, rel=1e-8)
    assert t_quantile(1 - probability, degrees) == pytest.approx(-value, rel=1e-8)


@pytest.mark.parametrize("probability", [0.6, 0.9, 0.975, 0.9999, 0.9999999])
def test_quantiles_of_t_match_closed_forms(probability: float) -> None:
    assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-8)
    skew = 2 * probability - 1
    two = skew * math.sqrt(2 / (1 - skew**2))
    assert t_quantile(probability, 2) == pytest.approx(two, rel=1e-8)


def test_both_ways_to_a_quantile_of_t_agree_where_they_meet() -> None:
    for probability in (0.6, 0.95, 0.975, 0.999):
        below, here, above = (t_quantile(probability, degrees) for degrees in (999, 1000, 1001))
        assert below - here == pytest.approx(here - above, rel=1e-2)
    assert t_quantile(0.5, 7) == 0
    assert t_quantile(0.975, 10**9) == pytest.approx(1.95996398693, abs=1e-9)


def test_a_quantile_of_t_takes_milliseconds() -> None:
    started = time.perf_counter()
    for degrees in range(300, 320):
        t_quantile(0.973, degrees)
    assert time.perf_counter() - started < 2


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


def test_a_paired_difference_sees_what_separate_intervals_hide() -> None:
    before = {i: [float(i % 2)] * 2 + [0.0] for i in range(20)}
    after = {i: [float(i % 2)] * 2 + [float(i % 4 != 0)] for i in range(20)}
    estimate = paired_difference(before, after)
    assert estimate.mean == pytest.approx(0.25)
    assert estimate.low > 0
    alone = [mean_and_stderr_clustered(list(side.values())) for side in (before, after)]
    assert alone[0].high > alone[1].low


def test_a_paired_difference_is_the_paired_t_interval() -> None:
    estimate = paired_difference({"a": [0.0], "b": [0.5], "c": [1.0]}, {"a": [1.0], "b": [0.5], "c": [0.5, 1.0]})
    differences = [1, 0, -0.25]
    mean = sum(differences) / 3
    stderr = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)
    expected = Estimate(mean, stderr, mean - 4.30265272974946 * stderr, mean + 4.30265272974946 * stderr, 3, 7)
    for name in ("mean", "stderr", "low", "high"):
        assert getattr(estimate, name) == pytest.approx(getattr(expected, name)), name
    assert (estimate.prompts, estimate.rollouts) == (3, 7)


def test_only_prompts_scored_on_both_sides_are_paired() -> None:
    before = {1: [0.0], 2: [1.0], 3: [], 4: [0.0]}
    after = {1: [1.0], 2: [1.0], 3: [1.0], 5: [1.0]}
    estimate = paired_difference(before, after)
    assert (estimate.mean, estimate.prompts) == (0.5, 2)


def test_runs_without_any_difference_still_have_an_interval() -> None:
    same = {i: [1.0, 0.0] for i in range(10)}
    estimate = paired_difference(same, same)
    assert (estimate.mean, estimate.stderr) == (0, 0)
    assert (estimate.low, estimate.high) == pytest.approx((-0.308497, 0.308497), abs=1e-6)
    better = paired_difference({i: [0.0] for i in range(10)}, {i: [1.0] for i in range(10)})
    assert (better.low, better.high) == pytest.approx((1 - 2 * 0.308497, 1), abs=1e-6)


def test_one_pair_and_no_pair_have_no_interval() -> None:
    assert math.isnan(paired_difference({1: [0.0]}, {1: [1.0]}).low)
    assert math.isnan(paired_difference({1: [0.0]}, {2: [1.0]}).mean)


def test_a_confidence_outside_zero_and_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="confidence is 95"):
        mean_and_stderr_clustered(FIVE_PROMPTS, confidence=95)
