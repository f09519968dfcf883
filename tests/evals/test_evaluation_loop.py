"""Evaluations of any length: nothing kept, nothing started after the end was asked for."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
from datasets import Dataset

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.evals.evaluation_run import Interruption, iter_requests, run_units
from verifiers.inference.endpoint import ClientBackend
from verifiers.inference.limiter import Limiter
from verifiers.rollouts.rollout import Rollout
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient


def environment(n: int = 20) -> vf.Environment:
    rows = [{"question": f"question {i}", "answer": "4"} for i in range(n)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))


def runner_of(env: vf.Environment, answers: Any, max_concurrent: int = 4) -> Run:
    return Run(env, ClientBackend(FakeClient(answers)), "m", limiter=Limiter(max_concurrent))


def units_of(env: vf.Environment, rollouts: int = 1) -> Any:
    return iter_requests(env.get_eval_dataset(), rollouts, 1)


async def test_no_rollout_is_kept() -> None:
    env = environment(200)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class SeenState:
        """A state that can be referred to weakly."""

    def take(rollout: Rollout) -> None:
        nonlocal most
        mark = rollout.state["mark"] = SeenState()
        alive.add(mark)
        most = max(most, len(alive))

    # a finished rollout is freed when it is let go of, not when the collector comes
    gc.disable()
    try:
        await run_units(runner_of(env, "4"), units_of(env), take)
        assert most < 60
        assert len(alive) < 4
    finally:
        gc.enable()


async def test_draining_finishes_what_is_in_flight_and_begins_nothing_more() -> None:
    env = environment(50)
    gate, asked = asyncio.Event(), 0
    interruption = Interruption(drain_s=15)

    async def answer(body: dict[str, Any]) -> str:
        nonlocal asked
        asked += 1
        if asked == 4:
            interruption.drain()
            asyncio.get_running_loop().call_later(0.05, gate.set)
        await gate.wait()
        return "4"

    done: list[Rollout] = []
    await run_units(runner_of(env, answer), units_of(env), done.append, interruption)
    assert asked == len(done) == 4
    assert all(rollout.reward == 1.0 for rollout in done)


async def test_draining_gives_up_groups_that_cannot_be_scored_whole_and_keeps_the_others() -> None:
    """Six slots and groups of four: the second group has begun in part."""
    asked: Counter[str] = Counter()
    interruption = Interruption(drain_s=15)

    async def answer(body: dict[str, Any]) -> str:
        question = body["messages"][-1]["content"]
        asked[question] += 1
        if asked.total() == 6:
            interruption.drain()
        await asyncio.sleep(0.01)
        return "4"

    def together(completions: list[Any]) -> list[float]:
        assert len(completions) == 4
        return [1.0] * 4

    rows = [{"question": f"question {i}", "answer": "4"} for i in range(50)]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([together]))
    done: list[Rollout] = []
    runner = runner_of(env, answer, max_concurrent=6)
    await run_units(runner, units_of(env, rollouts=4), done.append, interruption)
    assert [(rollout.key.example_id, rollout.reward) for rollout in done] == [(0, 1.0)] * 4
    assert asked == {"question 0": 4, "question 1": 2}
    assert runner.limiter.in_flight == 0


async def test_draining_asks_for_nothing_new_where_requests_are_throttled() -> None:
    """All rollouts have a slot and wait for their turn to ask; those of two turns that have begun ask again."""

    class TwoTurns(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [{"role": "user", "content": "again"}], state

    rows = [{"question": f"question {i}", "answer": "4"} for i in range(30)]
    env = TwoTurns(eval_dataset=rows, max_turns=2, rubric=vf.Rubric([lambda completion: 1.0]))
    interruption = Interruption(drain_s=15)
    asked: Counter[int] = Counter()

    async def answer(body: dict[str, Any]) -> str:
        asked[len(body["messages"])] += 1
        if asked[1] == 3:
            interruption.drain()
        return "4"

    runner = Run(env, ClientBackend(FakeClient(answer)), "m", limiter=Limiter(30, requests_per_second=50))
    done: list[Rollout] = []
    await run_units(runner, units_of(env), done.append, interruption)
    assert [rollout.reward for rollout in done] == [1.0] * 3
    assert asked == {1: 3, 3: 3}


@pytest.mark.parametrize("how", ["deadline", "abort"])
async def test_what_does_not_finish_is_given_up(how: str) -> None:
    env = environment(50)
    interruption = Interruption(drain_s=0.05 if how == "deadline" else 60)
    asked = 0

    async def answer(body: dict[str, Any]) -> str:
        nonlocal asked
        asked += 1
        if asked <= 2:
            return "4"
        if asked == 5:
            while len(done) < 2:  # noqa: ASYNC110 - until they are graded, which sets no event
                await asyncio.sleep(0.001)
            interruption.drain()
            if how == "abort":
                interruption.abort()
        await asyncio.Event().wait()
        return "never"

    done: list[Rollout] = []
    await asyncio.wait_for(run_units(runner_of(env, answer), units_of(env), done.append, interruption), 10)
    assert len(done) == 2


async def test_a_mistake_of_the_user_ends_the_run_as_itself() -> None:
    class Mistaken(vf.SingleTurnEnv):
        async def rollout(self, *args: Any, **kwargs: Any) -> Any:
            raise ConfigError("mend it")

    env = Mistaken(eval_dataset=[{"question": "q", "answer": "a"}] * 3, rubric=vf.Rubric())
    with pytest.raises(ConfigError, match="mend it"):
        await run_units(runner_of(env, "4"), units_of(env), lambda rollout: None)


async def test_work_is_taken_from_a_long_list_only_when_there_is_room_for_it() -> None:
    async def instant(completion: Any) -> float:
        return 1.0

    rows = [{"question": f"question {i}", "answer": "4"} for i in range(300)]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([instant]))
    done: list[Rollout] = []
    taken = 0

    def long_list() -> Any:
        nonlocal taken
        for unit in units_of(env):
            taken += 1
            assert taken - len(done) < 150
            yield unit

    await run_units(runner_of(env, "4", max_concurrent=8), long_list(), done.append)
    assert taken == len(done) == 300


def test_rows_read_together_are_the_rows_read_one_by_one() -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "answer": str(i),
            "info": {"n": i, "of": None},
            "task": "t",
        }
        for i in range(75)
    ]
    dataset = Dataset.from_list(rows)
    one_by_one = [dataset[index] for index in range(len(dataset))]
    assert not hasattr(one_by_one, "iter")
    assert list(iter_requests(dataset, 2, 3)) == list(iter_requests(one_by_one, 2, 3))
    assert [group[0].answer for group in iter_requests(dataset, 2, 3)] == [str(i) for i in range(75)]
