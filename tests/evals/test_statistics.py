from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from verifiers.errors import ConfigError
from verifiers.evals.statistics import (
    Estimate,
    best_at_k,
    clopper_pearson,
    detectable_difference,
    mean_and_stderr_clustered,
    paired_difference,
    pass_at_k,
    pass_hat_k,
    shuffle_test,
    sign_flip_test,
    sizes_up_to,
    t_quantile,
    unpaired_difference,
)
from verifiers.evals.summary import split_variance

FIVE_PROMPTS = [[1, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]


def test_a_prompt_counts_once_however_many_of_its_rollouts_were_scored() -> None:
    estimate = mean_and_stderr_clustered([[2, 4, 6], [0], [1, 0]])
    means = [4, 0, 0.5]
    assert estimate.mean == pytest.approx(1.5)
    assert estimate.stderr == pytest.approx(math.sqrt(sum((mean - 1.5) ** 2 for mean in means) / 2 / 3))
    assert estimate.high - estimate.mean == pytest.approx(4.302652729911 * estimate.stderr)
    assert estimate.low == pytest.approx(3 - estimate.high)
    assert (estimate.prompts, estimate.rollouts) == (3, 6)


def test_an_interval_does_not_reach_beyond_what_rewards_can_be() -> None:
    nearly = [[1.0] * 8, [1.0] * 8, [1.0] * 7 + [0.0]]
    estimate = mean_and_stderr_clustered(nearly)
    assert estimate.high == 1
    assert estimate.low == pytest.approx(estimate.mean - 4.302652729911 * estimate.stderr)
    free = mean_and_stderr_clustered(nearly, bounds=(-math.inf, math.inf))
    assert free.high > 1
    doubled = mean_and_stderr_clustered([[2 * reward for reward in rewards] for rewards in nearly], bounds=(0, 2))
    assert (doubled.low, doubled.high) == pytest.approx((2 * estimate.low, 2))
    with pytest.raises(ConfigError, match="lies outside"):
        mean_and_stderr_clustered([[0.5], [1.5]], bounds=(0, 1))


def test_prompts_that_are_all_right_or_all_wrong_have_the_exact_interval() -> None:
    # 7 of 10 by Clopper and Pearson
    estimate = mean_and_stderr_clustered([[1.0, 1.0]] * 7 + [[0.0]] * 3)
    assert (estimate.mean, estimate.stderr) == pytest.approx((0.7, math.sqrt(0.21 / 9)))
    assert (estimate.low, estimate.high) == pytest.approx((0.347547, 0.933260), abs=1e-6)
    scaled = mean_and_stderr_clustered([[3.0]] * 7 + [[1.0]] * 3, bounds=(1, 3))
    assert (scaled.low, scaled.high) == pytest.approx((1 + 2 * estimate.low, 1 + 2 * estimate.high))


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
        (0.975, 10**7, 1.9599642217671),
        (0.5, 7, 0.0),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(probability: float, degrees: int, value: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(value, rel=1e-8)
    assert t_quantile(1 - probability, degrees) == pytest.approx(-value, rel=1e-8)


def test_a_paired_difference_is_the_paired_t_interval() -> None:
    before, after = {"a": [0.0], "b": [0.5], "c": [1.0]}, {"a": [1.0], "b": [0.5], "c": [0.5, 1.0]}
    estimate = paired_difference(before, after, bounds=(-math.inf, math.inf))
    differences = [1, 0, -0.25]
    mean = sum(differences) / 3
    stderr = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2 / 3)
    expected = Estimate(mean, stderr, mean - 4.30265272974946 * stderr, mean + 4.30265272974946 * stderr, 3, 7)
    for name in ("mean", "stderr", "low", "high"):
        assert getattr(estimate, name) == pytest.approx(getattr(expected, name)), name
    assert (estimate.prompts, estimate.rollouts) == (3, 7)
    cut = paired_difference(before, after)
    assert (cut.low, cut.high) == (-1, 1)


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


def test_a_confidence_outside_zero_and_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="confidence is 95"):
        mean_and_stderr_clustered(FIVE_PROMPTS, confidence=95)


