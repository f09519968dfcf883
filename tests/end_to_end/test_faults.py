"""The fault matrix, each cell with real processes: a run continues or ends with its cause, and loses no row unsaid.

The cells and what they expect stand in `fault_matrix.py`; what runs in `fault_world.py`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_cells import (
    MAY_BE_LEFT,
    assert_ended_as,
    assert_every_row_is_accounted_for,
    assert_in_time,
    assert_no_files_are_left,
    assert_nothing_is_left,
    assert_recorded,
    go_on,
    settings_of,
)
from fault_matrix import CELLS, DEADLINE_S, FAULTS, STAGES, Cell, Ends, Goes, Never, as_markdown
from fault_world import SLOW_END


def test_every_fault_in_every_stage_has_a_cell() -> None:
    assert set(CELLS) == {(fault, stage) for fault in FAULTS for stage in STAGES}
    assert len(CELLS) == 14 * 5
    assert all(cell.why for cell in CELLS.values() if isinstance(cell, Never))


def test_the_documented_table_is_the_tested_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "faults.md").read_text()
    assert as_markdown() in page
    for stage, meaning in STAGES.items():
        assert f"- **{stage}**: {meaning}" in page


def cells() -> Iterator[Any]:
    for (fault, stage), cell in CELLS.items():
        if not isinstance(cell, Never):
            yield pytest.param(fault, stage, cell, id=f"{fault} while {stage}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fault", "stage", "cell"), list(cells()))
def test_a_run_continues_or_ends_with_its_cause(make_world: Any, fault: str, stage: str, cell: Cell) -> None:
    assert_in_time(lambda: run_cell(make_world(fault, stage), cell))


def run_cell(world: Any, cell: Cell) -> float:
    """Give the time until the end as a share of its bound; 0 where the run continues."""
    fault = world.fault
    ranks = 2 if fault == "rank 1 raises" else 1
    run = world.train(ranks, **settings_of(fault))
    world.inject(run)
    share = 0.0
    if isinstance(cell, Goes):
        assert world.wait(run) == 0, run.log.read_text()[-3000:]
    else:
        assert isinstance(cell, Ends)
        share = assert_ended_as(world, run, cell)
    if fault != "kill -9":
        assert_nothing_is_left(world)
    if fault not in ("server hangs", "server dies", "kill -9"):
        assert not world.server_is_paused()
    if isinstance(cell, Ends):
        assert_recorded(world)
        go_on(world, ranks)
    assert world.record()["status"] == "finished"
    dropped = assert_every_row_is_accounted_for(world)
    expected_reasons = {cell.dropped} if isinstance(cell, Goes) and cell.dropped else set()
    assert set(dropped) == expected_reasons
    return share


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ended_by", ["async_generation_timeout", "grading_timeout", "SIGTERM"])
def test_an_environment_that_blocks_the_event_loop_ends_the_run_and_is_named(make_world: Any, ended_by: str) -> None:
    def run() -> float:
        world = make_world("environment blocks", "training")
        if ended_by == "SIGTERM":
            run = world.train()
            world.inject(run)
            run.kill(signal.SIGTERM)
            expected = Ends("ended by SIGTERM", code=143)
        else:
            run = world.train(**{ended_by: DEADLINE_S})
            world.inject(run)
            words = r"rollout \(.*fault_world.py, line \d+\) (has blocked|blocks) the event loop"
            expected = Ends("DeadlineError", words, within_s=5.0 + DEADLINE_S)
        share = assert_ended_as(world, run, expected)
        # it sleeps on in its thread, which ends with the process
        assert set(world.ended()["threads"]) <= {*MAY_BE_LEFT, "verifiers-servers"}
        assert_no_files_are_left(world)
        return share

    assert_in_time(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_environment_that_holds_the_interpreter_ends_the_run_and_is_named(make_world: Any) -> None:
    world = make_world("interpreter held", "training")
    run = world.train(async_generation_timeout=DEADLINE_S, grading_timeout=DEADLINE_S)
    world.inject(run)
    assert world.wait(run) == 1
    assert "in tries_too_many_ways" in run.log.read_text()
    go_on(world)
    assert world.record()["status"] == "finished"
    assert_every_row_is_accounted_for(world)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", ["training", "syncing"])
def test_a_second_ctrl_c_does_not_keep_a_run_from_giving_back_what_it_holds(make_world: Any, stage: str) -> None:
    def run() -> float:
        world = make_world(SLOW_END, stage)
        run = world.train()
        world.interrupt_twice(run, apart_s=0.4)
        share = assert_ended_as(world, run, Ends("interrupted", code=130))
        assert_nothing_is_left(world)
        assert not world.server_is_paused()
        assert world.record()["stopped_by"] == "Ctrl-C"
        return share

    assert_in_time(run)
