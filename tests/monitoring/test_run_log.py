"""The record of a run: one continuous line of steps whatever killed it, no secrets, and never what ends a run."""

from __future__ import annotations

import json
import logging
import math
import types
import uuid
from pathlib import Path
from typing import Any

import pytest

from verifiers.data.batch_plan import make_plan
from verifiers.errors import NothingScoredError
from verifiers.log import Redactor
from verifiers.monitoring.history import read_history, thin_points
from verifiers.monitoring.run_log import (
    METRICS,
    RUN,
    SAMPLES,
    RunRecord,
    SampleChoice,
    read_lines,
    shown_messages,
)
from verifiers.reports.training_run import training_data
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock
from verifiers.train.batching.advantages import rollout_advantages
from verifiers.train.batching.training_block import TrainingBlock
from verifiers.train.monitor import MonitorCallback, RunMonitor
from verifiers.types import Failure, Outcome, RolloutKey

ARGS: Any = types.SimpleNamespace(rollout_chunk_size=64, rollout_device=None)


def logged(step: int, reward: float) -> dict[str, float]:
    return {"reward": reward, "time/step_s": 2.0, "time/wait_s": 1.0, "time/train_s": 1.0}


def write_steps(record: RunRecord, first: int, last: int, reward: float = 0.0) -> None:
    for step in range(first, last + 1):
        record.write_metrics(step, 1, logged(step, reward + step), {})


def test_a_resumed_run_shows_each_step_once_and_nothing_of_what_was_lost(tmp_path: Path) -> None:
    first = RunRecord(tmp_path, resume_step=None)
    first.describe(sessions=[{"step": 0}], status="running")
    write_steps(first, 1, 7)
    first.write_metrics(4, 0, {"eval_reward": 0.5, "eval_reward_stderr": 0.1}, {})
    first.write_metrics(6, 0, {"eval_reward": 0.9}, {})
    first.write_samples([{"step": 3, "example": 1}, {"step": 6, "example": 2}])
    # killed in the middle of a line
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 8, "ste')

    again = RunRecord(tmp_path, resume_step=5)
    assert again.run["sessions"] == [{"step": 0}]
    write_steps(again, 6, 8, reward=100.0)
    history = read_history(tmp_path)
    assert list(history.steps) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert list(history.values("reward")) == [1, 2, 3, 4, 5, 106, 107, 108]
    assert history.evaluations["eval_reward"].steps == [4]
    assert [line["example"] for line in read_lines(tmp_path / SAMPLES)] == [1]
    assert history.time.wall == 16.0


def test_an_evaluation_that_is_logged_again_stands_once_at_its_step(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, resume_step=None)
    for step, reward in ((4, 0.1), (8, 0.2), (8, 0.3)):
        record.write_metrics(step, 0, {"eval_math_reward": reward}, {})
    found = read_history(tmp_path).evaluations["eval_math_reward"]
    assert (found.steps, found.rewards) == ([4, 8], [0.1, 0.3])


def test_numbers_that_are_not_finite_are_gaps_and_the_files_stay_strict_json(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, resume_step=None)
    record.write_metrics(1, 1, {**logged(1, math.nan), "loss": math.inf, "kl": 0.1 + 0.2}, {"E: x": 2})
    line = (tmp_path / METRICS).read_text()
    assert "NaN" not in line
    assert json.loads(line)["kl"] == 0.3
    record.write_metrics(2, 1, logged(2, 0.5), {"E: x": 1})
    history = read_history(tmp_path)
    assert math.isnan(history.values("reward")[0])
    assert history.values("reward")[1] == 0.5
    assert (history.failures["E: x"].count, history.failures["E: x"].last_step) == (3, 2)


