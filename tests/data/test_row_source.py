"""A curriculum in a plan: at every optimizer step what is trained comes from the stage that the file names."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from verifiers.data.batch_plan import BatchPlan, make_plan
from verifiers.data.curriculum import Curriculum, Stage, WeightedDataset
from verifiers.data.row_source import StagedRows, rows_by_name
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
    """Return the example ids of the completions behind an optimizer step, over all micro-steps and ranks."""
    found = []
    for micro_step in range(plan.gradient_accumulation_steps):
        block_id, in_block = plan.position(step, micro_step)
        rows = [example_id for example_id, _ in plan.requests(block_id)]
        order = plan.shuffle_order(block_id, plan.completions_per_block)
        size = plan.completions_per_micro_step
        found += [rows[place] for place in order[in_block * size : (in_block + 1) * size]]
    return found


def stages_by_step(plan: BatchPlan) -> list[set[int]]:
    return [{row // ROWS for row in trained_rows(plan, step)} for step in range(plan.max_steps)]


def what_the_file_says(until: Sequence[int], steps: int) -> list[set[int]]:
    return [{sum(end <= step for end in until)} for step in range(steps)]


SIZES = [
    # ranks, accumulation, passes, generations, updates a pass
    {"num_processes": 1, "gradient_accumulation_steps": 1, "num_iterations": 1, "num_generations": 16, "updates": 1},
    {"num_processes": 2, "gradient_accumulation_steps": 4, "num_iterations": 1, "num_generations": 4, "updates": 4},
    {"num_processes": 4, "gradient_accumulation_steps": 2, "num_iterations": 2, "num_generations": 2, "updates": 2},
]


def sized(source: StagedRows | None, *, updates: int, **sizes: Any) -> BatchPlan:
    ranks, accumulation = sizes["num_processes"], sizes["gradient_accumulation_steps"]
    return plan_with(
        source,
        steps_per_generation=accumulation * updates,
        per_device_train_batch_size=16 // (ranks * accumulation),
        **sizes,
    )


@pytest.mark.parametrize("sizes", SIZES)
def test_the_stage_at_every_optimizer_step_is_the_files_where_stages_end_with_blocks(sizes: dict[str, Any]) -> None:
    plan = sized(staged(8, 16), **sizes)
    assert stages_by_step(plan) == what_the_file_says((8, 16), plan.max_steps)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("until", [1, 3, 5, 9])
def test_a_stage_that_ends_inside_a_block_holds_to_the_end_of_it(until: int, sizes: dict[str, Any]) -> None:
    plan = sized(staged(until), **sizes)
    rounded = -(-until // plan.updates_per_block) * plan.updates_per_block
    assert stages_by_step(plan) == what_the_file_says((rounded,), plan.max_steps)
    assert [plan.stage_name(step) for step in (rounded - 1, rounded)] == ["s0", "s1"]
    lines = plan.describe().splitlines()
    assert any(line.startswith(f"stage s0          steps 0 to {rounded - 1}") for line in lines)
    said = f"(until_step {until} lies inside a block of {plan.updates_per_block})"
    assert any(said in line for line in lines) == (rounded != until)


def test_a_stage_that_would_get_no_block_is_refused_with_a_step_that_gives_it_one() -> None:
    plan = plan_with(None, steps_per_generation=4)

    def check(*until: int) -> None:
        source = staged(*until)
        sizes = (plan.blocks, plan.prompts_per_block, plan.updates_per_block)
        source.curriculum.check_blocks(source.sizes, *sizes)

    with pytest.raises(
        ConfigError, match=r"stage 's1' .* ends at optimizer step 7, inside the block .* end it at step 12"
    ):
        check(5, 7)
    check(5, 12)
    check(5, 9)
    # after the run's last block
    check(22, 23, 24)
    check(30, 31)


def test_a_stage_that_ends_after_the_run_takes_no_step_of_it() -> None:
    for passes, held, max_steps in itertools.product((1, 2), (4, 8), (1, 7, 8, 24)):
        for border in range(max_steps, max_steps + passes * held + 1):
            source = staged(border, border + 1, border + 3)
            plan = plan_with(source, max_steps=max_steps, steps_per_generation=held, num_iterations=passes)
            assert stages_by_step(plan) == [{0}] * max_steps, (passes, held, max_steps, border)


def test_a_replacement_is_of_the_blocks_stage_and_none_of_its_own_prompts() -> None:
    plan = plan_with(staged(4, 8), steps_per_generation=4, num_generations=2)
    rows = plan.replacement_ids(2, 50)
    assert len(set(rows)) == 50
    assert {row // ROWS for row in rows} == {2}
    assert not set(rows) & set(plan.example_ids(2))
    assert plan.replacement_ids(2, 50) == rows
    assert len(plan_with(staged()).replacement_ids(0, 10**4)) == ROWS - 1
    assert len(plan_with(None, num_prompts=30).replacement_ids(0, 10**4)) == 29


def test_blocks_that_want_more_rows_than_a_dataset_has_are_found_before_the_run() -> None:
    stages = (Stage("one", 3, (WeightedDataset("a"),)), Stage("two", None, (WeightedDataset("b"),)))
    source = StagedRows(Curriculum(stages), {"a": range(4), "b": range(4, 7)})
    source.curriculum.check_blocks(source.sizes, 3, 4, 1)
    with pytest.raises(ConfigError, match="block 3 takes 4 different rows of dataset 'b', which has 3"):
        source.curriculum.check_blocks(source.sizes, 4, 4, 1)


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
