from __future__ import annotations

import logging
from typing import Any

import pytest

from verifiers.data.batch_plan import make_plan
from verifiers.data.sampler import RepeatSampler
from verifiers.errors import ConfigError

SIZES = [(7, 2, 3, 4), (2, 3, 2, 1), (8, 1, 2, 2), (24, 3, 12, 2), (5, 4, 1, 1), (3, 2, 4, 2), (0, 2, 1, 1)]


def test_seven_rows_repeat_in_chunks_of_three_and_the_last_row_is_dropped() -> None:
    sampler = RepeatSampler(list("abcdefg"), 2, batch_size=3, repeat_count=4, shuffle=False)
    assert list(sampler) == [0, 0, 1, 1, 2, 2] * 4 + [3, 3, 4, 4, 5, 5] * 4
    assert len(sampler) == 48


def test_small_chunks_repeat_as_the_worked_examples_say() -> None:
    assert list(RepeatSampler(2, 3, batch_size=2, shuffle=False)) == [0, 0, 0, 1, 1, 1]
    order = [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7]
    assert list(RepeatSampler(8, 1, batch_size=2, repeat_count=2, shuffle=False)) == order


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


def test_a_resumed_sampler_continues_with_the_epoch_it_is_told() -> None:
    sampler, resumed = RepeatSampler(20, 1, seed=9), RepeatSampler(20, 1, seed=9)
    list(sampler)
    resumed.set_epoch(1)
    assert list(resumed) == list(sampler)


def test_a_sampler_without_a_seed_can_be_repeated_from_the_seed_it_drew() -> None:
    sampler = RepeatSampler(30, 1)
    assert list(RepeatSampler(30, 1, seed=sampler.seed)) == list(sampler)


def test_the_sampler_visits_prompts_in_the_order_of_the_plan() -> None:
    plan = make_plan(per_device_train_batch_size=12, num_generations=3, max_steps=5, num_prompts=22, seed=6)
    sampler = RepeatSampler(22, 3, batch_size=plan.prompts_per_block, seed=6)
    planned = [example_id for block in range(5) for example_id, _ in plan.requests(block)]
    assert list(sampler) == planned


def test_a_dropped_tail_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="verifiers.data"):
        sampler = RepeatSampler(7, 1, batch_size=3, seed=0)
        list(sampler), list(sampler), len(sampler)
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 7 rows are left out of each epoch: they do not fill a batch of 3 distinct rows."
    ]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"mini_repeat_count": 0}, "mini_repeat_count is 0"),
        ({"mini_repeat_count": 1, "batch_size": -1}, "batch_size is -1"),
        ({"mini_repeat_count": 1, "repeat_count": 1.5}, "repeat_count is 1.5"),
        ({"mini_repeat_count": 1, "data_source": iter(())}, "no length"),
        ({"mini_repeat_count": 1, "data_source": -2}, "data_source is -2"),
    ],
)
def test_a_bad_size_is_an_error_that_names_it(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        RepeatSampler(**{"data_source": [1, 2], **settings})
