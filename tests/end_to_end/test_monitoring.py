"""The view of a run: time by stage adds up, one record over kills and resumes, a report however it ends."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import run_curriculum
import tiny_world
from transformers import TrainerCallback

from verifiers.monitoring.history import read_history
from verifiers.monitoring.run_log import SAMPLES, read_lines, read_run
from verifiers.monitoring.stage_timer import STAGES
from verifiers.testing import FakeOpenAIServer
from verifiers.train.checkpoint.checkpoint import mark_complete

METRICS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


class Reporter(TrainerCallback):
    """Stands where transformers puts TensorBoard, trackio and W&B: it is given what they are given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append({**logs, "step": state.global_step})


def documented() -> list[re.Pattern[str]]:
    """Return the names of the page on metrics as patterns: `<...>`, `...` and `*` are any text, {a,b} a choice."""
    patterns = []
    for row in METRICS_PAGE.read_text().splitlines():
        if not row.startswith("| `"):
            continue
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            pattern = re.escape(name)
            pattern = re.sub(r"<[^>]*>|\\\.\\\.\\\.|\\\*", ".+", pattern)
            pattern = re.sub(r"\\\{([^}]*)\\\}", lambda found: f"({found.group(1).replace(',', '|')})", pattern)
            patterns.append(re.compile(pattern))
    return patterns


