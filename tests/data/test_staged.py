"""A curriculum in a plan: at every optimizer step what is trained comes from the stage that the file names."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.data.curriculum import Curriculum, Stage, WeightedDataset
from verifiers.data.plan import BatchPlan, make_plan
from verifiers.data.source import BlockPart
from verifiers.data.staged import StagedRows, rows_by_name
from verifiers.errors import ConfigError

ROWS = 200
"""Rows of each stage's own dataset: example id 200 s + r is row r of stage s."""


def staged(*until: int, **options: Any) -> StagedRows:
    """Stages that end at these steps and one after them, each with a dataset of its own."""
    names = [f"d{number}" for number in range(len(until) + 1)]
    stages = [
        Stage(f"s{number}", end, (WeightedDataset(name),))
        for number, (name, end) in enumerate(zip(names, [*until, None], strict=True))
    ]
    rows = {name: range(ROWS * number, ROWS * (number + 1)) for number, name in enumerate(names)}
    return StagedRows(Curriculum(tuple(stages), **options), rows)


def plan_with(source: StagedRows | None, **settings: Any) -> BatchPlan:
    base: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 24}
    plan = make_plan(**{**base, "num_prompts": 10**6, **settings})
    return dataclasses.replace(plan, source=source)


def trained_rows(plan: BatchPlan, step: int) -> list[int]:
    """Example ids of the completions behind an optimizer step, over all micro-steps and ranks."""
    found = []
    for micro_step in range(plan.gradient_accumulation_steps):
        at = plan.position(step, micro_step)
        rows = [example_id for example_id, _ in plan.requests(at.block_id)]
        order = plan.shuffle_order(at.block_id, plan.completions_per_block)
        size = plan.completions_per_micro_step
        found += [rows[place] for place in order[at.micro_batch * size : (at.micro_batch + 1) * size]]
    return found


