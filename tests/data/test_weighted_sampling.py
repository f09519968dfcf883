"""Draws by weight: exact in the long run, never far off on the way, and every row once before any twice."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.data.weighted_sampling import (
    interleave,
    row_without_replacement,
    rows_at_random,
    shares,
    whole_weights,
)

weights_of_any_kind = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@given(weights_of_any_kind, st.integers(0, 400), st.integers(0, 60))
def test_shares_are_the_counts_of_one_interleaved_sequence(weights: list[int], start: int, count: int) -> None:
    before, after = shares(weights, start), shares(weights, start + count)
    drawn = Counter(interleave(weights, start, start + count))
    assert sum(after) == start + count
    assert [after[index] - before[index] for index in range(len(weights))] == [
        drawn[index] for index in range(len(weights))
    ]


@given(weights_of_any_kind, st.integers(0, 10**12))
def test_shares_never_stray_from_the_weights_and_meet_them_after_each_round(weights: list[int], total: int) -> None:
    whole = sum(weights)
    for weight, count in zip(weights, shares(weights, total), strict=True):
        assert abs(count - total * weight / whole) < len(weights)
        assert count or not weight or total * weight / whole < len(weights)
    rounds = total // whole
    assert shares(weights, rounds * whole) == [rounds * weight for weight in weights]


@given(weights_of_any_kind, st.integers(1, 300))
def test_a_share_never_shrinks(weights: list[int], most: int) -> None:
    counts = [shares(weights, total) for total in range(most)]
    assert all(one <= other for before, after in pairwise(counts) for one, other in zip(before, after, strict=True))


def test_weights_of_1_and_3_give_a_quarter_and_three_quarters() -> None:
    assert shares([1, 3], 4_000_000) == [1_000_000, 3_000_000]
    assert Counter(interleave([1, 3], 10**9, 10**9 + 400)) == {0: 100, 1: 300}


@pytest.mark.parametrize(
    ("weights", "whole"),
    [((1.0, 3.0), (1, 3)), ((0.1, 0.9), (1, 9)), ((0.5, 0.25, 0.25), (2, 1, 1)), ((0.0, 2.5), (0, 5))],
)
def test_weights_are_taken_as_they_are_written(weights: tuple[float, ...], whole: tuple[int, ...]) -> None:
    found = whole_weights(weights)
    assert [part * sum(whole) for part in found] == [part * sum(found) for part in whole]


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 5), st.integers(0, 1000))
def test_every_row_comes_once_an_epoch_and_any_window_has_different_rows(
    size: int, window: int, epochs: int, key: int
) -> None:
    window = min(window, size)
    drawn = [row_without_replacement(size, str(key), place, window) for place in range((epochs + 2) * size)]
    for epoch in range(epochs + 2):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))
    for start in range(len(drawn) - window + 1):
        assert len(set(drawn[start : start + window])) == window


def test_a_large_dataset_has_another_order_in_each_epoch_and_apart_from_another_of_its_size() -> None:
    def epoch(number: int, key: str) -> list[int]:
        return [row_without_replacement(90, key, place, 8) for place in range(number * 90, (number + 1) * 90)]

    assert epoch(0, "0:a") != epoch(1, "0:a")
    assert epoch(0, "0:a") != epoch(0, "0:b")
    assert epoch(0, "0:a") != epoch(0, "1:a")


@given(st.integers(1, 40), st.data())
def test_rows_drawn_at_random_differ_and_fewer_are_the_beginning_of_more(size: int, data: st.DataObject) -> None:
    most = data.draw(st.integers(0, size))
    rows = rows_at_random(size, "key", most)
    assert len(set(rows)) == most
    assert rows_at_random(size, "key", most // 2) == rows[: most // 2]


def test_any_row_is_drawn_as_often_as_another() -> None:
    found = Counter(rows_at_random(10, str(key), 1)[0] for key in range(5000))
    assert set(found) == set(range(10))
    assert max(found.values()) < 1.25 * min(found.values())
