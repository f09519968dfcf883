"""The rule of thumb: what it calls a run, with which number, and which setting it names."""

from __future__ import annotations

from typing import Any

from verifiers.train.watching.figures import RunTime
from verifiers.train.watching.verdict import judge


def run(stages: dict[str, float], **sums: float) -> RunTime:
    wall = sum(stages.values())
    known: dict[str, Any] = {"server": wall, "waiting_rollouts": 64 * stages.get("wait", 0.0), "most_in_flight": 64}
    return RunTime(1.0, stages, **{**known, **sums})


def kind(time: RunTime, **settings: Any) -> str:
    verdict = judge(time, **{"num_batches_ahead": 1, **settings})
    assert verdict is not None
    return verdict.kind


def test_a_trainer_that_mostly_waits_is_rollout_bound_and_the_number_is_told() -> None:
    verdict = judge(run({"wait": 71.0, "train": 29.0}), num_batches_ahead=1, max_concurrent=1024)
    assert str(verdict) == "rollout-bound: the trainer waited 71 % of the time"
    assert "server_urls" in verdict.advice
    full = judge(run({"wait": 71.0, "train": 29.0}), num_batches_ahead=1, max_concurrent=64)
    assert "max_concurrent above 64" in full.advice


def test_strict_turns_are_told_what_overlap_would_bring() -> None:
    verdict = judge(run({"wait": 50.0, "train": 50.0}), num_batches_ahead=0)
    assert verdict.kind == "rollout-bound"
    assert verdict.advice.startswith("num_batches_ahead=1")
    assert "at most 2.0 times as fast" in verdict.advice


def test_waiting_for_few_rollouts_is_straggler_bound() -> None:
    tail = run({"wait": 40.0, "train": 60.0}, waiting_rollouts=40.0 * 3)
    verdict = judge(tail, num_batches_ahead=1)
    assert verdict.kind == "straggler-bound"
    assert "3.0 of at most 64 rollouts" in verdict.text
    assert "num_batches_ahead=2" in verdict.advice
    assert "drain_before_sync=False" in judge(tail, num_batches_ahead=1, drains=True).advice


def test_waiting_for_rewards_is_scoring_bound() -> None:
    assert kind(run({"wait": 40.0, "train": 60.0}, scored_alone=25.0)) == "scoring-bound"


def test_a_server_without_rollouts_is_trainer_bound() -> None:
    verdict = judge(run({"wait": 3.0, "train": 97.0}, server=40.0), num_batches_ahead=1)
    assert str(verdict) == "trainer-bound: the rollout server was idle 60 % of the time"
    assert "per_device_train_batch_size" in verdict.advice


def test_what_stops_both_sides_is_named_where_it_takes_more_than_the_waiting() -> None:
    assert kind(run({"wait": 10.0, "train": 50.0, "sync": 40.0})) == "sync-bound"
    assert kind(run({"wait": 10.0, "train": 50.0, "eval": 40.0})) == "evaluation-bound"
    assert kind(run({"wait": 10.0, "train": 50.0, "save": 40.0})) == "checkpoint-bound"
    assert kind(run({"wait": 45.0, "train": 20.0, "sync": 35.0})) == "rollout-bound"


def test_neither_side_waiting_is_balanced_and_nothing_measured_is_no_verdict() -> None:
    assert kind(run({"wait": 12.0, "train": 88.0}, server=90.0)) == "balanced"
    assert judge(RunTime(), num_batches_ahead=1) is None
