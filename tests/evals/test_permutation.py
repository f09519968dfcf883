from __future__ import annotations

import itertools
import math

import pytest

from verifiers.evals.statistics import shuffle_test, sign_flip_test


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
