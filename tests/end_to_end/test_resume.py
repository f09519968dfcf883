"""Invariant 8: a run that was cut at a block boundary goes on as if it had not been."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch

from verifiers.errors import CheckpointError
from verifiers.train.checkpoint import MARKER, newest_complete

SCRIPT = Path(__file__).parent / "run_training.py"


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[tiny_world.EmbeddedServer]:
    """One slot, so that every batch has one row and equal requests get equal answers to the last bit."""
    with tiny_world.EmbeddedServer(model_dir, slots=1) as running:
        yield running


def trainer_for(model_dir: Path, server: Any, output_dir: Path, **overrides: Any) -> tiny_world.ObservedTrainer:
    values = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "num_iterations": 1, **overrides}
    args = tiny_world.config(output_dir, server.url, **values)
    return tiny_world.ObservedTrainer(str(model_dir), tiny_world.single_turn(), args)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in one)


@pytest.mark.parametrize(("updates", "cut"), [(1, 3), (2, 4)])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(
    model_dir: Path, server: Any, tmp_path: Path, updates: int, cut: int
) -> None:
    sizes = {"num_iterations": updates, "save_steps": cut}
    whole = trainer_for(model_dir, server, tmp_path / "whole", **sizes)
    whole.train()
    first = trainer_for(model_dir, server, tmp_path / "cut", max_steps=cut, **sizes)
    first.train()
    second = trainer_for(model_dir, server, tmp_path / "cut", **sizes)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 6
    assert [batch["step"] for batch in first.seen] == [step for step in range(cut) for _ in range(2)]
    assert [batch["step"] for batch in second.seen] == [step for step in range(cut, 6) for _ in range(2)]
    for one, other in zip(whole.seen, first.seen + second.seen, strict=True):
        for name in ("prompt_ids", "completion_ids", "tool_mask"):
            assert torch.equal(one[name], other[name])
        assert torch.allclose(one["advantages"], other["advantages"], atol=1e-6)
    assert not same(tiny_world.weights(whole), tiny_world.weights(first))
    assert same(tiny_world.weights(whole), tiny_world.weights(second))


def test_every_planned_rollout_ends_once_in_the_lineage(model_dir: Path, server: Any, tmp_path: Path) -> None:
    keys = []

    class Keeping(tiny_world.ObservedTrainer):
        def _produce(self, block_id: int, step: int) -> Any:
            result = super()._produce(block_id, step)
            assert self.last_block is not None
            dropped = [item.key for item in result[0].dropped if item.row is None]
            indices = {i for cells in result[0].batches for c in cells for i in c["rollout_index"].tolist() if i >= 0}
            keys.extend([self.last_block.rollouts[i].key for i in indices] + dropped)
            return result

    env = tiny_world.single_turn()
    for max_steps in (2, 4):
        args = tiny_world.config(tmp_path, server.url, save_strategy="steps", save_steps=2, max_steps=max_steps)
        trainer = Keeping(str(model_dir), env, args)
        trainer.train(resume_from_checkpoint=True)
    planned = [(block, *request) for block in range(4) for request in trainer.plan.requests(block)]
    assert sorted((k.block_id, k.example_id, k.generation) for k in keys) == sorted(planned)


def test_an_incomplete_checkpoint_is_ignored_and_refused(model_dir: Path, server: Any, tmp_path: Path) -> None:
    trainer_for(model_dir, server, tmp_path, max_steps=4).train()
    (tmp_path / "checkpoint-4" / MARKER).unlink()
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-99")
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-2"
    resumed = trainer_for(model_dir, server, tmp_path, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert [batch["step"] for batch in resumed.seen] == [2, 2, 3, 3]
    refused = trainer_for(model_dir, server, tmp_path, max_steps=4)
    with pytest.raises(CheckpointError, match=rf"checkpoint-99 has no {MARKER}"):
        refused.train(resume_from_checkpoint=str(tmp_path / "checkpoint-99"))


def test_a_checkpoint_written_again_is_incomplete_until_it_is_whole(
    model_dir: Path, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_for(model_dir, server, tmp_path, max_steps=2).train()
    assert (tmp_path / "checkpoint-2" / MARKER).is_file()
    again = trainer_for(model_dir, server, tmp_path, max_steps=2)

    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(again, "_save_optimizer_and_scheduler", disk_full)
    with pytest.raises(OSError, match="no space left"):
        again.train()
    assert newest_complete(tmp_path) is None


def test_a_checkpoint_of_another_plan_is_refused_by_the_setting_that_differs(
    model_dir: Path, server: Any, tmp_path: Path
) -> None:
    trainer_for(model_dir, server, tmp_path, max_steps=2).train()
    other = trainer_for(model_dir, server, tmp_path, seed=7)
    with pytest.raises(CheckpointError, match="seed=42, and this run has 7"):
        other.train(resume_from_checkpoint=True)


def test_a_run_that_ends_inside_a_block_ends_well(model_dir: Path, server: Any, tmp_path: Path) -> None:
    trainer = trainer_for(model_dir, server, tmp_path, num_iterations=2, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    # the weights are there, but only a block boundary can be resumed
    assert (tmp_path / "checkpoint-3" / "model.safetensors").is_file()
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-2"


def test_resuming_where_nothing_was_saved_starts_afresh(model_dir: Path, server: Any, tmp_path: Path) -> None:
    trainer = trainer_for(model_dir, server, tmp_path, max_steps=1)
    trainer.train(resume_from_checkpoint=True)
    assert [batch["step"] for batch in trainer.seen] == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_run_killed_at_any_moment_goes_on_by_the_same_command(model_dir: Path, server: Any, tmp_path: Path) -> None:
    def start(name: str) -> subprocess.Popen[bytes]:
        settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 2, "save_only_model": False}
        given = {"model": str(model_dir), "url": server.url, "output_dir": str(tmp_path / name), "settings": settings}
        command = [sys.executable, str(SCRIPT), json.dumps({**given, "resume": True, "env": "single"})]
        with open(tmp_path / f"{name}.log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def result(name: str) -> dict[str, torch.Tensor]:
        return torch.load(tmp_path / name / "final-0.pt")["weights"]

    whole = start("whole")
    assert whole.wait(60) == 0, (tmp_path / "whole.log").read_text()
    for moment in ("checkpoint-2", "checkpoint-4", "checkpoint-6"):
        process = start("killed")
        until = time.monotonic() + 40
        while not (tmp_path / "killed" / moment).exists():
            assert process.poll() is None, (tmp_path / "killed.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert newest_complete(tmp_path / "killed") in [
            None,
            *(tmp_path / "killed" / f"checkpoint-{step}" for step in (2, 4, 6)),
        ]
    last = start("killed")
    assert last.wait(60) == 0, (tmp_path / "killed.log").read_text()
    assert same(result("whole"), result("killed"))
