"""Findings: what they call a run, with which number, and which setting they name."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from verifiers.envs.environment import Environment
from verifiers.monitoring.findings import LearningSignal, find_bottleneck
from verifiers.monitoring.stage_timer import RunTime, StageTimer, interval_metrics
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


def test_a_server_that_tells_its_load_is_believed() -> None:
    waits = {"wait": 71.0, "train": 29.0}
    full = find_bottleneck(run(waits, server_read=50.0, server_full=45.0), num_batches_ahead=1)
    assert full.text.endswith(
        "71 % of the time; the server is full: requests waited there for 90 % of its working time"
    )
    assert full.advice.startswith("more servers (server_urls)")
    room = find_bottleneck(run(waits, server_read=50.0, server_full=0.0), num_batches_ahead=1, max_concurrent=1024)
    assert "the server has room: requests waited there for 0 %" in room.text
    assert room.advice == "num_batches_ahead=2"
    assert find_bottleneck(run(waits, server_read=9.0), num_batches_ahead=1, max_concurrent=64).advice.endswith("64")


def test_sides_that_share_cores_are_told_to_take_turns_and_then_that_they_do() -> None:
    time = run({"wait": 40.0, "train": 60.0})
    together = find_bottleneck(time, num_batches_ahead=1, shared_device="cores")
    assert together.advice.startswith("num_batches_ahead=0: both share these cores")
    in_turns = find_bottleneck(time, num_batches_ahead=0, shared_device="cores")
    assert "take turns: training took 60 % of the time, the trainer waited 40 %" in in_turns.text
    assert "num_batches_ahead" not in in_turns.advice
    on_gpu = find_bottleneck(run({"wait": 60.0, "train": 40.0}), num_batches_ahead=0, shared_device="GPU")
    assert "both share this GPU and take turns" in on_gpu.text
    assert "num_batches_ahead" not in on_gpu.advice
    # an evaluation beside it makes no second device of the one that they share
    evaluated = find_bottleneck(
        run({"wait": 50.0, "train": 20.0, "eval": 30.0}), num_batches_ahead=0, shared_device="cores"
    )
    assert evaluated.kind == "shared cores"
    assert "evaluation took 30 %" in evaluated.text
    assert "num_batches_ahead" not in evaluated.advice


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


@pytest.mark.slow
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


def test_neither_side_waiting_is_balanced_and_nothing_measured_has_no_bottleneck() -> None:
    assert kind(run({"wait": 12.0, "train": 88.0}, server=90.0)) == "balanced"
    assert find_bottleneck(RunTime(), num_batches_ahead=1) is None


# -- learning --------------------------------------------------------------------------------------------------------


NO_SIGNAL = {"steps": 1, "rows/trained": 0.0, "rollouts/with_advantage": 0.0, "reward/min": 0.0, "reward/max": 0.0}

FINDINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "zero": ({}, "every reward was 0 (the reward was never met) over the last 3 blocks", "partial credit"),
    "one": ({"reward/min": 1.0, "reward/max": 1.0}, "every reward was 1 (the prompts are solved)", "harder prompts"),
    "equal in groups": ({"reward/max": 1.0}, "the rewards of each group were all equal", "a finer reward"),
    "not skipped": ({"rows/trained": 8.0}, "every reward was 0", "easier prompts"),
    "truncated": (
        {"completions/clipped_ratio": 0.97},
        "97 % of the completions were cut off",
        "max_completion_length",
    ),
    "collapsed": ({"completions/frac_identical_groups": 1.0}, "(the policy has collapsed)", "a higher temperature"),
    "dropped": (
        {"rollouts/with_advantage": 8.0, "rows/dropped/stale": 8.0, "rows/dropped/timed_out": 1.0},
        "every row was left out, most as stale, over the last 3 blocks",
        "max_staleness",
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_three_blocks_without_a_signal_have_a_finding_with_its_cause(name: str) -> None:
    changes, text, advice = FINDINGS[name]
    signal = LearningSignal()
    for _ in range(2):
        signal.take(NO_SIGNAL | changes)
    assert signal.finding() is None
    signal.take(NO_SIGNAL | changes)
    finding = signal.finding()
    assert finding is not None
    assert str(finding).startswith("learns nothing: ")
    assert text in str(finding)
    assert advice in finding.advice
    signal.take(NO_SIGNAL | {"rows/trained": 4.0, "rollouts/with_advantage": 4.0})
    assert signal.finding() is None


def test_blocks_are_counted_by_their_updates_however_often_is_logged() -> None:
    seldom, often = LearningSignal(), LearningSignal()
    seldom.take(NO_SIGNAL | {"steps": 12})
    assert "the last 3 blocks" in str(seldom.finding(updates_per_block=4))
    for _ in range(2):
        often.take(NO_SIGNAL)
        for _ in range(3):
            # updates of the same block log no block
            often.take({"steps": 1})
    assert often.finding(updates_per_block=4) is None
    often.take(NO_SIGNAL)
    assert "the last 3 blocks" in str(often.finding(updates_per_block=4))
