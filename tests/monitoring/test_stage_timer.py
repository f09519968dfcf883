"""The trainer's time by stage: it adds up, whatever is nested, and the generator's sums fall into the right stage."""

from __future__ import annotations

import asyncio

import pytest

from verifiers.inference.limiter import Limiter
from verifiers.monitoring.stage_timer import RunTime, StageTimer, in_stage, interval_metrics, peak_memory
from verifiers.rollouts.run import RolloutActivity, Run


class Time:
    """Passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


def test_the_stages_of_a_step_add_up_to_its_wall_clock() -> None:
    time = Time()
    timer = StageTimer(time)
    time.pass_s(5.0)
    timer.start()
    timer.switch("train")
    time.pass_s(1.0)
    with timer.stage("prepare"):
        time.pass_s(0.25)
        with timer.stage("wait"):
            time.pass_s(4.0)
        with timer.stage("sync"), timer.stage("wait"):
            time.pass_s(0.5)
        time.pass_s(0.25)
    time.pass_s(2.0)
    timer.switch("optimizer")
    time.pass_s(0.125)
    timer.switch("rest")
    time.pass_s(0.0625)
    uses = timer.take()
    seconds = {stage: use.seconds for stage, use in uses.items() if use.seconds}
    assert seconds == {"train": 3.0, "prepare": 0.5, "wait": 4.5, "optimizer": 0.125, "rest": 0.0625}
    metrics = interval_metrics(uses, steps=2)
    stages = [value for name, value in metrics.items() if name in {f"time/{stage}_s" for stage in seconds}]
    assert 2 * sum(stages) == 2 * metrics["time/step_s"] == time.now - 5.0
    assert all(use.seconds == 0.0 for use in timer.take().values())


def test_a_stage_that_raises_gives_the_time_back_to_what_ran_before() -> None:
    time = Time()
    timer = StageTimer(time)

    class Owner:
        timer: StageTimer

        @in_stage("save")
        def save(self) -> None:
            time.pass_s(1.0)
            raise OSError("disk full")

    owner = Owner()
    owner.timer = timer
    timer.switch("train")
    with pytest.raises(OSError, match="disk full"):
        owner.save()
    time.pass_s(2.0)
    assert timer.current == "train"
    assert {stage: use.seconds for stage, use in timer.take().items() if use.seconds} == {"save": 1.0, "train": 2.0}


def watched(*parts: tuple[str, float, int, int]) -> dict[str, float]:
    """Return the metrics of a step made of (stage, seconds, rollouts that run, rollouts that are scored)."""
    time = Time()
    activity, timer = RolloutActivity(time), StageTimer(time)
    timer.activity = activity
    timer.start()
    for stage, seconds, running, scoring in parts:
        timer.switch(stage)
        activity.change(running=running, scoring=scoring)
        time.pass_s(seconds)
        activity.change(running=-running, scoring=-scoring)
    return interval_metrics(timer.take(), steps=1)


def test_strict_turns_have_an_overlap_of_zero_and_hidden_work_one_of_one() -> None:
    assert watched(("wait", 3.0, 8, 0), ("train", 2.0, 0, 0))["overlap_ratio"] == 0.0
    # all training happens while rollouts run: no more can be had, though the trainer waits for the rest
    assert watched(("wait", 3.0, 8, 0), ("train", 2.0, 8, 0))["overlap_ratio"] == 1.0
    # all rollouts run while the trainer works
    assert watched(("train", 2.0, 8, 0), ("train", 3.0, 0, 0))["overlap_ratio"] == 1.0
    half = watched(("wait", 1.0, 8, 0), ("train", 1.0, 8, 0), ("optimizer", 1.0, 0, 0))
    assert half["overlap_ratio"] == 0.5
    assert half["rollouts/server_busy"] == pytest.approx(2 / 3)


def test_pushes_and_evaluation_count_on_neither_side_of_the_overlap() -> None:
    metrics = watched(("eval", 9.0, 64, 0), ("sync", 9.0, 8, 0), ("wait", 1.0, 8, 0), ("train", 1.0, 8, 0))
    assert metrics["overlap_ratio"] == 1.0
    assert metrics["time/generator_s"] == 2.0
    turns = watched(("eval", 9.0, 64, 0), ("sync", 9.0, 8, 0), ("wait", 1.0, 8, 0), ("train", 1.0, 0, 0))
    assert turns["overlap_ratio"] == 0.0
    # an evaluation's rollouts say nothing about how many a block has in flight
    assert metrics["rollouts/most_in_flight"] == 8


def test_scoring_alone_is_told_from_rollouts_that_run() -> None:
    metrics = watched(("wait", 2.0, 4, 1), ("wait", 3.0, 0, 5), ("train", 1.0, 0, 0))
    assert metrics["time/scored_alone_s"] == 3.0
    assert metrics["rollouts/in_flight_while_waiting"] == pytest.approx(8 / 5)
    assert metrics["rollouts/in_flight"] == pytest.approx(8 / 6)


def test_the_sums_of_a_run_are_those_of_its_intervals() -> None:
    first = {**watched(("wait", 3.0, 8, 0), ("train", 1.0, 0, 0)), "steps": 10}
    second = {**watched(("wait", 1.0, 8, 0), ("train", 3.0, 8, 0)), "steps": 30}
    total = RunTime()
    for line in (first, {"step": 7, "eval_reward": 0.5}, second):
        total.take(line)
    assert total.steps == 40
    assert total.wall == 10 * 4.0 + 30 * 4.0
    assert total.share("wait") == pytest.approx((30 + 30) / 160)
    assert total.overlap == pytest.approx(90 / 100)


async def test_a_rollout_counts_as_queued_and_then_as_running_also_where_it_is_cancelled() -> None:
    activity, limiter = RolloutActivity(), Limiter(1)
    began, end = asyncio.Event(), asyncio.Event()

    async def rollout() -> None:
        async with Run(None, None, "", limiter=limiter, activity=activity).slot():
            began.set()
            await end.wait()

    first, second = asyncio.create_task(rollout()), asyncio.create_task(rollout())
    await began.wait()
    await asyncio.sleep(0)
    assert (activity.running, activity.queued) == (1, 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert (activity.running, activity.queued) == (1, 0)
    end.set()
    await first
    assert (activity.running, activity.queued, activity.take_most_running()) == (0, 0, 1)
    reading = activity.read()
    assert reading.generating_s > 0
    assert reading.queued_s > 0


def test_peak_memory_belongs_to_the_stage_that_needed_it() -> None:
    memory = peak_memory(None)
    if memory is None:
        pytest.skip("this system has no high-water mark that can be reset")
    timer = StageTimer()
    timer.memory = memory
    timer.start()
    with timer.stage("old_logprobs"):
        held = bytearray(120 << 20)
        held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
        del held
    with timer.stage("train"):
        pass
    uses = timer.take()
    assert uses["old_logprobs"].peak_bytes > uses["train"].peak_bytes + (100 << 20)
