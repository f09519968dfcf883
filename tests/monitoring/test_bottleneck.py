"""The rule of thumb: what it calls a run, with which number, and which setting it names."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from verifiers.envs.environment import Environment
from verifiers.monitoring.bottleneck import find_bottleneck
from verifiers.monitoring.stage_timer import StageTimer
from verifiers.monitoring.time_metrics import RunTime, interval_metrics
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rubrics.rubric import Rubric
from verifiers.testing import FakeOpenAIServer
from verifiers.types import RolloutKey, State


def run(stages: dict[str, float], **sums: float) -> RunTime:
    wall = sum(stages.values())
    known: dict[str, Any] = {"server": wall, "waiting_rollouts": 64 * stages.get("wait", 0.0), "most_in_flight": 64}
    return RunTime(1.0, stages, **{**known, **sums})


def kind(time: RunTime, **settings: Any) -> str:
    bottleneck = find_bottleneck(time, **{"num_batches_ahead": 1, **settings})
    assert bottleneck is not None
    return bottleneck.kind


def test_a_trainer_that_mostly_waits_is_rollout_bound_and_the_number_is_told() -> None:
    bottleneck = find_bottleneck(run({"wait": 71.0, "train": 29.0}), num_batches_ahead=1, max_concurrent=1024)
    assert str(bottleneck) == "rollout-bound: the trainer waited 71 % of the time"
    assert bottleneck.advice.startswith(
        "num_batches_ahead=2, where the server has room for more than 64 rollouts at once; else more servers"
    )
    full = find_bottleneck(run({"wait": 71.0, "train": 29.0}), num_batches_ahead=1, max_concurrent=64)
    assert "max_concurrent above 64" in full.advice


def test_strict_turns_are_told_to_overlap_and_not_what_it_would_bring() -> None:
    bottleneck = find_bottleneck(run({"wait": 50.0, "train": 50.0}), num_batches_ahead=0)
    assert bottleneck.kind == "rollout-bound"
    assert bottleneck.advice == "num_batches_ahead=1, which lets generation and training overlap"


def test_sides_that_share_cores_are_told_to_take_turns_and_then_that_they_do() -> None:
    time = run({"wait": 40.0, "train": 60.0})
    together = find_bottleneck(time, num_batches_ahead=1, shares_cores=True)
    assert together.advice.startswith("num_batches_ahead=0: both share these cores")
    in_turns = find_bottleneck(time, num_batches_ahead=0, shares_cores=True)
    assert "take turns: training took 60 % of the time, the trainer waited 40 %" in in_turns.text
    assert "num_batches_ahead" not in in_turns.advice


def test_what_is_slow_beside_the_cores_is_still_named_where_they_are_shared() -> None:
    time = run({"wait": 20.0, "train": 20.0, "sync": 60.0})
    assert find_bottleneck(time, num_batches_ahead=0, shares_cores=True).kind == "sync-bound"


def test_a_bound_on_staleness_is_named_where_it_would_undo_the_advice() -> None:
    bottleneck = find_bottleneck(run({"wait": 71.0, "train": 29.0}), num_batches_ahead=1, max_staleness=1)
    assert bottleneck.advice.startswith("num_batches_ahead=2 (and a max_staleness that allows it)")


class Asks(Environment):
    """Asks the policy once."""

    def __init__(self) -> None:
        self.rubric = Rubric([lambda completion: 1.0])
        self.sampling_args: dict[str, Any] = {}

    async def rollout(self, client: Any, model: str, prompt: Any, **kwargs: Any) -> Any:
        response = await client.chat.completions.create(model=model, messages=prompt)
        return [{"role": "assistant", "content": response.choices[0].message.content}], State()


def trained(url: str, ahead: int, blocks: int = 6) -> tuple[float, str]:
    """Return the most rollouts in flight of a run whose training is short, and what its bottleneck advises."""
    prompt = [{"role": "user", "content": "x"}]
    with AsyncBatchGenerator(Asks(), url, "fake", num_batches_ahead=ahead) as generator:
        timer = StageTimer()
        timer.activity = generator.activity
        timer.start()
        submitted = 0
        for block in range(blocks):
            while submitted <= min(block + ahead, blocks - 1):
                generator.submit_batch(
                    BatchRequest(
                        submitted, [RolloutRequest(RolloutKey(submitted, 0, each), prompt) for each in range(4)]
                    )
                )
                submitted += 1
            with timer.stage("wait"):
                generator.get_batch(block, 60.0)
            with timer.stage("train"):
                time.sleep(0.002)
        total = RunTime()
        total.take({"steps": blocks, **interval_metrics(timer.take(), blocks)})
    bottleneck = find_bottleneck(total, num_batches_ahead=ahead, max_concurrent=1024)
    assert bottleneck is not None
    return total.most_in_flight, bottleneck.advice


def test_what_is_advised_where_answers_only_take_long_keeps_more_rollouts_in_flight() -> None:
    # time in which all requests are sent, and beside which those of the trainer are short, also on a busy machine
    with FakeOpenAIServer("yes", latency_s=0.3) as server:
        ahead = 0
        for _ in range(3):
            most, advice = trained(server.url, ahead)
            assert most == 4 * (ahead + 1)
            found = re.match(r"num_batches_ahead=(\d+)", advice)
            assert found, advice
            ahead = int(found[1])
    assert ahead == 3


def test_waiting_for_few_rollouts_is_straggler_bound() -> None:
    tail = run({"wait": 60.0, "train": 40.0}, waiting_rollouts=60.0 * 3)
    bottleneck = find_bottleneck(tail, num_batches_ahead=1)
    assert bottleneck.kind == "straggler-bound"
    assert "3.0 of at most 64 rollouts" in bottleneck.text
    assert "num_batches_ahead=2" in bottleneck.advice
    assert "drain_before_sync=False" in find_bottleneck(tail, num_batches_ahead=1, drains=True).advice


def test_waiting_for_rewards_is_scoring_bound() -> None:
    assert kind(run({"wait": 60.0, "train": 40.0}, scored_alone=35.0)) == "scoring-bound"


def test_a_server_without_rollouts_is_trainer_bound() -> None:
    bottleneck = find_bottleneck(run({"wait": 3.0, "train": 97.0}, server=40.0), num_batches_ahead=1)
    text = "trainer-bound: training took 97 % of the time, the rollout server was idle 60 %"
    assert str(bottleneck) == text
    assert "per_device_train_batch_size" in bottleneck.advice


@pytest.mark.parametrize(
    ("stage", "expected"), [("sync", "sync-bound"), ("eval", "evaluation-bound"), ("save", "checkpoint-bound")]
)
def test_what_takes_half_of_the_time_names_the_bottleneck(stage: str, expected: str) -> None:
    assert kind(run({"wait": 10.0, "train": 35.0, stage: 55.0})) == expected


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        ({"wait": 40.0, "train": 60.0}, "mixed: training took 60 % of the time, the trainer waited 40 %"),
        ({"wait": 10.0, "train": 50.0, "sync": 40.0},
         "mixed: training took 50 % of the time, pushing weights took 40 %, the trainer waited 10 %"),
        ({"wait": 45.0, "train": 20.0, "sync": 35.0},
         "mixed: the trainer waited 45 % of the time, pushing weights took 35 %, training took 20 %"),
        ({"wait": 30.0, "train": 20.0, "eval": 22.0, "save": 28.0},
         "mixed: the trainer waited 30 % of the time, saving checkpoints took 28 %, evaluation took 22 %, "
         "training took 20 %"),
    ],
)  # fmt: skip
def test_a_part_of_less_than_half_the_time_is_never_the_headline(stages: dict[str, float], text: str) -> None:
    found = find_bottleneck(run(stages), num_batches_ahead=1)
    assert str(found) == text
    # the advice is for the largest part that can be made smaller
    assert ("num_batches_ahead=2" in found.advice) == (stages["wait"] > 10)


def test_an_idle_server_beside_a_trainer_that_trains_less_than_half_the_time_is_mixed() -> None:
    stages = {"wait": 20.0, "train": 40.0, "sync": 24.0, "save": 16.0}
    assert str(find_bottleneck(run(stages, server=60.0), num_batches_ahead=1)) == (
        "mixed: training took 40 % of the time, pushing weights took 24 %, the trainer waited 20 %, "
        "saving checkpoints took 16 %; the rollout server was idle 40 %"
    )


def test_neither_side_waiting_is_balanced_and_nothing_measured_has_no_bottleneck() -> None:
    assert kind(run({"wait": 12.0, "train": 88.0}, server=90.0)) == "balanced"
    assert find_bottleneck(RunTime(), num_batches_ahead=1) is None
