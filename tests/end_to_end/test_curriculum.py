"""Trained, step by step, is what the curriculum says: against a server that records, killed and resumed, on ranks."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import run_curriculum
import tiny_world

import verifiers as vf
from verifiers.data.curriculum import staged_curriculum_from
from verifiers.data.row_source import StagedRows
from verifiers.errors import CheckpointError, ConfigError
from verifiers.testing import FakeOpenAIServer
from verifiers.train.checkpoint.checkpoint import load_pending_blocks
from verifiers.train.run_plan import plan_batches

Make = Callable[..., tiny_world.ObservedTrainer]


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer(functools.partial(tiny_world.letters, fails=0.05, lengths=range(2, 9))) as running:
        yield running


@pytest.fixture
def trainer_for(make_fake_trainer: Make, fake: FakeOpenAIServer) -> Make:
    """Make trainers of a curriculum with a directory of their own, or a given one."""

    def make(curriculum: Any, **overrides: Any) -> tiny_world.ObservedTrainer:
        return make_fake_trainer(run_curriculum.environment(), fake.url, curriculum=curriculum, **overrides)

    return make


def datasets_by_step(rows: list[tuple[int, str]]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for step, question in rows:
        found.setdefault(step, set()).add(question.split()[0])
    return found


def assert_the_file_was_followed(rows: list[tuple[int, str]], ends: tuple[int, int], steps: int) -> None:
    found = datasets_by_step(rows)
    assert sorted(found) == list(range(steps))
    for step, names in found.items():
        assert names <= run_curriculum.stage_names(step, ends), step
    # the heavier of two datasets gets the first draw
    assert "d1" in found[ends[0]]


def test_what_is_trained_at_each_optimizer_step_is_of_the_stage_that_the_file_names(
    trainer_for: Make,
) -> None:
    # stages that end inside a block of four updates hold to the end of it
    ends, begins, steps = (4, 7), (4, 8), 12
    trainer = trainer_for(
        run_curriculum.three_stages(*ends),
        max_steps=steps,
        gradient_accumulation_steps=2,
        num_iterations=2,
        num_generations=4,
        steps_per_generation=4,
        num_batches_ahead=1,
        streaming=True,
    )
    trainer.train()
    assert_the_file_was_followed(run_curriculum.trained(trainer), begins, steps)
    logged = [entry for entry in trainer.state.log_history if "curriculum/stage" in entry]
    first_updates = [entry["step"] - 1 for entry in logged]
    assert [entry["curriculum/stage"] for entry in logged] == [
        float(sum(begin <= step for begin in begins)) for step in first_updates
    ]


def test_a_file_that_cannot_be_followed_is_refused_before_anything_starts(
    trainer_for: Make,
) -> None:
    with pytest.raises(ConfigError, match=r"ends at optimizer step 4, inside the block .* end it at step 6"):
        trainer_for(run_curriculum.three_stages(3, 4), num_iterations=2, max_steps=8)
    with pytest.raises(ConfigError, match="cannot name any; set dynamic_sampling=False"):
        trainer_for(run_curriculum.levels(), dynamic_sampling=True)
    with pytest.raises(ConfigError, match=r"a block takes 32 different rows of level 'd0', which has 24"):
        trainer_for(run_curriculum.levels(), steps_per_generation=32)


def test_a_curriculum_that_a_group_of_environments_would_drop_is_refused(tmp_path: Path) -> None:
    class Staged(vf.SingleTurnEnv):
        row_source = StagedRows(
            staged_curriculum_from({"stages": [{"name": "a", "datasets": ["d"]}]}), {"d": range(8)}
        )

    def member(kind: type[vf.SingleTurnEnv]) -> vf.SingleTurnEnv:
        rubric = vf.Rubric(funcs=[tiny_world.vowels])
        return kind(dataset=[{"question": f"q{number}", "answer": "a"} for number in range(8)], rubric=rubric)

    args = tiny_world.config(tmp_path, "http://127.0.0.1:1", max_steps=4)
    plain = member(vf.SingleTurnEnv)
    group = vf.EnvGroup([plain, vf.EnvGroup([member(Staged), plain], ["staged", "other"])], ["plain", "inner"])
    with pytest.raises(ConfigError, match=r"environment 'staged' of the group brings a curriculum of its own"):
        plan_batches(args, group)
    given = staged_curriculum_from({"stages": [{"name": "a", "datasets": ["plain", "inner"]}]})
    assert isinstance(plan_batches(args, group, given).source, StagedRows)
    assert plan_batches(args, member(Staged)).source is Staged.row_source
    assert plan_batches(args, vf.EnvGroup([plain, plain], ["a", "b"])).source is None


@pytest.mark.slow
@pytest.mark.parametrize(("adaptive", "ahead"), [(False, 2), (True, 1)], ids=["stages", "levels"])
def test_a_run_resumed_inside_its_second_stage_trains_on_the_same_prompts(
    trainer_for: Make, tmp_path: Path, adaptive: bool, ahead: int
) -> None:
    def train(name: str, max_steps: int, resume: bool = False) -> tiny_world.ObservedTrainer:
        curriculum = run_curriculum.levels() if adaptive else run_curriculum.three_stages(4, 9)
        options = {"num_batches_ahead": ahead, "save_strategy": "steps", "save_steps": 6}
        trainer = trainer_for(curriculum, output_dir=tmp_path / name, max_steps=max_steps, **options)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run_curriculum.trained(train("whole", 12))
    first = run_curriculum.trained(train("cut", 6))
    second = run_curriculum.trained(train("cut", 12, resume=True))
    assert {step for step, _ in second} == set(range(6, 12))
    assert Counter(first + second) == Counter(whole)
    if adaptive:
        assert {names.pop() for names in datasets_by_step(whole).values()} == {"d0", "d1", "d2"}
    else:
        assert_the_file_was_followed(first + second, (4, 9), 12)


def test_a_checkpoint_of_another_curriculum_is_refused_by_what_differs(trainer_for: Make, tmp_path: Path) -> None:
    def trainer(first: int, second: int, **overrides: Any) -> tiny_world.ObservedTrainer:
        options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "num_batches_ahead": 1, **overrides}
        return trainer_for(run_curriculum.three_stages(first, second), output_dir=tmp_path, **options)

    first = trainer(2, 6, max_steps=6)
    first.train()
    shutil.rmtree(tmp_path / "checkpoint-6")
    assert [block.block_id for block in load_pending_blocks(tmp_path / "checkpoint-4")] == [4]
    with pytest.raises(CheckpointError, match=r"another curriculum .* up to step 4 .*until_step was 2 and is 3"):
        trainer(3, 6, max_steps=6).train(resume_from_checkpoint=True)
    # what is still to come may be planned again, also for a block that was generated before
    resumed = trainer(2, 4, max_steps=6)
    resumed.train(resume_from_checkpoint=True)
    assert datasets_by_step(run_curriculum.trained(resumed)) == {4: {"d2"}, 5: {"d2"}}


def test_the_line_a_person_reads_and_the_table_name_the_stage(
    trainer_for: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_for(run_curriculum.three_stages(1, 2), max_steps=3).train()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("stage main        steps 1 to 1: d0 0.25 of prompts, 24 rows; d1") for line in lines)
    steps = [line.split("  ")[:2] for line in lines if line.startswith("step ")]
    assert steps == [["step 1/3", "stage warm"], ["step 2/3", "stage main"], ["step 3/3", "stage late"]]
