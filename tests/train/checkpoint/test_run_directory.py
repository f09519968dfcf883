"""The output directory of a run, without a trainer: its lock, its checkpoints, and what an earlier run left."""

from __future__ import annotations

import copy
import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState, get_scheduler

from verifiers.data.batch_plan import make_plan
from verifiers.errors import CheckpointError, ConfigError, GenerationError
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock
from verifiers.train.checkpoint.block_log import read_block_log
from verifiers.train.checkpoint.checkpoint import MARKER, TENSORS, extra_state, mark_complete, mark_incomplete
from verifiers.train.checkpoint.run_directory import (
    LOCK,
    RunDirectory,
    checkpoints_in,
    finished_steps,
    lock_output_dir,
    newest_complete,
    note_saved,
    prepare_output_dir,
    raises_checkpoint_error,
    rotate_checkpoints,
)
from verifiers.train.checkpoint.weights import settings_of_the_run
from verifiers.train.processes.distributed import Ranks
from verifiers.types import Outcome, RolloutKey

PLAN = make_plan(per_device_train_batch_size=4, num_generations=4, num_iterations=2, max_steps=10, num_prompts=12)


def a_directory(root: Path, **settings: Any) -> RunDirectory:
    given: dict[str, Any] = {"should_save": True, "save_only_model": False, "save_strategy": "steps"}
    given |= {
        "save_total_limit": None,
        "temperature": 1.0,
        "optim": "adamw_torch",
        "metric_for_best_model": "eval_reward",
    }
    args: Any = SimpleNamespace(output_dir=root, **{**given, **settings})
    state = {"num_processes": 1, "process_index": 0, "is_main_process": True, "wait_for_everyone": lambda: None}
    ranks = Ranks(SimpleNamespace(**state))
    return RunDirectory(args, PLAN, ranks, None, "a model", checksums=dict, blocks=lambda: ())


def save(directory: RunDirectory, step: int, name: str = "model.safetensors") -> None:
    with directory.saving(TrainerState(global_step=step)):
        (directory.path / f"checkpoint-{step}").mkdir()
        (directory.path / f"checkpoint-{step}" / name).touch()


def test_a_run_goes_from_a_lock_through_complete_checkpoints_to_the_next_run(tmp_path: Path) -> None:
    first, other = a_directory(tmp_path), a_directory(tmp_path)
    assert first.begin(first.choose(True), (), resumes=True) == []
    with pytest.raises(CheckpointError, match=r"another run writes to .* output_dir"):
        other.choose(None)
    save(first, 2)
    for _ in range(2):
        first.close()
    checkpoint = other.choose(True)
    assert checkpoint == str(tmp_path / "checkpoint-2")
    assert other.begin(checkpoint, (), resumes=True) == []
    own = {TENSORS: {}, "temperature": 1.0, "optim": "adamw_torch", "metric_for_best_model": "eval_reward"}
    assert extra_state(checkpoint) == own
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
    assert extra_state(tmp_path / "checkpoint-2") == {
        TENSORS: {},
        "temperature": 1.0,
        "optim": "adamw_torch",
        "metric_for_best_model": "eval_reward",
    }