def test_every_failed_rollout_is_counted_and_texts_that_differ_in_an_id_are_one_cause(tmp_path: Path) -> None:
    plan = make_plan(
        per_device_train_batch_size=64, steps_per_generation=1, num_generations=64, max_steps=2, num_prompts=1
    )
    watch = RunMonitor(ARGS, plan, None, None, None)
    watch.record = RunRecord(tmp_path, resume_step=None, redact=Redactor(["key-0123456789-secret"]))
    texts = [f"request {n:08x} at 0x7f{n:06x} was lost" for n in range(14)]
    texts += [f"session_{n:x}aB3dE9xY for {uuid.UUID(int=n)}" for n in range(10)]
    texts += [f"word {chr(97 + n)} is unknown" for n in range(26)] + ["401 for key-0123456789-secret"] * 14
    rollouts = [
        Rollout(RolloutKey(0, 0, n), Outcome.ENVIRONMENT_ERROR, prompt=[], completion=[], failure=Failure("E", text))
        for n, text in enumerate(texts)
    ]
    note_failed(watch, ScoredBlock(0, [Group(0, rollouts)]), 0)
    watch.write(1, {**watch.interval(1), "rollouts/failed": 64.0})
    history = read_history(tmp_path)
    counts = {text: error.count for text, error in history.failures.items()}
    assert counts.pop("other errors") == 9
    assert sum(counts.values()) + 9 == len(texts) == 64
    assert counts["E: request … at … was lost"] == 14
    assert counts["E: session_… for …"] == 10
    # taken out before it is folded, which would leave a part of it
    assert counts["E: 401 for ***"] == 14
    assert training_data(tmp_path)["head"]["failed"] == 64


def note_failed(watch: RunMonitor, block: ScoredBlock, step: int) -> None:
    watch.note_block(block, TrainingBlock(block.block_id, [], rollout_advantages(block), []), step)


def watched(directory: Path, resume_step: int | None = None) -> RunMonitor:
    """Four steps, each of a block."""
    plan = make_plan(
        per_device_train_batch_size=4, steps_per_generation=1, num_generations=4, max_steps=4, num_prompts=1
    )
    watch = RunMonitor(ARGS, plan, None, None, None)
    watch.record = RunRecord(directory, resume_step=resume_step)
    watch.record.describe(status="running")
    return watch


def failing(block_id: int, text: str) -> ScoredBlock:
    """Return a block in which every rollout failed."""
    failure = Failure("E", text)
    rollouts = [
        Rollout(RolloutKey(block_id, 0, n), Outcome.TIMED_OUT, prompt=[], completion=[], failure=failure)
        for n in range(4)
    ]
    return ScoredBlock(block_id, [Group(0, rollouts)])


def test_a_run_that_dies_of_failures_has_all_their_errors(tmp_path: Path) -> None:
    watch = watched(tmp_path)
    note_failed(watch, failing(0, "the first"), 0)
    note_failed(watch, failing(1, "the second"), 1)
    # two blocks after the last log, of which the newest came to nobody
    report = watch.end(NothingScoredError("none", block=failing(2, "the last")))
    errors = read_history(tmp_path).failures
    assert {text: (error.count, error.first_step) for text, error in errors.items()} == {
        "E: the first": (4, 2),
        "E: the second": (4, 2),
        "E: the last": (4, 3),
    }
    assert report is not None
    assert training_data(tmp_path)["head"]["failed"] == 12


def test_a_checkpoint_tells_failures_of_before_it_and_a_resume_counts_none_twice(tmp_path: Path) -> None:
    first = watched(tmp_path)
    note_failed(first, failing(0, "before"), 0)
    state = types.SimpleNamespace(is_world_process_zero=True, global_step=1)
    MonitorCallback(first, None).on_save(None, state, None)
    note_failed(first, failing(1, "after"), 1)
    first.write_failures()
    # killed, and resumed from step 1
    again = watched(tmp_path, resume_step=1)
    note_failed(again, failing(1, "after"), 1)
    again.end(None)
    counts = {text: error.count for text, error in read_history(tmp_path).failures.items()}
    assert counts == {"E: before": 4, "E: after": 4}
    assert list(read_history(tmp_path).steps) == []


def test_no_secret_reaches_any_file_of_the_record(tmp_path: Path) -> None:
    secret = "sk-very-secret-0123456789"
    record = RunRecord(tmp_path, resume_step=None, redact=Redactor([secret]))
    record.describe(settings={"api_key": secret}, stopped_by=f"401 for {secret}")
    record.write_metrics(1, 1, logged(1, 0.0), {f"401 for {secret}": 3})
    record.write_samples([{"step": 1, "prompt": [{"role": "user", "text": f"key {secret}"}]}])
    for name in (RUN, METRICS, SAMPLES):
        text = (tmp_path / name).read_text()
        assert secret not in text
        assert "***" in text


