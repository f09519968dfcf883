"""The start of a run: beside an older one, on the same trainer again, and from the checkpoint that rank 0 chooses."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import run_curriculum
import tiny_world

import verifiers as vf
from verifiers.cli.train import main
from verifiers.errors import CheckpointError, WeightSyncError
from verifiers.testing import FakeOpenAIServer
from verifiers.train.checkpoint.block_log import read_block_log
from verifiers.train.checkpoint.run_directory import newest_complete, visible_checkpoint

Make = Callable[..., tiny_world.ObservedTrainer]


@pytest.fixture
def trainer_in(make_fake_trainer: Make, fake: FakeOpenAIServer) -> Make:
    """Return a trainer with a checkpoint every second step."""

    def make(directory: Path, env: Any = None, **overrides: Any) -> tiny_world.ObservedTrainer:
        values = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, **overrides}
        return make_fake_trainer(env or tiny_world.single_turn(), fake.url, output_dir=directory, **values)

    return make


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeOpenAIServer]:
    def vowels(body: dict[str, Any]) -> str:
        return "aeiou"[: 1 + body["seed"] % 5]

    with FakeOpenAIServer(vowels) as running:
        yield running


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoint-*"))


def aside(directory: Path, number: int = 1) -> Path:
    return directory.with_name(f"{directory.name}-earlier-{number}")


def steps(trainer: tiny_world.ObservedTrainer, first: int = 0) -> list[int]:
    return [batch["step"] for batch in trainer.seen[first:]]


@pytest.mark.slow
def test_a_run_started_again_keeps_its_checkpoints_and_continues_from_them(
    trainer_in: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_in(tmp_path, save_total_limit=1).train()
    assert checkpoints(tmp_path) == ["checkpoint-6"]
    second = trainer_in(tmp_path, save_total_limit=1, learning_rate=1e-4)
    tiny_world.stop(second, 4)
    assert f"{tmp_path} held an earlier run, which is now in {aside(tmp_path)}" in caplog.text
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    again = trainer_in(tmp_path, save_total_limit=1, learning_rate=1e-4)
    again.train(resume_from_checkpoint=True)
    assert again.seen[0]["step"] == 2
    assert capsys.readouterr().out.count("resumes from step 2\n") == 1
    tiny_world.assert_block_log_is_whole(tmp_path, again.plan)
    archive = aside(tmp_path)
    assert checkpoints(archive) == ["checkpoint-6"]
    tiny_world.assert_block_log_is_whole(archive, again.plan)
    assert {"blocks.jsonl", "metrics.jsonl", "report.html", "run.json", "samples.jsonl"} <= {*os.listdir(archive)}


def test_a_run_that_saves_nothing_says_so_and_one_that_evaluates_nothing_does_not_say_on_which_rows(
    trainer_in: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    env = vf.SingleTurnEnv(dataset=tiny_world.rows(), rubric=vf.Rubric(funcs=[tiny_world.vowels]))
    trainer_in(tmp_path, env, max_steps=1, save_steps=0).train()
    assert "no checkpoint before step 1 (save_steps=0): set save_steps\n" in capsys.readouterr().out
    assert "evaluating on" not in caplog.text


def test_going_on_where_nothing_complete_is_loses_no_record_and_says_so(
    trainer_in: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_world.stop(trainer_in(tmp_path), 2)
    second = trainer_in(tmp_path, max_steps=1)
    second.train(resume_from_checkpoint=True)
    assert f"no complete checkpoint in {tmp_path} yet: the run starts at step 0" in caplog.text
    assert "no checkpoint before step 1 (save_steps=2): set save_steps\n" in capsys.readouterr().out
    assert [record["block_id"] for record in read_block_log(aside(tmp_path))] == [0, 1]
    tiny_world.assert_block_log_is_whole(tmp_path, second.plan)


def test_nothing_is_moved_for_a_run_that_finds_no_servers_and_the_next_one_may_start(
    trainer_in: Make, make_fake_trainer: Make, tmp_path: Path
) -> None:
    trainer_in(tmp_path, max_steps=2).train()
    nobody = "http://127.0.0.1:9/v1"
    with pytest.raises(WeightSyncError):
        make_fake_trainer(tiny_world.single_turn(), nobody, output_dir=tmp_path, server_wait=0.3).train()
    assert checkpoints(tmp_path) == ["checkpoint-2"]
    assert not aside(tmp_path).exists()
    trainer_in(tmp_path, max_steps=1).train()
    assert checkpoints(aside(tmp_path)) == ["checkpoint-2"]


@pytest.mark.slow
def test_a_checkpoint_given_by_its_path_is_the_newest_of_its_lineage(trainer_in: Make, tmp_path: Path) -> None:
    trainer_in(tmp_path).train()
    branched = trainer_in(tmp_path)
    tiny_world.stop(branched, 4, resume=str(tmp_path / "checkpoint-2"))
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4-earlier-1", "checkpoint-6-earlier-1"]
    back = trainer_in(tmp_path / "back")
    trainer_in(tmp_path / "back", max_steps=2).train()
    back.train(resume_from_checkpoint=str((tmp_path / "checkpoint-4-earlier-1").rename(tmp_path / "checkpoint-4")))
    assert back.seen[0]["step"] == 4
    # of what this directory's own run had done nothing is of that lineage
    assert [record["block_id"] for record in read_block_log(tmp_path / "back")] == [4, 5]
    assert checkpoints(aside(tmp_path / "back")) == ["checkpoint-2"]


def test_a_second_run_of_a_trainer_begins_at_its_first_block(trainer_in: Make, tmp_path: Path) -> None:
    settings = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no"}
    trainer = trainer_in(tmp_path, run_curriculum.environment(), curriculum=run_curriculum.levels(), **settings)
    first_blocks = []
    for number in range(2):
        before = len(trainer.seen)
        trainer.train()
        assert steps(trainer, before) == [0, 0, 1, 1, 2, 2]
        records = read_block_log(tmp_path)
        assert [record["block_id"] for record in records] == [0, 1, 2]
        first_blocks.append(records[0]["trained"])
        assert sorted(path.name for path in (tmp_path / "evals").iterdir()) == ["step-1", "step-2", "step-3"]
        assert aside(tmp_path).exists() == bool(number)
    assert first_blocks[0] == first_blocks[1]
    logged = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    assert logged == sorted(logged)


def test_going_on_where_all_steps_are_done_trains_nothing_and_ends_well(trainer_in: Make, tmp_path: Path) -> None:
    """Inside an epoch of eight steps."""
    first = trainer_in(tmp_path, max_steps=4)
    first.train()
    again = trainer_in(tmp_path, max_steps=3)
    assert again.plan.blocks_per_epoch > 4
    again.train(resume_from_checkpoint=True)
    assert (again.seen, again.state.global_step) == ([], 4)
    assert [record["block_id"] for record in read_block_log(tmp_path)] == [0, 1, 2, 3]
    again.train()
    assert steps(again)[::2] == [0, 1, 2]


def test_a_rank_that_does_not_see_the_checkpoint_says_what_is_needed(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "host-0" / "checkpoint-2")
    with pytest.raises(CheckpointError, match="output_dir must be on a file system that all hosts mount"):
        visible_checkpoint(checkpoint, 1, tmp_path / "host-1")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_command_after_a_kill_continues_and_after_the_end_says_that_it_is_done(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "out"
    command = [sys.executable, "-m", "verifiers.cli.train", "run.toml"]
    settings = {"output_dir": str(output), "max_steps": 12, "save_strategy": "steps", "save_steps": 2}
    with tiny_world.EmbeddedServer(model_dir) as server:
        tiny_world.write_run(tmp_path, model_dir, server_url=server.url, **settings)
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
            while newest_complete(output) is None:
                assert first.poll() is None
                time.sleep(0.01)
            first.kill()
        assert main(["run.toml"]) == 0
        assert "resumes from step" in capsys.readouterr().out
        assert main(["run.toml"]) == 0
    assert capsys.readouterr().out == f"finished: 12 steps in {output}; --fresh starts again at step 0\n"
    assert [record["block_id"] for record in read_block_log(output)] == list(range(12))