def test_older_checkpoints_are_deleted_here_alone_and_once_the_newer_one_is_complete(tmp_path: Path) -> None:
    directory = a_directory(tmp_path, save_total_limit=1)
    complete = []
    directory._checksums = lambda: complete.append(newest_complete(tmp_path)) or {}
    with directory.rotation():
        # transformers would delete before
        assert directory._args.save_total_limit is None
        for step in (2, 4, 6):
            save(directory, step)
    assert complete == [None, tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"]
    assert list(tmp_path.glob("checkpoint-*")) == [tmp_path / "checkpoint-6"]
    assert directory._args.save_total_limit == 1


def an_empty_one(root: Path, step: int) -> Path:
    path = root / f"checkpoint-{step}"
    path.mkdir()
    return path


def test_only_marked_checkpoints_count_and_the_highest_step_wins(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "nowhere") is None
    paths = {step: an_empty_one(tmp_path, step) for step in (2, 8, 10, 12)}
    for step in (2, 8, 10):
        mark_complete(paths[step], PLAN, step)
    (tmp_path / "checkpoint-final").mkdir()
    assert newest_complete(tmp_path) == paths[10]
    mark_incomplete(paths[10])
    mark_incomplete(paths[10])
    assert newest_complete(tmp_path) == paths[8]


class SafetensorError(Exception):
    """Named as safetensors' own, which is not an OSError."""


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # of tokenizers
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_checkpoint_that_cannot_be_written_says_so_and_what_there_is_to_go_on_from(
    tmp_path: Path, error: Exception
) -> None:
    mark_complete(an_empty_one(tmp_path, 2), PLAN, 2)
    words = (
        r"checkpoint-4 could not be written .*; [\d,]+ MB are free there, and the newest complete one is checkpoint-2"
    )
    with pytest.raises(CheckpointError, match=words) as raised, raises_checkpoint_error(tmp_path / "checkpoint-4"):
        raise error
    assert raised.value.__cause__ is error


class HubError(OSError):
    """As what a hub's client raises: it knows what was asked."""

    request = "PUT /api/models"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a mistake"),
        RuntimeError("of a callback"),
        KeyboardInterrupt(),
        HubError("503"),
        ConnectionResetError(104, "reset"),
        TimeoutError("slow"),
    ],
)
def test_what_is_not_of_writing_a_checkpoint_passes_as_it_is(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, raises_checkpoint_error(tmp_path / "checkpoint-4"):
        raise error
    assert raised.value is error


def test_a_checkpoint_whose_removal_was_cut_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):
        mark_complete(an_empty_one(tmp_path, step), PLAN, step)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        rotate_checkpoints(tmp_path, 1)
    assert not (tmp_path / "checkpoint-2" / MARKER).exists()
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-4"


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


# -- what an earlier run left ---------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run that has ended."""
    left_by_a_run(tmp_path / "run", 2, 4, 6)
    return tmp_path / "run"


def left_by_a_run(root: Path, *steps: int) -> None:
    for step in steps:
        (root / "evals" / f"step-{step}").mkdir(parents=True)
        (root / f"checkpoint-{step}").mkdir()
        mark_complete(root / f"checkpoint-{step}", PLAN, step)
    (root / "metrics.jsonl").write_text("{}\n")


def names_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if not any(path.glob("*")))


def test_the_working_directory_is_not_renamed_as_that_of_an_earlier_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "run.toml").touch()
    monkeypatch.chdir(run)
    with pytest.raises(CheckpointError, match=r"the working directory is in it; give another output_dir"):
        prepare_output_dir(None, ".", resumes=False)
    assert (run / "run.toml").exists()


def test_a_new_run_renames_the_directory_of_an_earlier_one_to_a_free_name(run: Path) -> None:
    for number in (1, 2):
        (run / "completions").mkdir()
        left = names_in(run)
        aside = run.with_name(f"run-earlier-{number}")
        assert prepare_output_dir(None, str(run), resumes=False) == aside
        assert names_in(aside) == left
        # TRL has made it, and writes to it
        assert names_in(run) == ["completions"]
        (run / "completions").rmdir()
        left_by_a_run(run, 8)


def test_what_this_process_measured_stays(run: Path) -> None:
    own = run / "evals" / "step-0"
    own.mkdir()
    prepare_output_dir(None, str(run), {own}, resumes=False)
    assert names_in(run) == ["evals/step-0"]


def test_a_run_that_did_nothing_keeps_its_directory(tmp_path: Path) -> None:
    assert prepare_output_dir(None, str(tmp_path / "nowhere"), resumes=False) is None
    for name in ("run.json", "blocks.jsonl", "run.toml"):
        (tmp_path / name).touch()
    assert prepare_output_dir(None, str(tmp_path), resumes=False) is None


def test_only_complete_checkpoints_after_the_step_are_renamed(run: Path) -> None:
    (run / "checkpoint-8").mkdir()
    for step, renamed in ((6, []), (2, ["checkpoint-4-earlier-1", "checkpoint-6-earlier-1"])):
        assert prepare_output_dir(str(run / f"checkpoint-{step}"), str(run), resumes=True) is None
        assert sorted(path.name for path in run.glob("*-earlier-*")) == renamed
    assert checkpoints_in(run) == [run / "checkpoint-2", run / "checkpoint-8"]
    assert names_in(run / "evals") == ["step-2"]


