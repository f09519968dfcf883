"""Faults in real processes: a run continues or ends with its cause, loses no row unsaid, and can be finished.

The faults and what becomes of a run stand in `fault_cells.py`; what runs in `fault_world.py`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_cells import (
    CELLS,
    DEADLINE_S,
    MAY_BE_LEFT,
    STAGES,
    Ends,
    Goes,
    World,
    as_markdown,
    assert_ended_as,
    assert_every_row_is_accounted_for,
    assert_in_time,
    assert_no_files_are_left,
    assert_nothing_is_left,
    assert_recorded,
    go_on,
    settings_of,
)
from fault_world import SLOW_END
from safetensors.torch import load_file


def test_the_documented_table_is_the_tested_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "faults.md").read_text()
    assert as_markdown() in page
    for stage, meaning in STAGES.items():
        assert f"- **{stage}**: {meaning}" in page
    assert {stage for _, stage in CELLS} == set(STAGES)


RANKS = [("SIGTERM", "training"), ("disk full at checkpoint", "saving")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "stage", "ranks"),
    [(*cell, 2 if cell[0] == "rank 1 raises" else 1) for cell in CELLS] + [(*cell, 2) for cell in RANKS],
)
def test_a_run_continues_or_ends_with_its_cause(make_world: Any, fault: str, stage: str, ranks: int) -> None:
    assert_in_time(lambda: run_cell(make_world(fault, stage), CELLS[fault, stage], ranks))


def run_cell(world: World, cell: Goes | Ends, ranks: int) -> float:
    """Give the time until the end as a share of its bound; 0 where the run continues."""
    fault, share = world.fault, 0.0
    run = world.train(ranks, **settings_of(fault))
    world.inject(run)
    if isinstance(cell, Goes):
        assert world.wait(run) == 0, run.log.read_text()[-3000:]
    else:
        # a launcher has an exit code of its own
        share = assert_ended_as(world, run, cell, codes=(1, cell.code) if ranks > 1 else ())
    if fault != "kill -9":
        assert_nothing_is_left(world)
    if fault not in ("server hangs", "server dies", "kill -9"):
        assert not world.server_is_paused()
    if isinstance(cell, Ends):
        assert_recorded(world)
        go_on(world, ranks)
    assert world.record()["status"] == "finished"
    dropped = assert_every_row_is_accounted_for(world)
    assert set(dropped) == ({cell.dropped} if isinstance(cell, Goes) and cell.dropped else set())
    return share


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ended_by", ["grading_timeout", "SIGTERM"])
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
def test_a_second_ctrl_c_does_not_keep_a_run_from_giving_back_what_it_holds(make_world: Any) -> None:
    def run() -> float:
        world = make_world(SLOW_END, "syncing")
        run = world.train()
        world.interrupt_twice(run, apart_s=0.4)
        share = assert_ended_as(world, run, Ends("interrupted", code=130))
        assert_nothing_is_left(world)
        assert not world.server_is_paused()
        assert world.record()["stopped_by"] == "Ctrl-C"
        return share

    assert_in_time(run)


DRAINED = {"drain_before_sync": True}


def final_weights(world: World) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(world.directory / "run" / "checkpoint-6" / "model.safetensors")
    return loaded


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank_ends_the_other_and_the_same_command_reaches_the_weights_of_an_uninterrupted_run(
    make_world: Any, model_dir: Path
) -> None:
    whole = make_world("", "")
    finished = whole.train(2, **DRAINED)
    assert whole.wait(finished) == 0, finished.log.read_text()[-3000:]

    def run_killed() -> float:
        world = make_world("kill -9", "training")
        run = world.train(2, **DRAINED)
        world.inject(run, rank=1)
        share = assert_ended_as(world, run, Ends("Signal 9", r"\(SIGKILL\)"))
        assert_no_files_are_left(world)
        assert not world.server_is_paused()
        assert world.record()["status"] == "stopped"
        go_on(world, 2, **DRAINED)
        assert assert_every_row_is_accounted_for(world) == {}
        start = load_file(model_dir / "model.safetensors")
        wanted, found = final_weights(whole), final_weights(world)
        assert any(not torch.allclose(wanted[name], tensor, atol=1e-3) for name, tensor in start.items())
        for name, tensor in wanted.items():
            # the mean: Adam divides by the gradient's size, so rounding alone moves single weights by up to 1e-4
            assert (found[name] - tensor).abs().mean() < 1e-6, name
        return share

    assert_in_time(run_killed)
