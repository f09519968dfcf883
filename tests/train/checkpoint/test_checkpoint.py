"""Checkpoints are complete, of the same plan, or refused."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifiers.data.batch_plan import BatchPlan, make_plan
from verifiers.data.curriculum import Curriculum, Stage, WeightedDataset
from verifiers.data.row_source import StagedRows
from verifiers.errors import CheckpointError
from verifiers.train.checkpoint.checkpoint import (
    MARKER,
    PENDING_BLOCKS,
    check_resumable,
    dataset_fingerprint,
    extra_state,
    load_pending_blocks,
    mark_complete,
    mark_incomplete,
    model_name,
    resume_step,
)
from verifiers.train.checkpoint.run_directory import newest_complete
from verifiers.train.checkpoint.weights import check_kept, check_optimizer, unreadable_named


@pytest.fixture
def plan() -> BatchPlan:
    return make_plan(
        per_device_train_batch_size=4, num_generations=4, num_iterations=2, max_steps=10, num_prompts=12, seed=3
    )


def checkpoint(directory: Path, step: int) -> Path:
    path = directory / f"checkpoint-{step}"
    (path / "deep").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "deep" / "more").write_bytes(b"state")
    return path


def test_the_marker_is_written_last_after_every_file_is_on_disk(
    tmp_path: Path, plan: BatchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("names of open files need /proc")
    path = checkpoint(tmp_path, 2)
    synced: list[tuple[str, bool]] = []
    sync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), (path / MARKER).exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    mark_complete(path, plan, 2)
    before = [Path(name).name for name, marked in synced if not marked]
    # what lies in a directory too, and the directory that names it
    assert set(before[:-1]) >= {"deep", "more", "model.safetensors"}
    assert before[-1] == f".{MARKER}.partial"
    assert synced[-1] == (str(path), True)


def test_a_crash_while_syncing_leaves_no_marker(
    tmp_path: Path, plan: BatchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, 2)

    def crash(_: int) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="the disk is gone"):
        mark_complete(path, plan, 2)
    assert newest_complete(tmp_path) is None


CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 4},
    "shuffle": {"shuffle": False},
    "num_prompts": {"num_prompts": 13},
    "num_generations": {"num_generations": 2},
    "completions_per_block": {"per_device_train_batch_size": 8},
    "updates_per_block": {"num_iterations": 1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_plan_is_refused_with_the_setting_that_differs(tmp_path: Path, plan: BatchPlan, name: str) -> None:
    path = checkpoint(tmp_path, 2)
    mark_complete(path, plan, 2)
    check_resumable(path, plan)
    check_resumable(path, dataclasses.replace(plan, max_steps=99))
    check_resumable(path, dataclasses.replace(plan, per_device_train_batch_size=2, num_processes=2))
    with pytest.raises(CheckpointError, match=f"was written with {name}="):
        check_resumable(path, dataclasses.replace(plan, **CHANGES[name]))


def test_a_checkpoint_without_a_marker_is_refused(tmp_path: Path, plan: BatchPlan) -> None:
    with pytest.raises(CheckpointError, match=rf"has no {MARKER}.*resume_from_checkpoint=True"):
        check_resumable(checkpoint(tmp_path, 2), plan)


def test_a_checkpoint_gives_back_its_step_and_what_else_it_was_given(tmp_path: Path, plan: BatchPlan) -> None:
    plain, full = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    mark_complete(plain, plan, 2)
    mark_complete(full, plan, 4, {"policy_version": 2, "curriculum": {"stage": "warm"}})
    assert (resume_step(plain), extra_state(plain)) == (2, {})
    assert (resume_step(full), extra_state(full)) == (4, {"policy_version": 2, "curriculum": {"stage": "warm"}})
    check_resumable(full, plan)


def test_a_save_never_leaves_the_blocks_of_an_older_lineage(tmp_path: Path, plan: BatchPlan) -> None:
    path = checkpoint(tmp_path, 2)
    (path / PENDING_BLOCKS).write_text("{}\n")
    mark_complete(path, plan, 2)
    mark_incomplete(path)
    assert load_pending_blocks(path) == []


ROWS = [{"prompt": f"p{n}", "answer": "", "info": {"port": n}} for n in range(12)]


def test_other_rows_are_refused_and_where_nothing_is_known_of_them_nothing_is_asked(
    tmp_path: Path, plan: BatchPlan
) -> None:
    path, silent = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    mark_complete(path, plan, 2, rows=ROWS)
    mark_complete(silent, plan, 4)
    others = [*ROWS[:11], {"prompt": "another"}]
    moved = [{**row, "info": {}} for row in ROWS]
    for rows in (None, ROWS, moved):
        check_resumable(path, plan, rows)
    check_resumable(silent, plan, others)
    with pytest.raises(CheckpointError, match="written with other training rows"):
        check_resumable(path, plan, others)


def test_another_start_of_the_policy_is_refused_with_both_names(
    tmp_path: Path, plan: BatchPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, silent = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    mark_complete(path, plan, 2, model="start")
    mark_complete(silent, plan, 4)
    for model in (None, "start", "./start/", str(tmp_path / "start")):
        check_resumable(path, plan, model=model)
    check_resumable(silent, plan, model="other")
    with pytest.raises(CheckpointError, match=r"the model 'start', .* from 'other'.*--fresh"):
        check_resumable(path, plan, model="other")


def test_a_model_without_a_name_or_out_of_a_run_is_not_compared(tmp_path: Path, plan: BatchPlan) -> None:
    path = checkpoint(tmp_path, 2)
    mark_complete(path, plan, 2)

    class Loaded:
        def __init__(self, name: str) -> None:
            self.config = self
            self._name_or_path = name

    assert [model_name(model) for model in ("start", Loaded("start"))] == ["start", "start"]
    assert [model_name(model) for model in (str(path), Loaded(str(path)), Loaded(""), object())] == [None] * 4


def test_rows_of_a_stage_that_is_yet_to_come_may_be_others(plan: BatchPlan) -> None:
    stages = (Stage("a", 4, (WeightedDataset("x"),)), Stage("b", None, (WeightedDataset("y"),)))
    source = StagedRows(Curriculum(stages), {"x": range(6), "y": range(6, 12)})
    staged = dataclasses.replace(plan, source=source)
    others = [*ROWS[:6], *({"prompt": "another"} for _ in range(6))]
    assert dataset_fingerprint(ROWS, staged, 2) == dataset_fingerprint(others, staged, 2)
    assert dataset_fingerprint(ROWS, staged, 6) != dataset_fingerprint(others, staged, 6)


def test_what_a_checkpoint_lacks_or_has_of_another_optimizer_or_metric_is_named(
    plan: BatchPlan, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"has no optimizer\.pt, without which no run goes on"):
        check_optimizer(str(tmp_path))
    for name in ("optimizer.pt", "scheduler.pt"):
        (tmp_path / name).touch()
    check_optimizer(str(tmp_path))
    mark_complete(tmp_path, plan, 2, {"optim": "adamw_torch_fused", "metric_for_best_model": "eval_reward"})
    for metric in ("eval_reward", "reward", None):
        check_kept(str(tmp_path), SimpleNamespace(optim="adamw_torch", metric_for_best_model=metric))
    for now, text in (("sgd", "optim='adamw_torch'"), ("adamw_torch", "metric_for_best_model='reward'")):
        with pytest.raises(CheckpointError, match=f"written with {text}, and this run has"):
            check_kept(str(tmp_path), SimpleNamespace(optim=now, metric_for_best_model="eval_reward_stderr"))


def test_a_file_that_was_cut_off_is_one_sentence(plan: BatchPlan, tmp_path: Path) -> None:
    said = r"the optimizer's state in here cannot be loaded \(broken\); resume from"
    with pytest.raises(CheckpointError, match=said), unreadable_named("the optimizer's state", "here"):
        raise RuntimeError("broken.")
    mark_complete(tmp_path, plan, 2)
    (tmp_path / "trainer_state.json").write_text('{"global')
    with pytest.raises(CheckpointError, match=r"trainer_state.json cannot be read \(.*; resume from an earlier"):
        check_resumable(tmp_path, plan)