def test_an_unpaired_difference_is_the_interval_of_welch() -> None:
    before, after = [[20.0], [22.0], [19.0], [24.0]], [[30.0, 34.0], [28.0], [25.0]]
    estimate = unpaired_difference(before, after)
    a, b = (20 + 22 + 19 + 24) / 4, (32 + 28 + 25) / 3
    squares = [sum((x - a) ** 2 for x in (20, 22, 19, 24)) / 3 / 4, sum((x - b) ** 2 for x in (32, 28, 25)) / 2 / 3]
    degrees = sum(squares) ** 2 / (squares[0] ** 2 / 3 + squares[1] ** 2 / 2)
    assert 3 < degrees < 4
    assert estimate.mean == pytest.approx(b - a)
    assert estimate.stderr == pytest.approx(math.sqrt(sum(squares)))
    assert estimate.high - estimate.mean == pytest.approx(t_quantile(0.975, degrees) * estimate.stderr)
    assert t_quantile(0.975, 4) < t_quantile(0.975, degrees) < t_quantile(0.975, 3)
    assert (estimate.prompts, estimate.rollouts) == (7, 8)


def test_unpaired_runs_without_variation_are_not_certain() -> None:
    estimate = unpaired_difference([[0.0]] * 10, [[1.0]] * 10)
    # each side by Clopper and Pearson at 97.5 %
    assert (estimate.low, estimate.high) == pytest.approx((1 - 2 * (1 - 0.0125**0.1), 1))
    assert math.isnan(unpaired_difference([[0.0]], [[1.0], [0.0]]).low)
    assert math.isnan(unpaired_difference([], [[1.0], [0.0]]).mean)


def test_the_detectable_difference_is_found_four_times_out_of_five() -> None:
    random, prompts, spread = np.random.default_rng(3), 40, 0.3
    true = detectable_difference(spread / math.sqrt(prompts), prompts - 1)
    found = 0
    for _ in range(2000):
        rewards = random.normal(true, spread, prompts).tolist()
        found += mean_and_stderr_clustered([[reward] for reward in rewards]).low > 0
    assert 0.77 < found / 2000 < 0.83
    assert math.isnan(detectable_difference(0.0, 9))
    assert math.isnan(detectable_difference(math.nan, 0))


@pytest.mark.parametrize(("right", "trials"), [(3, 7), (40, 1000), (1, 2), (999, 1000)])
def test_exact_intervals_leave_half_the_error_to_each_side(right: int, trials: int) -> None:
    low, high = clopper_pearson(right, trials, 0.9)
    # the binomial tails themselves
    at_least = math.fsum(math.comb(trials, i) * low**i * (1 - low) ** (trials - i) for i in range(right, trials + 1))
    at_most = math.fsum(math.comb(trials, i) * high**i * (1 - high) ** (trials - i) for i in range(right + 1))
    assert (at_least, at_most) == pytest.approx((0.05, 0.05), rel=1e-7)


def test_few_prompts_are_enumerated() -> None:
    differences = [0.5, -0.125, 0.25, 0.375, 0.0, 0.125]
    observed = abs(sum(differences))
    flipped = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=6)
    ]
    test = sign_flip_test(differences)
    assert (test.p, test.exact) == (sum(total >= observed for total in flipped) / 64, True)
    assert sign_flip_test([0.1] * 6).p == 2 / 64


def test_rounding_does_not_make_equal_sums_differ() -> None:
    # 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in the last digit
    assert sign_flip_test([0.1, 0.2, 0.3]).p == 2 / 8
    assert sign_flip_test([0.3, -0.1, -0.2]).p == 1


