"""The output directory of a run, without a trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerState

from verifiers.data.batch_plan import make_plan
from verifiers.errors import CheckpointError, GenerationError
from verifiers.train.checkpoint.block_log import read_block_log
from verifiers.train.checkpoint.checkpoint import extra_state, newest_complete
from verifiers.train.checkpoint.run_directory import RunDirectory
from verifiers.train.processes.distributed import Ranks

PLAN = make_plan(per_device_train_batch_size=4, num_generations=4, num_iterations=2, max_steps=10, num_prompts=12)


def a_directory(root: Path, **settings: Any) -> RunDirectory:
    given = {"should_save": True, "save_only_model": False, "save_strategy": "steps", "save_total_limit": None}
    args: Any = SimpleNamespace(output_dir=root, **{**given, **settings})
    ranks = Ranks(SimpleNamespace(wait_for_everyone=lambda: None))
    return RunDirectory(args, PLAN, ranks, None, "a model", state=lambda: {"more": 1}, blocks=lambda: ())


def save(directory: RunDirectory, step: int, name: str = "model.safetensors") -> None:
    with directory.saving(TrainerState(global_step=step)):
        (directory.path / f"checkpoint-{step}").mkdir()
        (directory.path / f"checkpoint-{step}" / name).touch()


def test_a_run_goes_from_a_lock_through_complete_checkpoints_to_the_next_run(tmp_path: Path) -> None:
    first, other = a_directory(tmp_path), a_directory(tmp_path)
    assert first.begin(first.choose(True), ()) == {}
    with pytest.raises(CheckpointError, match="another run writes to"):
        other.choose(None)
    save(first, 2)
    for _ in range(2):
        first.close()
    point = other.choose(True)
    assert (point.checkpoint, other.begin(point, ())) == (str(tmp_path / "checkpoint-2"), {"more": 1})
    other.close()


def test_a_checkpoint_inside_a_block_or_without_its_optimizer_does_not_count(tmp_path: Path) -> None:
    save(a_directory(tmp_path), 3)
    save(a_directory(tmp_path, save_only_model=True), 4)
    save(a_directory(tmp_path, should_save=False), 6)
    assert newest_complete(tmp_path) is None


def test_a_block_in_flight_that_failed_does_not_keep_the_weights_from_being_saved(tmp_path: Path) -> None:
    directory = a_directory(tmp_path)

    def fails() -> Any:
        raise GenerationError("a block failed")

    directory._blocks = fails
    save(directory, 2)
    assert extra_state(tmp_path / "checkpoint-2") == {"more": 1}


def test_older_checkpoints_are_deleted_here_alone_and_once_the_newer_one_is_complete(tmp_path: Path) -> None:
    directory = a_directory(tmp_path, save_total_limit=1)
    complete = []
    directory._state = lambda: complete.append(newest_complete(tmp_path)) or {}
    with directory.rotation():
        # transformers would delete before
        assert directory._args.save_total_limit is None
        for step in (2, 4, 6):
            save(directory, step)
    assert complete == [None, tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"]
    assert list(tmp_path.glob("checkpoint-*")) == [tmp_path / "checkpoint-6"]
    assert directory._args.save_total_limit == 1


def test_a_save_that_fails_is_one_sentence_and_the_checkpoint_does_not_count(tmp_path: Path) -> None:
    directory = a_directory(tmp_path)
    save(directory, 2)
    with (
        pytest.raises(CheckpointError, match="could not be written"),
        directory.saving(TrainerState(global_step=2)),
    ):
        raise OSError("no space left")
    assert newest_complete(tmp_path) is None
    assert read_block_log(tmp_path) == []