def stages_by_step(plan: BatchPlan) -> list[set[int]]:
    return [{row // ROWS for row in trained_rows(plan, step)} for step in range(plan.max_steps)]


def what_the_file_says(until: Sequence[int], steps: int) -> list[set[int]]:
    return [{sum(end <= step for end in until)} for step in range(steps)]


RANKS, ACCUMULATION, PASSES, GROUPS, HELD = (1, 2, 4), (1, 2, 4), (1, 2), (2, 4, 16), (1, 2, 4)


def every_size(ranks: int, accumulation: int, passes: int) -> Iterator[dict[str, Any]]:
    for group, updates_a_pass in itertools.product(GROUPS, HELD):
        yield {
            "num_processes": ranks,
            "gradient_accumulation_steps": accumulation,
            "steps_per_generation": accumulation * updates_a_pass,
            "num_iterations": passes,
            "num_generations": group,
            "per_device_train_batch_size": 16 // (ranks * accumulation),
        }


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_stage_at_every_optimizer_step_is_the_files(ranks: int, accumulation: int, passes: int) -> None:
    for sizes in every_size(ranks, accumulation, passes):
        plan = plan_with(staged(8, 16), **sizes)
        assert stages_by_step(plan) == what_the_file_says((8, 16), plan.max_steps)


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_border_at_any_step_is_kept_or_refused(ranks: int, accumulation: int, passes: int) -> None:
    kept = 0
    for sizes, border in itertools.product(every_size(ranks, accumulation, passes), range(1, 10)):
        small = {**sizes, "per_device_train_batch_size": max(1, 8 // (ranks * accumulation))}
        if small["num_generations"] == 16 and small["steps_per_generation"] == accumulation:
            continue
        plain = plan_with(None, **small)
        inside = border % plain.updates_per_block
        # the rows of a block's first updates are trained again by its later passes
        whole = inside * plain.completions_per_update % plain.num_generations == 0 and (passes == 1 or not inside)
        if whole:
            kept += 1
            assert stages_by_step(plan_with(staged(border), **small)) == what_the_file_says((border,), 24)
        else:
            with pytest.raises(ConfigError, match=f"ends at optimizer step {border}, inside block"):
                plan_with(staged(border), **small)
    assert kept > 10


def test_a_stage_may_end_between_two_updates_of_a_block_and_rows_stay_on_their_side() -> None:
    plan = plan_with(staged(3, 6), steps_per_generation=4, num_generations=2)
    assert plan.updates_per_block == 4
    assert [[part.prompts for part in plan.parts(block)] for block in range(3)] == [[6, 2], [4, 4], [8]]
    assert [part.optimizer_step for part in plan.parts(1)] == [4, 6]
    assert stages_by_step(plan) == what_the_file_says((3, 6), 24)
    whole = plan_with(None, steps_per_generation=4, num_generations=2).shuffle_order(2, 16)
    assert plan.shuffle_order(2, 16) == whole
    for block, border in ((0, 12), (1, 8)):
        order = plan.shuffle_order(block, 16)
        assert sorted(order[:border]) == list(range(border))
        assert order[:border] != list(range(border))


@pytest.mark.parametrize(
    ("until", "sizes", "message"),
    [
        (5, {"num_iterations": 2}, r"ends at optimizer step 5, .* num_iterations=2 .* end it at step 4 and 6"),
        (5, {"num_iterations": 2, "steps_per_generation": 2}, r"inside block 1 of 4 updates, .* step 4 and 8"),
        (3, {"steps_per_generation": 4, "num_generations": 16}, r"cut a group of num_generations=16 .* 4 and 8"),
        (3, {"steps_per_generation": 4, "num_generations": 8}, r"after 4 completions: end it at step 2 and 4"),
    ],
)
def test_a_border_that_no_block_can_keep_is_refused_with_the_nearest_that_can(
    until: int, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_with(staged(until), **sizes)


@pytest.mark.parametrize("group", [4, 16])
@pytest.mark.parametrize("passes", PASSES)
def test_a_border_after_the_run_refuses_nothing_and_takes_no_step_before_it(group: int, passes: int) -> None:
    """Groups of 16 are cut by updates of 4 completions, so that no prompt begins where the last stage ends."""
    for held, max_steps in itertools.product((4, 8), range(1, 25)):
        sizes = {"steps_per_generation": held, "num_generations": group, "num_iterations": passes}
        for border in range(max_steps, max_steps + passes * held + 1):
            source = staged(border, border + 1, border + 3)
            plan = plan_with(source, max_steps=max_steps, **sizes)
            assert stages_by_step(plan) == [{0}] * max_steps, (sizes, max_steps, border)
            parts = [part for block in range(plan.blocks) for part in plan.parts(block)]
            assert all(part.prompts for part in parts)
            assert sum(part.prompts for part in parts) == plan.blocks * plan.prompts_per_block
            # what a dataserver asks of a request
            for part in parts:
                assert sum(at <= part.start for at in part.borders) == sum(
                    step <= part.optimizer_step for step in source.until_steps
                )


@settings(max_examples=30)
@given(
    st.sampled_from([2, 4]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.lists(st.integers(1, 20), min_size=1, max_size=3, unique=True),
    st.booleans(),
)
def test_a_run_draws_every_row_once_before_any_twice_over_all_stages(
    group: int, passes: int, updates: int, ends: list[int], replacement: bool
) -> None:
    ends = sorted(end * passes * updates for end in ends)
    names = "ab"
    stages = [
        Stage(str(number), end, (WeightedDataset(names[number % 2]), WeightedDataset("c", 2)))
        for number, end in enumerate([*ends, None])
    ]
    source = StagedRows(
        Curriculum(tuple(stages), 3, replacement), {"a": range(40), "b": range(40, 90), "c": range(90, 120)}
    )
    sizes = {"num_generations": group, "num_iterations": passes, "steps_per_generation": updates, "max_steps": 300}
    plan = plan_with(source, **sizes)
    drawn = [plan.example_ids(block) for block in range(60)]
    assert all(len(set(block)) == plan.prompts_per_block for block in drawn)
    assert [plan.example_ids(block) for block in reversed(range(60))] == drawn[::-1]
    for rows in () if replacement else (range(40), range(40, 90), range(90, 120)):
        of_dataset = [row for block in drawn for row in block if row in rows]
        for start in range(0, len(of_dataset), len(rows)):
            epoch = of_dataset[start : start + len(rows)]
            assert len(set(epoch)) == len(epoch)


def test_ranks_share_the_rows_that_one_rank_has() -> None:
    def drawn(ranks: int) -> list[list[int]]:
        plan = plan_with(staged(4), num_processes=ranks, per_device_train_batch_size=8 // ranks)
        return [plan.example_ids(block) for block in range(10)]

    assert drawn(1) == drawn(2) == drawn(4)


def test_a_spare_prompt_is_of_the_blocks_stage_and_none_of_its_own() -> None:
    plan = plan_with(staged(2, 6), steps_per_generation=4, num_generations=2)
    assert len(plan.parts(0)) == 2
    assert plan.spare_ids(0, 5) == []
    spares = plan.spare_ids(2, 50)
    assert len(set(spares)) == 50
    assert {row // ROWS for row in spares} == {2}
    assert not set(spares) & set(plan.example_ids(2))
    assert plan.spare_ids(2, 50) == spares
    assert len(plan_with(staged()).spare_ids(0, 10**4)) == ROWS - 1
    assert len(plan_with(None, num_prompts=30).spare_ids(0, 10**4)) == 29


def test_blocks_that_want_more_rows_than_a_dataset_has_are_found_before_the_run() -> None:
    stages = (Stage("one", 3, (WeightedDataset("a"),)), Stage("two", None, (WeightedDataset("b"),)))
    source = StagedRows(Curriculum(stages), {"a": range(4), "b": range(4, 7)})
    source.check_blocks(3, 4, [12])
    with pytest.raises(ConfigError, match="block 3 takes 4 different rows of dataset 'b', which has 3"):
        source.check_blocks(4, 4, [12])


def test_a_dataset_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage 's1' names dataset 'd1', which is not there; there are: d0"):
        StagedRows(staged(3).curriculum, {"d0": range(5)})


def test_the_table_says_which_stage_holds_when_and_which_is_never_reached(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    stages = (
        Stage("warm", 10, (WeightedDataset("a", 1), WeightedDataset("b", 3))),
        Stage("main", 40, (WeightedDataset("b"),)),
        Stage("late", None, (WeightedDataset("a"),)),
    )
    source = StagedRows(Curriculum(stages), {"a": range(1000), "b": range(1000, 1500)})
    lines = plan_with(source).describe().splitlines()
    assert "stage warm        steps 0 to 9: a 0.25 of prompts, 1,000 rows; b 0.75 of prompts, 500 rows" in lines
    assert "stage main        steps 10 to 23: b 1 of prompts, 500 rows" in lines
    assert "stage late        not reached in 24 steps: a 1 of prompts, 1,000 rows" in lines
    assert not any(line.startswith("epochs") for line in lines)
    assert [source.stage_name(step) for step in (9, 10, 39, 40)] == ["warm", "main", "main", "late"]


def test_a_fingerprint_holds_what_came_before_a_step_and_lets_the_rest_change() -> None:
    saved = staged(4, 8).fingerprint(6)
    assert staged(4, 8).fingerprint(6) == saved
    assert staged(4, 20).fingerprint(6) == saved
    assert staged(4).fingerprint(6) == saved
    assert staged(5, 8).fingerprint(6) != saved
    assert staged(4, 8, seed=1).fingerprint(6) != saved
    assert staged(4, 8).fingerprint(9) != saved


def test_rows_are_told_apart_by_a_column() -> None:
    assert rows_by_name(["x", None, "y", "x", ""]) == {"x": [0, 3], "default": [1, 4], "y": [2]}


def test_without_a_source_a_block_is_one_part() -> None:
    plan = plan_with(None, num_prompts=50, steps_per_generation=4)
    assert plan.parts(3) == [BlockPart(3, 12, 12, 4, 4, 4)]
