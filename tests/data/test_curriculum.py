"""Stages of datasets: which one is in force, what a block draws, and what is refused when the file is read."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.data.curriculum import Curriculum, Stage, WeightedDataset, staged_curriculum_from
from verifiers.errors import ConfigError

SIZES = {"a": 40, "b": 100, "c": 7}


def two_stages(**options: Any) -> Curriculum:
    return staged_curriculum_from(
        {
            "stages": [
                {"name": "warm", "until_step": 2, "datasets": ["a"]},
                {"name": "main", "until_step": 4, "datasets": [{"id": "a", "weight": 1}, {"id": "b", "weight": 3}]},
            ],
            **options,
        }
    )


def test_blocks_hold_the_stage_of_their_optimizer_step_with_one_pass_and_with_two() -> None:
    curriculum = two_stages()
    for passes in (1, 2):
        for step in range(0, 8, passes):
            drawn = curriculum.draw(SIZES, step // passes, step, 4, updates_per_block=passes)
            names = Counter(name for name, _ in drawn)
            assert names == ({"a": 4} if step < 2 else {"a": 1, "b": 3})


datasets = st.dictionaries(st.sampled_from("abc"), st.integers(1, 5), min_size=1)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Curriculum, int, int]:
    """Return a curriculum, prompts in a block and optimizer steps of a block, with borders between blocks."""
    updates = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    stages, until = [], 0
    for number, blocks in enumerate(lengths):
        until += blocks * updates
        mix = draw(datasets)
        stages.append(Stage(f"stage {number}", until, tuple(WeightedDataset(*item) for item in mix.items())))
    curriculum = Curriculum(tuple(stages), draw(st.integers(0, 99)), draw(st.booleans()))
    return curriculum, draw(st.integers(1, 7)), updates


def drawn_blocks(run: tuple[Curriculum, int, int], blocks: range) -> list[list[tuple[str, int]]]:
    curriculum, count, updates = run
    return [curriculum.draw(SIZES, block, block * updates, count, updates_per_block=updates) for block in blocks]


@settings(max_examples=60)
@given(runs())
def test_every_row_of_a_dataset_is_drawn_once_before_any_is_drawn_twice(run: tuple[Curriculum, int, int]) -> None:
    curriculum, count, _ = run
    blocks = drawn_blocks(run, range(60))
    assert all(len(set(block)) == count for block in blocks)
    if curriculum.replacement:
        return
    for name, size in SIZES.items():
        rows = [row for block in blocks for of, row in block if of == name]
        for start in range(0, len(rows), size):
            epoch = rows[start : start + size]
            assert len(set(epoch)) == len(epoch)


@settings(max_examples=40)
@given(runs(), st.randoms())
def test_a_block_depends_on_seed_block_and_stage_and_not_on_what_was_asked_before(
    run: tuple[Curriculum, int, int], chance: random.Random
) -> None:
    curriculum, count, updates = run
    in_order = drawn_blocks(run, range(25))
    asked = list(range(25))
    chance.shuffle(asked)
    assert [drawn_blocks(run, range(block, block + 1))[0] for block in asked] == [in_order[block] for block in asked]
    for block in asked:
        # any step of the block's stage gives the same rows
        again = curriculum.draw(SIZES, block, block * updates + updates - 1, count, updates_per_block=updates)
        assert again == in_order[block]


def test_with_replacement_rows_come_again_before_all_were_drawn() -> None:
    curriculum = staged_curriculum_from({"stages": [{"name": "all", "datasets": ["b"]}], "replacement": True})
    blocks = [curriculum.draw(SIZES, block, block, 10) for block in range(10)]
    assert all(len(set(block)) == 10 for block in blocks)
    assert len({prompt for block in blocks for prompt in block}) < 100


def test_a_cadence_that_does_not_fit_still_gets_the_rows_of_the_right_stage() -> None:
    # told of one update a block where there are two, so blocks seem to come too early
    names = [{name for name, _ in two_stages().draw(SIZES, step // 2, step, 4)} for step in range(8)]
    assert names == [{"a"}] * 2 + [{"a", "b"}] * 6


def test_a_block_far_on_costs_no_more_than_the_first() -> None:
    # counted up from the beginning, this would take hours
    assert len(two_stages().draw({"a": 10**4, "b": 10**5}, 10**9, 10**9, 64)) == 64


def stages(*given: Any) -> dict[str, Any]:
    return {"stages": list(given)}


def stage(name: str = "one", until_step: Any = None, datasets: Any = ("a",)) -> dict[str, Any]:
    return {"name": name, "until_step": until_step, "datasets": list(datasets)}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (stages(), "no stages"),
        ({}, r"the curriculum\.stages: Field required"),
        ({**stages(stage()), "sede": 1}, r"the curriculum\.sede is an unknown key"),
        (stages(stage(datasets=[])), "stage 'one' has no datasets"),
        (stages(stage(datasets=[{"id": "a", "wait": 2}])), r"stages\.0\.datasets\.0\.wait is an unknown key"),
        (stages(stage(datasets=[7])), r"stages\.0\.datasets\.0: .* \(given: 7\)"),
        (stages(stage(datasets=["a", "a"])), "names dataset 'a' twice"),
        (stages(stage(datasets=[{"id": "a", "weight": -1}])), "dataset 'a' has the weight -1"),
        (stages(stage(datasets=[{"id": "a", "weight": math.nan}])), "dataset 'a' has the weight nan"),
        (stages(stage(datasets=[{"id": "a", "weight": 0}])), "weights of stage 'one' sum to 0"),
        (stages(stage(until_step=0)), "until_step of stage 'one' is 0"),
        (stages(stage("one", 4), stage("one")), "two stages of the curriculum are called 'one'"),
        (stages(stage("one"), stage("two")), "'one' has no until_step, so stage 'two' cannot begin"),
        (stages(stage("one", 4), stage("two", 4)), "stage 'two' ends at step 4, and stage 'one' before it at 4"),
    ],
)
def test_what_cannot_be_a_curriculum_is_refused_in_one_sentence(mapping: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        staged_curriculum_from(mapping)


def test_a_dataset_that_is_not_there_is_named_with_its_stage() -> None:
    with pytest.raises(ConfigError, match="stage 'main' names dataset 'b', which is not there; there are: a, z"):
        two_stages().check({"a": 1, "z": 1}, 10)
    with pytest.raises(ConfigError, match="dataset 'b' of stage 'main' has no rows"):
        two_stages().check({"a": 1, "b": 0}, 10)


def test_a_horizon_shorter_than_the_run_is_a_warning_that_names_both(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "verifiers.data")
    two_stages().check(SIZES, 4)
    two_stages().check(SIZES, None)
    assert not caplog.records
    two_stages().check(SIZES, 9)
    assert [record.getMessage() for record in caplog.records] == [
        "the curriculum ends at step 4, the run at step 9: stage 'main' holds for the steps between."
    ]
