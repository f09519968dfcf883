"""Slots stay busy while there is work: latencies that vary, stragglers of a group, and slow scores keep none idle."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

import verifiers as vf
from verifiers.evals.evaluation_run import iter_requests, run_units
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import Limiter
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient

SLOTS, PROMPTS, GROUP = 128, 250, 8


class Busy:
    """Calls in service over time, up to the last one's arrival: from there on nothing is left to begin."""

    def __init__(self) -> None:
        self.arrived = self.serving = self.most = 0
        self.area = self.area_then = self.then = self.changed = 0.0

    def step(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        self.area += self.serving * (now - self.changed)
        self.changed = now
        self.serving += change
        self.most = max(self.most, self.serving)
        if change > 0:
            self.arrived += 1
            self.then, self.area_then = now, self.area

    @property
    def share(self) -> float:
        return self.area_then / (SLOTS * self.then)


def environment(kind: str) -> vf.Environment:
    async def alone(completion: Any) -> float:
        await asyncio.sleep(3.0)
        return 1.0

    async def together(completions: list[Any]) -> list[float]:
        await asyncio.sleep(3.0)
        return [1.0] * len(completions)

    rows = [{"question": f"question {n}", "answer": "4"} for n in range(PROMPTS)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([together if kind == "groups" else alone]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one by one", "groups"])
def test_slots_are_busy_until_the_tail_whatever_latencies_and_scores_take(in_virtual_time: Any, kind: str) -> None:
    """Latency is log-normal (median 1 s, sigma 1), scoring takes 3 s; in virtual time."""
    busy = Busy()
    draw = random.Random(0)

    async def answer(body: dict[str, Any]) -> str:
        busy.step(+1)
        await asyncio.sleep(draw.lognormvariate(0.0, 1.0))
        busy.step(-1)
        return "4"

    async def evaluate() -> int:
        done = 0

        def count(rollout: Any) -> None:
            nonlocal done
            done += rollout.reward == 1.0

        env = environment(kind)
        groups = iter_requests(env.get_eval_dataset(), GROUP, 0)
        units: Any = groups if kind == "groups" else ([one] for group in groups for one in group)
        runner = Run(env, ClientBackend(FakeClient(answer)), "m", limiter=Limiter(SLOTS))
        await run_units(runner, units, count)
        return done

    assert in_virtual_time(evaluate()) == busy.arrived == PROMPTS * GROUP
    assert busy.most == SLOTS
    assert busy.share > 0.99


def test_where_scoring_is_the_slower_part_what_waits_for_it_does_not_grow_with_the_run(
    in_virtual_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts take 1 s in 8 slots, scores 1 s one after the other."""
    monkeypatch.setattr("verifiers.evals.evaluation_run._LEAST_UNFINISHED", 0)
    begun = scored = most = 0

    async def answer(body: dict[str, Any]) -> str:
        nonlocal begun
        begun += 1
        await asyncio.sleep(1.0)
        return "4"

    async def evaluate() -> None:
        one_judge = asyncio.Lock()

        async def judged(completion: Any) -> float:
            nonlocal scored, most
            async with one_judge:
                await asyncio.sleep(1.0)
            scored += 1
            most = max(most, begun - scored)
            return 1.0

        rows = [{"question": f"question {n}", "answer": "4"} for n in range(600)]
        env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([judged]))
        units = iter_requests(env.get_eval_dataset(), 1, 0)
        runner = Run(env, ClientBackend(FakeClient(answer)), "m", limiter=Limiter(8), grading_timeout_s=9e9)
        await run_units(runner, units, lambda rollout: None)

    in_virtual_time(evaluate())
    assert (begun, scored) == (600, 600)
    assert 8 * 16 < most <= 8 * 32
