"""Orders of rows: TRL's structure, chunks back in order, draws by weight, every row once before any twice."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.data.sampler import (
    RepeatSampler,
    interleave,
    reorder_chunks,
    row_without_replacement,
    rows_at_random,
    shares,
    whole_weights,
)
from verifiers.errors import ConfigError
from verifiers.keywords import warn_once

SIZES = [(7, 2, 3, 4), (2, 3, 2, 1), (8, 1, 2, 2), (24, 3, 12, 2), (5, 4, 1, 1), (3, 2, 4, 2), (0, 2, 1, 1)]


def test_seven_rows_repeat_in_chunks_of_three_and_the_last_row_is_dropped() -> None:
    sampler = RepeatSampler(list("abcdefg"), 2, batch_size=3, repeat_count=4, shuffle=False)
    assert list(sampler) == [0, 0, 1, 1, 2, 2] * 4 + [3, 3, 4, 4, 5, 5] * 4
    assert len(sampler) == 48


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_length_is_the_number_of_rows_yielded(shuffle: bool) -> None:
    for rows, mini, batch, repeat in SIZES:
        sampler = RepeatSampler(rows, mini, batch, repeat, shuffle=shuffle, seed=1)
        assert len(list(sampler)) == len(sampler)


def test_a_seed_fixes_the_order_and_each_epoch_has_its_own() -> None:
    first, second = RepeatSampler(50, 2, 5, seed=3), RepeatSampler(50, 2, 5, seed=3)
    epochs = [list(first), list(first)]
    assert epochs == [list(second), list(second)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert list(RepeatSampler(50, 2, 5, seed=4)) != epochs[0]


def test_a_sampler_without_a_seed_can_be_repeated_from_the_seed_it_drew() -> None:
    sampler = RepeatSampler(30, 1)
    assert list(RepeatSampler(30, 1, seed=sampler.seed)) == list(sampler)


def test_a_dropped_tail_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="verifiers.data"):
        sampler = RepeatSampler(7, 1, batch_size=3, seed=0)
        list(sampler), list(sampler), len(sampler)
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 7 rows are left out of each epoch: they do not fill a batch of 3 distinct rows."
    ]


@pytest.mark.parametrize(
    ("given_sizes", "word"),
    [
        ({"mini_repeat_count": 0}, "mini_repeat_count is 0"),
        ({"mini_repeat_count": 1, "batch_size": -1}, "batch_size is -1"),
        ({"mini_repeat_count": 1, "repeat_count": 1.5}, "repeat_count is 1.5"),
        ({"mini_repeat_count": 1, "data_source": iter(())}, "no length"),
        ({"mini_repeat_count": 1, "data_source": -2}, "data_source is -2"),
    ],
)
def test_a_bad_size_is_an_error_that_names_it(given_sizes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        RepeatSampler(**{"data_source": [1, 2], **given_sizes})


# -- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_generations", "sizes"), [(4, (2, 2)), (8, (3, 3, 2)), (3, (1, 1, 1))])
def test_chunked_generation_comes_back_in_prompt_major_order(num_generations: int, sizes: tuple[int, ...]) -> None:
    generations = iter(range(num_generations))
    made_at_once = [list(itertools.islice(generations, size)) for size in sizes]
    chunks = [[((p, g), f"p{p}g{g}") for p in range(2) for g in chunk] for chunk in made_at_once]
    expected = [f"p{p}g{g}" for p in range(2) for g in range(num_generations)]
    for arrival in itertools.permutations(chunks):
        assert reorder_chunks(arrival, num_generations) == expected
        assert reorder_chunks([chunk[::-1] for chunk in arrival], num_generations) == expected


def test_a_missing_or_doubled_generation_is_never_guessed() -> None:
    with pytest.raises(ConfigError, match=r"\[\(0, 1\)\] are missing"):
        reorder_chunks([[((0, 0), "a")]], 2)
    with pytest.raises(ConfigError, match="arrived twice"):
        reorder_chunks([[((0, 0), "a")], [((0, 0), "b")]], 1)
    with pytest.raises(ConfigError, match=r"\[\(0, 1\)\] do not belong"):
        reorder_chunks([[((0, 0), "a"), ((0, 1), "b")]], 1)


# -- draws by weight ------------------------------------------------------------------------------------------------

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
