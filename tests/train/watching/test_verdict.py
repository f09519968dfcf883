"""The rule of thumb: what it calls a run, with which number, and which setting it names."""

from __future__ import annotations

import re
import time
from typing import Any

from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rubrics.rubric import Rubric
from verifiers.testing import FakeOpenAIServer
from verifiers.train.watching.clock import StageClock
from verifiers.train.watching.figures import RunTime, lap_metrics
from verifiers.train.watching.verdict import judge
from verifiers.types import RolloutKey, State


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
    assert verdict.advice.startswith(
        "num_batches_ahead=2, where the server has room for more than 64 rollouts at once; else more servers"
    )
    full = judge(run({"wait": 71.0, "train": 29.0}), num_batches_ahead=1, max_concurrent=64)
    assert "max_concurrent above 64" in full.advice


def test_strict_turns_are_told_to_overlap_and_not_what_it_would_bring() -> None:
    verdict = judge(run({"wait": 50.0, "train": 50.0}), num_batches_ahead=0)
    assert verdict.kind == "rollout-bound"
    assert verdict.advice == "num_batches_ahead=1, which lets generation and training overlap"


def test_a_bound_on_staleness_is_named_where_it_would_undo_the_advice() -> None:
    verdict = judge(run({"wait": 71.0, "train": 29.0}), num_batches_ahead=1, max_staleness=1)
    assert verdict.advice.startswith("num_batches_ahead=2 (and a max_staleness that allows it)")


class Asks:
    """Asks the policy once."""

    def __init__(self) -> None:
        self.rubric = Rubric([lambda completion: 1.0])
        self.sampling_args: dict[str, Any] = {}

    async def rollout(self, client: Any, model: str, prompt: Any, **kwargs: Any) -> Any:
        response = await client.chat.completions.create(model=model, messages=prompt)
        return [{"role": "assistant", "content": response.choices[0].message.content}], State()


def trained(url: str, ahead: int, blocks: int = 12) -> tuple[float, str]:
    """The most rollouts in flight of a run whose training is short, and what its verdict advises."""
    prompt = [{"role": "user", "content": "x"}]
    with AsyncBatchGenerator(Asks(), url, "fake", num_batches_ahead=ahead) as generator:
        clock = StageClock()
        clock.meter = generator.meter
        clock.start()
        submitted = 0
        for block in range(blocks):
            while submitted <= min(block + ahead, blocks - 1):
                generator.submit(
                    submitted, [RolloutRequest(RolloutKey(submitted, 0, each), prompt) for each in range(4)]
                )
                submitted += 1
            with clock.stage("wait"):
                generator.get(block, 10.0)
            with clock.stage("train"):
                time.sleep(0.002)
        total = RunTime()
        total.take({"steps": blocks, **lap_metrics(clock.lap(), blocks)})
    verdict = judge(total, num_batches_ahead=ahead, max_concurrent=1024)
    assert verdict is not None
    return total.most_in_flight, verdict.advice


def test_what_is_advised_where_answers_only_take_long_keeps_more_rollouts_in_flight() -> None:
    with FakeOpenAIServer("yes", latency_s=0.05) as server:
        ahead = 0
        for _ in range(3):
            most, advice = trained(server.url, ahead)
            assert most == 4 * (ahead + 1)
            found = re.match(r"num_batches_ahead=(\d+)", advice)
            assert found, advice
            ahead = int(found[1])
    assert ahead == 3


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