def test_a_directory_that_cannot_be_moved_is_one_sentence(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match=r"cannot be moved .*Permission denied.*give another output_dir"):
        prepare_output_dir(None, str(run), resumes=False)


def test_what_was_finished_with_another_seed_other_rows_or_another_model_is_not_this_run(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "answer": ""} for number in range(12)]
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "ended": 1.0}))
    note_saved(tmp_path, 10, PLAN, rows, "start")
    assert finished_steps(tmp_path, dataclasses.replace(PLAN, max_steps=2), rows, "start") == 10
    assert finished_steps(tmp_path, PLAN) == 10
    others = [(dataclasses.replace(PLAN, seed=7), rows, "start"), (PLAN, rows[::-1], "start"), (PLAN, rows, "b")]
    assert [finished_steps(tmp_path, *other) for other in others] == [None] * 3


FORKS = """
import os, sys, time
from verifiers.train.checkpoint.run_directory import lock_output_dir
lock = lock_output_dir(sys.argv[1])
if not os.fork():
    lock.release()
    print("forked", flush=True)
    sys.stdin.read()
else:
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_forked_child_neither_gives_back_what_its_parent_holds_nor_keeps_it(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"forked\n"
        try:
            with pytest.raises(CheckpointError):
                lock_output_dir(tmp_path)
        finally:
            parent.kill()
        while parent.poll() is None:
            time.sleep(0.01)
        # the child is there until its input ends
        lock_output_dir(tmp_path).release()


@pytest.mark.parametrize("refuses", [fcntl.flock, os.open], ids=["no locks", "no file"])
def test_a_disk_without_locks_refuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: object
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl if refuses is fcntl.flock else os, refuses.__name__, refused)  # type: ignore[attr-defined]
    for _ in range(2):
        lock_output_dir(tmp_path).release()
    assert not [name for name in os.listdir(tmp_path) if name != LOCK]


def test_blocks_that_were_sampled_at_another_temperature_are_not_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (example,) = PLAN.example_ids(1)
    block = ScoredBlock(
        1, [Group(example, [Rollout(RolloutKey(1, example, 0), Outcome.COMPLETED, "p", "c", reward=1.0)])]
    )
    first = a_directory(tmp_path)
    first._blocks = lambda: [block]
    save(first, 2)
    for temperature, kept in ((1.0, [1]), (0.5, [])):
        directory = a_directory(tmp_path, temperature=temperature)
        checkpoint = directory.choose(True)
        assert [one.block_id for one in directory.begin(checkpoint, (), resumes=True)] == kept
        directory.close()
    assert caplog.text.count("sampled at temperature 1 are generated again at 0.5") == 1


def test_a_resumed_run_has_the_learning_rate_weight_decay_and_schedule_of_its_own_settings() -> None:
    def made(rate: float, decay: float, steps: int) -> tuple[torch.optim.AdamW, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate, weight_decay=decay)
        return optimizer, get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)

    def step(optimizer: torch.optim.AdamW, scheduler: Any) -> float:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
        return float(optimizer.param_groups[0]["lr"])

    before = made(1e-2, 0.0, 2)
    for _ in range(2):
        step(*before)
    states = [part.state_dict() for part in before]
    for rate, decay, steps, expected in ((1e-2, 0.0, 6, 1e-2 * 4 / 6), (1e-3, 0.1, 4, 1e-3 * 2 / 4)):
        optimizer, scheduler = made(rate, decay, steps)
        with settings_of_the_run(optimizer, scheduler):
            for part, state in zip((optimizer, scheduler), states, strict=True):
                part.load_state_dict(copy.deepcopy(state))
        (group,) = optimizer.param_groups
        assert (group["lr"], group["weight_decay"]) == (pytest.approx(expected), decay)
        assert optimizer.state[group["params"][0]]["step"] == 2
        assert step(optimizer, scheduler) == pytest.approx(rate * (steps - 3) / steps)
