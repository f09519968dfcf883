"""Faults of the matrix on two processes: all of them end in time, rank 0 says why, and the same command resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_cells import (
    World,
    assert_ended_as,
    assert_every_row_is_accounted_for,
    assert_in_time,
    assert_no_files_are_left,
    assert_nothing_is_left,
    assert_recorded,
    go_on,
    settings_of,
)
from fault_matrix import CELLS, Ends
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        ("Ctrl-C", "scoring"),
        ("SIGTERM", "training"),
        ("disk full at checkpoint", "saving"),
        ("server dies", "generating"),
        ("sync fails", "syncing"),
    ],
)
def test_two_ranks_end_with_the_cause_and_go_on(make_world: Any, fault: str, stage: str) -> None:
    assert_in_time(lambda: run_cell(make_world(fault, stage)))


def run_cell(world: World) -> float:
    cell = CELLS[world.fault, world.stage]
    assert isinstance(cell, Ends)
    run = world.train(2, **settings_of(world.fault))
    world.inject(run)
    share = assert_ended_as(world, run, cell, codes=(1, cell.code))
    assert_nothing_is_left(world)
    if world.fault != "server dies":
        assert not world.server_is_paused()
    assert_recorded(world)
    go_on(world, 2)
    assert assert_every_row_is_accounted_for(world) == {}
    return share


DRAINED = {"drain_before_sync": True}


def final_weights(world: World) -> Mapping[str, torch.Tensor]:
    loaded: Mapping[str, torch.Tensor] = load_file(world.directory / "run" / "checkpoint-6" / "model.safetensors")
    return loaded


@pytest.mark.parametrize(("killed", "stage"), [(1, "training"), (0, "saving")])
def test_a_killed_rank_ends_the_other_and_the_same_command_reaches_the_weights_of_an_uninterrupted_run(
    make_world: Any, model_dir: Path, killed: int, stage: str
) -> None:
    whole = make_world("", "")
    finished = whole.train(2, **DRAINED)
    assert whole.wait(finished) == 0, finished.log.read_text()[-3000:]

    def run_killed() -> float:
        world = make_world("kill -9", stage)
        run = world.train(2, **DRAINED)
        world.inject(run, killed)
        share = assert_ended_as(world, run, Ends("Signal 9", r"\(SIGKILL\)"))
        if killed != 0:
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
