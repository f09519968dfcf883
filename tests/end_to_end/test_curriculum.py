"""Trained, step by step, is what the curriculum says: against a server that records, killed and resumed, on ranks."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import run_curriculum
import tiny_world
from forks import Forked, Forks

import verifiers as vf
from verifiers.data.curriculum import staged_curriculum_from
from verifiers.data.row_source import StagedRows
from verifiers.errors import CheckpointError, ConfigError
from verifiers.testing import FakeOpenAIServer
from verifiers.train.checkpoint.block_log import read_block_log
from verifiers.train.checkpoint.pending_blocks import load_pending_blocks
from verifiers.train.checkpoint.run_directory import newest_complete
from verifiers.train.run_plan import plan_batches


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeOpenAIServer]:
    with FakeOpenAIServer(run_curriculum.answer) as running:
        yield running


def trainer_for(
    model_dir: Path, fake: FakeOpenAIServer, output_dir: Path, curriculum: Any, **overrides: Any
) -> tiny_world.ObservedTrainer:
    args = tiny_world.config(output_dir, fake.url, probe_tolerance=1e9, **overrides)
    return tiny_world.ObservedTrainer(str(model_dir), run_curriculum.environment(), args, curriculum=curriculum)


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


CADENCES = [
    # (accumulation, passes, generations, micro-batches in a block, ends of the stages, steps at which the next begin)
    (2, 1, 2, 4, (3, 6), (4, 6), True),
    (2, 2, 4, 4, (4, 7), (4, 8), True),
]


@pytest.mark.parametrize(("accumulation", "passes", "group", "held", "ends", "begins", "streaming"), CADENCES)
def test_what_is_trained_at_each_optimizer_step_is_of_the_stage_that_the_file_names(
    wide_model_dir: Path,
    fake: FakeOpenAIServer,
    tmp_path: Path,
    accumulation: int,
    passes: int,
    group: int,
    held: int,
    ends: tuple[int, int],
    begins: tuple[int, int],
    streaming: bool,
) -> None:
    steps = begins[1] + 2 * passes
    trainer = trainer_for(
        wide_model_dir,
        fake,
        tmp_path,
        run_curriculum.three_stages(*ends),
        max_steps=steps,
        gradient_accumulation_steps=accumulation,
        num_iterations=passes,
        num_generations=group,
        steps_per_generation=held,
        num_batches_ahead=1,
        streaming=streaming,
    )
    trainer.train()
    assert_the_file_was_followed(run_curriculum.trained(trainer), begins, steps)
    logged = [entry for entry in trainer.state.log_history if "curriculum/stage" in entry]
    first_updates = [entry["step"] - 1 for entry in logged]
    assert [entry["curriculum/stage"] for entry in logged] == [
        float(sum(begin <= step for begin in begins)) for step in first_updates
    ]


def test_a_file_that_cannot_be_followed_is_refused_before_anything_starts(
    wide_model_dir: Path, fake: FakeOpenAIServer, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"ends at optimizer step 4, inside the block .* end it at step 6"):
        trainer_for(wide_model_dir, fake, tmp_path, run_curriculum.three_stages(3, 4), num_iterations=2, max_steps=8)
    with pytest.raises(ConfigError, match="cannot name any; set dynamic_sampling=False"):
        trainer_for(wide_model_dir, fake, tmp_path, run_curriculum.levels(), dynamic_sampling=True)
    with pytest.raises(ConfigError, match=r"a block takes 32 different rows of level 'd0', which has 24"):
        trainer_for(wide_model_dir, fake, tmp_path, run_curriculum.levels(), steps_per_generation=32)


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


@pytest.mark.parametrize(
    ("adaptive", "ahead"), [pytest.param(False, 2, marks=pytest.mark.slow), (True, 1)], ids=["stages", "levels"]
)
def test_a_run_resumed_inside_its_second_stage_trains_on_the_same_prompts(
    wide_model_dir: Path, fake: FakeOpenAIServer, tmp_path: Path, adaptive: bool, ahead: int
) -> None:
    def train(name: str, max_steps: int, resume: bool = False) -> tiny_world.ObservedTrainer:
        curriculum = run_curriculum.levels() if adaptive else run_curriculum.three_stages(4, 9)
        options = {"num_batches_ahead": ahead, "save_strategy": "steps", "save_steps": 6}
        trainer = trainer_for(wide_model_dir, fake, tmp_path / name, curriculum, max_steps=max_steps, **options)
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


def test_a_checkpoint_of_another_curriculum_is_refused_by_what_differs(
    wide_model_dir: Path, fake: FakeOpenAIServer, tmp_path: Path
) -> None:
    def trainer(first: int, second: int, **overrides: Any) -> tiny_world.ObservedTrainer:
        options = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "num_batches_ahead": 1, **overrides}
        return trainer_for(wide_model_dir, fake, tmp_path, run_curriculum.three_stages(first, second), **options)

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
    wide_model_dir: Path, fake: FakeOpenAIServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_for(wide_model_dir, fake, tmp_path, run_curriculum.three_stages(1, 2), max_steps=3).train()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("stage main        steps 1 to 1: d0 0.25 of prompts, 24 rows; d1") for line in lines)
    steps = [line.split("  ")[:2] for line in lines if line.startswith("step ")]
    assert steps == [["step 1/3", "stage warm"], ["step 2/3", "stage main"], ["step 3/3", "stage late"]]


class Runs:
    """Runs of `run_curriculum` in processes of their own, against one fake server."""

    def __init__(self, forks: Forks, fake: FakeOpenAIServer, model_dir: Path, directory: Path) -> None:
        self._forks, self._directory = forks, directory
        self._given = {"model": str(model_dir), "url": fake.url}
        self._started: list[Forked] = []

    def start(self, name: str, ranks: int = 1, **given: Any) -> Forked:
        """Start the run in the directory NAME, again where it was started before."""
        settings = {"max_steps": 10, "save_strategy": "steps", "save_steps": 2, **given.pop("settings", {})}
        given = {**self._given, "output_dir": str(self._directory / name), "settings": settings, **given}
        log = self._directory / f"{name}.log"
        self._started.append(self._forks.start("run_curriculum:run", given, log, ranks=ranks))
        return self._started[-1]

    def kill(self, run: Forked) -> None:
        run.kill()
        self._forks.wait(run, 60)

    def finish(self, run: Forked) -> None:
        assert self._forks.wait(run, 150) == 0, run.log.read_text()

    def close(self) -> None:
        for run in self._started:
            self._forks.end(run)


@pytest.fixture
def runs(forks: Forks, fake: FakeOpenAIServer, wide_model_dir: Path, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(forks, fake, wide_model_dir, tmp_path)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_in_its_second_stage_continues_with_the_same_prompts(runs: Runs, tmp_path: Path) -> None:
    given = {"ends": (3, 8), "adaptive": True, "resume": True, "settings": {"num_batches_ahead": 1}}
    runs.finish(runs.start("whole", **given))
    killed = runs.start("killed", **given)
    until = time.monotonic() + 300
    while newest_complete(tmp_path / "killed") != tmp_path / "killed/checkpoint-4":
        assert killed.code is None, killed.log.read_text()
        assert time.monotonic() < until
        time.sleep(0.001)
    runs.kill(killed)
    runs.finish(runs.start("killed", **given))

    def prompts(name: str) -> list[tuple[int, list[int]]]:
        found = []
        for record in read_block_log(tmp_path / name):
            rollouts = record["trained"] + [[item["example_id"], 0] for item in record["dropped"]]
            found.append((record["block_id"], sorted({example_id for example_id, _ in rollouts})))
        return found

    assert prompts("killed") == prompts("whole")
    assert [block for block, _ in prompts("whole")] == list(range(10))
    resumed = json.loads((tmp_path / "killed/trained-0.json").read_text())
    assert min(step for step, _ in resumed) >= 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_train_at_each_step_what_one_rank_does(runs: Runs, tmp_path: Path) -> None:
    found = {}
    for ranks in (1, 2):
        settings = {"per_device_train_batch_size": 4 // ranks, "steps_per_generation": 4, "save_strategy": "no"}
        runs.finish(runs.start(str(ranks), ranks, ends=(3, 8), settings=settings))
        of_ranks = [json.loads((tmp_path / str(ranks) / f"trained-{rank}.json").read_text()) for rank in range(ranks)]
        for rows in of_ranks:
            for step, names in datasets_by_step(rows).items():
                assert names <= run_curriculum.stage_names(step, (4, 8))
        found[ranks] = Counter((step, question) for rows in of_ranks for step, question in rows)
    assert found[1] == found[2]
    assert {step for step, _ in found[1]} == set(range(10))
