"""What an earlier run left in a directory is put aside whole, also where a process is killed meanwhile."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from verifiers.data.plan import make_plan
from verifiers.errors import CheckpointError
from verifiers.train.aside import finish_putting_aside, put_aside, put_later_aside
from verifiers.train.beginning import Beginning, clear_the_way, finished_steps, note_saved
from verifiers.train.checkpoint import MARKER, mark_complete
from verifiers.train.watching.record import read_run

LEFT = ("blocks.jsonl", "metrics.jsonl", "samples.jsonl", "run.json", "report.html")


def left_by_a_run(root: Path, steps: tuple[int, ...] = (2, 4)) -> set[str]:
    for name in LEFT:
        (root / name).write_text("{}\n")
    for step in steps:
        (root / f"checkpoint-{step}").mkdir()
        (root / f"checkpoint-{step}" / MARKER).write_text("{}")
        (root / "evals" / f"step-{step}").mkdir(parents=True)
    return names_in(root)


def names_in(root: Path) -> set[str]:
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or "step-" in path.name}
    return {name for name in names if not name.startswith(("earlier-", ".earlier-"))}


def test_all_that_a_run_left_is_moved_and_what_is_a_users_stays(tmp_path: Path) -> None:
    left = left_by_a_run(tmp_path)
    others = {"run.toml", "model.safetensors", "checkpoint-best", "notes"}
    for name in others:
        (tmp_path / name).touch()
    assert put_aside(tmp_path) == tmp_path / "earlier-1"
    assert names_in(tmp_path / "earlier-1") == left
    assert names_in(tmp_path) == others
    again = left_by_a_run(tmp_path) - others
    assert put_aside(tmp_path) == tmp_path / "earlier-2"
    assert names_in(tmp_path / "earlier-2") == again


def test_what_this_process_measured_stays(tmp_path: Path) -> None:
    left_by_a_run(tmp_path)
    own = tmp_path / "evals" / "step-0"
    own.mkdir()
    put_aside(tmp_path, {own})
    assert names_in(tmp_path) == {"evals/step-0"}


def test_a_run_that_did_nothing_is_not_worth_a_directory(tmp_path: Path) -> None:
    assert put_aside(tmp_path / "nowhere") is None
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "blocks.jsonl").touch()
    assert put_aside(tmp_path) is None
    assert not list(tmp_path.glob("*earlier*"))


def test_the_directory_that_trl_made_for_its_tables_is_there_after_the_move(tmp_path: Path) -> None:
    left_by_a_run(tmp_path)
    tables = tmp_path / "completions"
    tables.mkdir()
    put_aside(tmp_path)
    assert list(tables.iterdir()) == []
    (tables / "step-1.parquet").touch()
    assert put_aside(tmp_path) == tmp_path / "earlier-2"
    assert list(tables.iterdir()) == []
    assert (tmp_path / "earlier-2" / "completions" / "step-1.parquet").is_file()


@pytest.mark.parametrize("moves", range(1, 9))
def test_a_move_that_was_cut_is_finished_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    left, done, rename = left_by_a_run(tmp_path), [], Path.rename

    def killed_after_some(path: Path, target: Path) -> Path:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed_after_some)
        with pytest.raises(KeyboardInterrupt):
            put_aside(tmp_path)
    finish_putting_aside(tmp_path)
    assert names_in(tmp_path / "earlier-1") == left
    assert names_in(tmp_path) == set()
    assert put_aside(tmp_path) is None


def test_only_complete_checkpoints_after_the_step_are_moved(tmp_path: Path) -> None:
    left_by_a_run(tmp_path, (2, 4, 6))
    (tmp_path / "checkpoint-8").mkdir()
    assert put_later_aside(tmp_path, 6) is None
    assert put_later_aside(tmp_path, 2) == tmp_path / "earlier-1"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]
    assert sorted(path.name for path in (tmp_path / "earlier-1").iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_what_cannot_be_moved_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by_a_run(tmp_path)

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(CheckpointError, match=r"cannot be put aside .*Permission denied.*give another output_dir"):
        put_aside(tmp_path)


PLAN = make_plan(per_device_train_batch_size=4, num_generations=4, max_steps=4, num_prompts=8)


def test_what_was_finished_with_another_seed_other_rows_or_another_model_is_not_this_run(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "answer": ""} for number in range(8)]
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "ended": 1.0}))
    note_saved(tmp_path, 4, PLAN, rows, "start")
    assert finished_steps(tmp_path, dataclasses.replace(PLAN, max_steps=2), rows, "start") == 4
    assert finished_steps(tmp_path, PLAN) == 4
    for other in ((dataclasses.replace(PLAN, seed=7), rows, "start"), (PLAN, rows[::-1], "start"), (PLAN, rows, "b")):
        assert finished_steps(tmp_path, *other) is None
    run = read_run(tmp_path)
    # as it was written before these were noted
    del run["saved"]["of"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert finished_steps(tmp_path, PLAN, rows, "b") == 4


def test_a_run_that_is_half_put_aside_is_not_the_finished_one_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "ended": 1.0}))
    note_saved(tmp_path, 4, PLAN)
    assert finished_steps(tmp_path, PLAN) == 4
    (tmp_path / ".earlier-1.partial").mkdir()
    assert finished_steps(tmp_path, PLAN) is None
    assert (tmp_path / "earlier-1" / "run.json").is_file()


@pytest.mark.parametrize("is_there", [True, False])
def test_going_back_to_a_run_whose_best_checkpoint_has_moved_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_there: bool
) -> None:
    back = tmp_path / "earlier-1" / "checkpoint-4"
    best = back.with_name("checkpoint-2") if is_there else tmp_path / "checkpoint-2"
    for path in (back, best) if is_there else (back,):
        path.mkdir(parents=True)
    (back / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": str(best)}))
    mark_complete(back, PLAN, 4)
    clear_the_way(Beginning(str(back), goes_on=True), str(tmp_path))
    assert (f"the best checkpoint before step 4, {best}, is not there" in caplog.text) == (not is_there)