def test_many_prompts_are_drawn_and_agree_with_the_normal_limit() -> None:
    differences = [0.1] * 60 + [-0.1] * 40
    test = sign_flip_test(differences)
    assert not test.exact
    # P(|heads - 50| >= 10) of 100 tosses
    exact = 2 * sum(math.comb(100, k) for k in range(60, 101)) / 2**100
    assert test.p == pytest.approx(exact, abs=0.005)


def test_the_same_seed_gives_the_same_p_and_p_is_never_zero() -> None:
    differences = [0.01 * n for n in range(-20, 25)]
    assert sign_flip_test(differences, seed=4) == sign_flip_test(differences, seed=4)
    assert sign_flip_test(differences, seed=4).p != sign_flip_test(differences, seed=5).p
    sure = sign_flip_test([1.0] * 300, draws=1000)
    assert sure.p == pytest.approx(1 / 1001)


def test_without_data_there_is_no_p_and_without_differences_it_is_one() -> None:
    assert math.isnan(sign_flip_test([]).p)
    assert sign_flip_test([0.0] * 40).p == 1
    assert math.isnan(shuffle_test([], [1.0]).p)


def test_unpaired_values_are_permuted() -> None:
    before, after = [0.0, 0.1, 0.2, 0.3], [0.9, 1.0, 0.8, 0.7]
    # 2 of the 70 deals are as far apart
    assert shuffle_test(before, after).p == pytest.approx(2 / 70, abs=0.004)
    assert shuffle_test(before, after, seed=1) == shuffle_test(before, after, seed=1)
    assert shuffle_test([1.0, 0.0], [0.0, 1.0, 0.0, 1.0]).p == 1


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


@pytest.mark.parametrize("large", [1e174, 1e308])
def test_numbers_whose_squares_or_sums_are_too_large_have_no_error_and_raise_none(large: float) -> None:
    values = [[0.0, large], [large, large], [-large, large]]
    for found in (
        mean_and_stderr_clustered(values),
        paired_difference(dict(enumerate(values)), dict(enumerate(values[::-1]))),
        unpaired_difference(values, [[0.0], [1.0]]),
    ):
        assert not found.stderr < math.inf
    assert not math.isfinite(split_variance(values).within)
    assert mean_and_stderr_clustered([[1.3e154], [-1.3e154]]).stderr == math.inf


# -- by simulation ---------------------------------------------------------------------------------------------------

SIMULATIONS, ROLLOUTS = 2000, 8


@pytest.mark.parametrize("prompts", [10, 30, 100])
def test_intervals_of_95_percent_cover_the_truth_95_times_in_100(prompts: int) -> None:
    random = np.random.default_rng(prompts)
    covered = covered_naively = 0
    for _ in range(SIMULATIONS):
        difficulties = random.beta(2, 2, size=(prompts, 1))
        rewards = (random.random((prompts, ROLLOUTS)) < difficulties).astype(float)
        estimate = mean_and_stderr_clustered(rewards.tolist())
        covered += estimate.low <= 0.5 <= estimate.high
        mean = float(rewards.mean())
        covered_naively += abs(mean - 0.5) <= 1.96 * math.sqrt(mean * (1 - mean) / rewards.size)
    assert 0.93 <= covered / SIMULATIONS <= 0.97
    # independent rollouts would make this 95 % too: the rollouts of a prompt are not independent
    assert covered_naively / SIMULATIONS < 0.85


@pytest.mark.parametrize(("prompts", "chance"), [(5, 0.95), (10, 0.9), (20, 0.02), (10, 0.5)])
def test_intervals_at_the_edges_cover_at_least_what_they_say(prompts: int, chance: float) -> None:
    random = np.random.default_rng(7)
    covered = 0
    for _ in range(SIMULATIONS):
        rewards = (random.random((prompts, 1)) < chance).astype(float).tolist()
        estimate = mean_and_stderr_clustered(rewards)
        covered += estimate.low <= chance <= estimate.high
    assert covered / SIMULATIONS >= 0.945