def test_every_step_adds_up_and_one_record_survives_an_interrupt(
    make_trainer: Callable[..., tiny_world.ObservedTrainer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = tmp_path / "run"
    settings: dict[str, Any] = {"num_batches_ahead": 1, "save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    first = make_trainer(tiny_world.single_turn(), output_dir=str(run_dir), **settings)
    reporter = Reporter()
    first.add_callback(reporter)
    saved_in: list[str] = []

    def mark(*args: Any) -> None:
        saved_in.append(first.timer.current)
        mark_complete(*args)

    monkeypatch.setattr("verifiers.train.checkpoint.run_directory.mark_complete", mark)
    tiny_world.stop(first, 4)
    said = (run_dir / "report.html").read_text()
    assert '"stoppedBy":"Ctrl-C"' in said
    assert '"steps":3,"maxSteps":5' in said
    assert "report: " in capsys.readouterr().out
    steps = [log for log in reporter.logs if "reward" in log]
    assert [log["step"] for log in steps] == [1, 2, 3]
    for log in steps:
        assert sum(log[f"time/{stage}_s"] for stage in STAGES) == pytest.approx(log["time/step_s"], rel=1e-6)
    # a checkpoint's seconds are in the step after it, where nothing else of this size happens
    assert saved_in == ["save"]
    assert steps[2]["time/save_s"] > 0.0 == steps[1]["time/save_s"]
    assert steps[0]["time/wait_s"] > 0.0
    assert steps[0]["time/train_s"] > 0.0
    names = documented()
    unknown = sorted({name for log in steps for name in log if not any(p.fullmatch(name) for p in names)})
    assert unknown == ["step"]

    second = make_trainer(tiny_world.single_turn(), output_dir=str(run_dir), **settings)
    second.train(resume_from_checkpoint=True)
    history = read_history(run_dir)
    assert list(history.steps) == [1, 2, 3, 4, 5]
    assert list(history.values("steps")) == [1] * 5
    assert all(history.values("reward"))
    run = read_run(run_dir)
    assert (run["status"], run["stopped_by"]) == ("finished", None)
    assert [session["step"] for session in run["sessions"]] == [0, 2]
    samples = list(read_lines(run_dir / SAMPLES))
    assert sorted({line["step"] for line in samples}) == [1, 2, 3, 4, 5]
    assert all(rollout["advantage"] is not None for line in samples for rollout in line["rollouts"])
    assert '"status":"finished"' in (run_dir / "report.html").read_text()
    peaks = history.values("memory/train_gib")
    assert (len(peaks), all(peaks)) == (5 if sys.platform == "linux" else 0, True)


def test_a_run_that_fails_leaves_a_report_that_says_why(
    make_trainer: Callable[..., tiny_world.ObservedTrainer],
) -> None:
    def breaks(completion: Any, **kwargs: Any) -> float:
        raise RuntimeError("the grader has no licence")

    trainer = make_trainer(tiny_world.single_turn(reward=breaks))
    with pytest.raises(Exception, match="the grader has no licence"):
        trainer.train()
    run_dir = Path(trainer.args.output_dir)
    assert "the grader has no licence" in read_run(run_dir)["stopped_by"]
    assert "the grader has no licence" in (run_dir / "report.html").read_text()
    # no block came to the trainer, and the rollouts of the one that ended the run are told all the same
    (cause,) = read_history(run_dir).failures.items()
    assert "the grader has no licence" in cause[0]
    assert cause[1].count == trainer.plan.completions_per_block


def test_steps_that_no_log_was_due_for_are_in_the_record_too(
    make_trainer: Callable[..., tiny_world.ObservedTrainer],
) -> None:
    trainer = make_trainer(tiny_world.single_turn(), max_steps=5, logging_steps=2, streaming=True)
    trainer.train()
    history = read_history(trainer.args.output_dir)
    assert list(history.steps) == [2, 4, 5]
    assert list(history.values("steps")) == [2, 2, 1]
    assert history.time.steps == 5
    blocks = list(read_lines(Path(trainer.args.output_dir) / "metrics.jsonl"))
    assert sum(line["rollouts/launched"] * line["steps"] for line in blocks) == 5 * 8


def test_steps_before_the_checkpoint_that_a_run_resumes_from_are_in_the_record_though_no_log_was_due(
    make_trainer: Callable[..., tiny_world.ObservedTrainer], tmp_path: Path
) -> None:
    settings = {"max_steps": 6, "logging_steps": 3, "save_strategy": "steps", "save_steps": 4, "output_dir": tmp_path}
    tiny_world.stop(make_trainer(tiny_world.single_turn(), **settings), 5)
    make_trainer(tiny_world.single_turn(), **settings).train(resume_from_checkpoint=True)
    history = read_history(tmp_path)
    assert list(history.steps) == [3, 4, 6]
    assert history.time.steps == 6


def test_a_log_of_several_blocks_has_counts_over_all_of_them_and_tells_where_the_run_stands_now(
    make_fake_trainer: Callable[..., Any],
) -> None:
    def some_fail(body: Mapping[str, Any]) -> Any:
        return tiny_world.letters(body, fails=0.1)

    logs: list[list[dict[str, float]]] = []
    with FakeOpenAIServer(some_fail) as fake:
        for every in (1, 6):
            curriculum = run_curriculum.three_stages(2, 4)
            settings = {"curriculum": curriculum, "max_steps": 6, "logging_steps": every}
            trainer = make_fake_trainer(run_curriculum.environment(), fake.url, **settings)
            trainer.train()
            logs.append([entry for entry in trainer.state.log_history if "reward" in entry])
    blocks, (log,) = logs
    for name in ("rows/dropped/provider_error", "tasks/d0/prompts", "tasks/d2/failed"):
        counts = [block.get(name, 0.0) for block in blocks]
        assert log[name] == pytest.approx(sum(counts) / 6)
        assert any(name not in block for block in blocks)
        assert any(counts)
    assert log["rows/dropped/provider_error"] == log["rows/dropped"]
    assert [log[name] for name in ("num_tokens", "curriculum/stage")] == [blocks[-1]["num_tokens"], 2.0]


def test_tensorboard_is_given_every_number_that_the_record_has(
    make_trainer: Callable[..., tiny_world.ObservedTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    # with a writer of its own: the two must agree on names that have slashes, and take every value
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    trainer = make_trainer(
        tiny_world.single_turn(), report_to="tensorboard", max_steps=2, eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    (events,) = Path(trainer.args.output_dir).glob("runs/*/events.out.tfevents.*")
    read = EventAccumulator(str(events))
    read.Reload()
    written: dict[tuple[str, int], list[float]] = {}
    for name in read.Tags()["scalars"]:
        for event in read.Scalars(name):
            written.setdefault((name, event.step), []).append(event.value)
    kept: dict[tuple[str, int], list[float]] = {}
    for line in read_lines(Path(trainer.args.output_dir) / "metrics.jsonl"):
        for name, value in line.items():
            if name not in ("step", "steps", "at") and value is not None:
                # transformers' own names for the two kinds
                told = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                kept.setdefault((told, line["step"]), []).append(value)
    for key, values in kept.items():
        assert written[key] == pytest.approx(values, rel=1e-5, abs=1e-12), key
    expected = {"train/time/wait_s", "train/overlap_ratio", "eval/reward", "train/train_runtime"}
    assert expected <= {name for name, _ in kept}


# -- the table of completions -------------------------------------------------------------------------------------


def test_the_scored_rollouts_of_each_step_are_saved_with_an_empty_cell_for_a_metric_that_one_lacks(
    make_trainer: Callable[..., Any],
) -> None:
    def even(completion: Any) -> float:
        if len(completion[-1]["content"]) % 2:
            raise ValueError("cannot judge this one")
        return float(len(completion[-1]["content"]))

    env = tiny_world.single_turn()
    env.rubric.add_metric(even)
    trainer = make_trainer(env, log_completions=True)
    trainer.train()
    tables = sorted((Path(trainer.args.output_dir) / "completions").glob("*.parquet"))
    table = pd.read_parquet(tables[1])
    assert (tables[1].name, len(table), set(table["step"])) == ("completions_00002.parquet", 8, {2})
    newest = trainer.last_block.rollouts
    assert list(table["vowels"]) == [rollout.metrics["vowels"] for rollout in newest]
    assert [text[0]["content"] for text in table["completion"]] == [r.completion[0]["content"] for r in newest]
    table = pd.concat([pd.read_parquet(file) for file in tables])
    lengths = [len(completion[-1]["content"]) for completion in table["completion"]]
    told = [None if pd.isna(value) else value for value in table["even"]]
    assert told == [None if length % 2 else length for length in lengths]
    assert {length % 2 for length in lengths} == {0, 1}