def test_a_record_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = RunRecord(tmp_path / "run", resume_step=None)
    (tmp_path / "run" / METRICS).mkdir()
    with caplog.at_level(logging.WARNING):
        write_steps(record, 1, 3)
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1


def test_twenty_thousand_points_become_few_that_keep_their_span_and_mean() -> None:
    values = [float(n % 100) for n in range(20_000)]
    points = thin_points(range(20_000), values)
    assert len(points.x) <= 240
    assert points.x[-1] == 19_999
    assert min(points.low) == 0.0
    assert max(points.high) == 99.0
    assert sum(points.y) / len(points.y) == pytest.approx(49.5, abs=0.5)
    assert thin_points([1, 2, 3], [1.0, math.nan, 3.0]).x == [1, 3]


# -- samples ---------------------------------------------------------------------------------------------------


def group(example: int, rewards: list[float | None]) -> Group:
    return Group(
        example,
        [
            Rollout(
                RolloutKey(0, example, number),
                Outcome.COMPLETED if reward is not None else Outcome.TIMED_OUT,
                prompt=[{"role": "user", "content": f"question {example}"}],
                completion=[{"role": "assistant", "content": f"answer {number}"}],
                reward=reward,
                failure=None if reward is not None else Failure("TimeoutError", "too slow"),
            )
            for number, reward in enumerate(rewards)
        ],
    )


def test_what_is_kept_of_a_block_is_the_widest_prompt_a_typical_one_and_those_followed() -> None:
    choice = SampleChoice(max_steps=400)
    same, wide, typical = [0.5] * 4, [0.0, 1.0, 0.0, 1.0], [0.5, 0.6, 0.5, 0.6]
    first = choice.of_block(ScoredBlock(0, [group(n, same) for n in range(8)]), {}, step=1)
    followed = {line["example"] for line in first if line["followed"]}
    assert followed == {0, 4, 7}
    block = ScoredBlock(5, [group(30, [0.9] * 4), group(31, wide), group(32, typical), group(4, [0.2] * 4)])
    assert choice.of_block(block, {}, step=6) == []
    kept = choice.of_block(block, {RolloutKey(0, 31, 1): 1.5}, step=11)
    assert {line["example"] for line in kept} == {31, 4, 32}
    rollouts = next(line for line in kept if line["example"] == 31)["rollouts"]
    assert [rollout["reward"] for rollout in rollouts] == [1.0, 1.0, 0.0, 0.0]
    assert rollouts[0]["advantage"] == 1.5


def test_of_a_group_the_best_the_worst_and_a_failed_rollout_are_kept() -> None:
    rewards: list[float | None] = [0.1 * n for n in range(14)]
    (line,) = SampleChoice(max_steps=1).of_block(ScoredBlock(0, [group(1, [*rewards, None, None])]), {}, step=1)
    shown = line["rollouts"]
    assert [rollout["reward"] for rollout in shown[:3]] == pytest.approx([1.3, 0.7, 0.0], abs=0.15)
    assert shown[3]["error"] == "TimeoutError: too slow"
    assert line["generations"] == 16


def test_a_resumed_run_follows_the_same_prompts(tmp_path: Path) -> None:
    choice = SampleChoice(max_steps=40)
    lines = choice.of_block(ScoredBlock(0, [group(n, [0.0, 1.0]) for n in range(4)]), {}, step=1)
    again = SampleChoice(40, lines)
    later: list[dict[str, Any]] = again.of_block(ScoredBlock(1, [group(n, [0.0, 1.0]) for n in (9, 0)]), {}, step=2)
    assert {line["example"]: line["followed"] for line in later}[0] is True
    assert 9 not in {line["example"] for line in later if line["followed"]}


def test_a_long_conversation_is_cut_and_says_so() -> None:
    messages = [{"role": "user", "content": "x" * 50_000}] * 200
    shown = shown_messages(messages, "prompt")
    assert sum(len(message["text"]) for message in shown) < 100_000
    assert any("176 messages are left out" in message["text"] for message in shown)


def test_a_picture_is_named_in_its_place() -> None:
    shown = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "what?"},
    ]
    assert shown_messages([{"role": "user", "content": shown}], "prompt") == [
        {"role": "user", "text": "[image] what?"}
    ]
