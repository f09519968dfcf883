"""Units of work: how rows are read, and how many begin before the event loop gets its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from datasets import Dataset

from verifiers.evals.evaluation_run import iter_requests, run_units
from verifiers.inference.limiter import AdaptiveLimiter, Limiter
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.types import RolloutKey


class Counting:
    """A runner whose rollouts take some turns of the loop; notes how many had a slot and how many began in a turn."""

    def __init__(self, limiter: Limiter, turns: int = 3) -> None:
        self.limiter = limiter
        self.on_rollout: Any = None
        self.most_in_flight = 0
        self.begun_by_turn: dict[int, int] = {}
        self.turn = 0
        self.done: list[int] = []
        self._turns = turns

    async def run_group(self, requests: Sequence[RolloutRequest]) -> None:
        self.begun_by_turn[self.turn] = self.begun_by_turn.get(self.turn, 0) + 1
        if len(requests) == 1:
            await self._one(requests[0])
        else:
            await asyncio.gather(*map(self._one, requests))

    async def _one(self, request: RolloutRequest) -> None:
        async with self.limiter.slot():
            self.most_in_flight = max(self.most_in_flight, self.limiter.in_flight)
            for _ in range(self._turns):
                await asyncio.sleep(0)
        self.done.append(request.key.example_id)

    async def count_turns(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1


def units_of(count: int, size: int = 1) -> list[list[RolloutRequest]]:
    return [[RolloutRequest(RolloutKey(0, unit, g), []) for g in range(size)] for unit in range(count)]


async def played(runner: Counting, units: Any) -> Counting:
    counting = asyncio.create_task(runner.count_turns())
    await run_units(runner, units, lambda rollout: None)  # type: ignore[arg-type]
    counting.cancel()
    return runner


@pytest.mark.parametrize("limit", [5, 64, -1, None])
@pytest.mark.parametrize("size", [1, 4])
async def test_every_unit_runs_once_and_never_more_rollouts_than_the_limit(limit: int | None, size: int) -> None:
    limiter = AdaptiveLimiter(start=7, maximum=7) if limit is None else Limiter(limit)
    runner = await played(Counting(limiter, turns=40), units_of(100, size))
    assert sorted(runner.done) == sorted(list(range(100)) * size)
    if limiter.max_concurrent is not None:
        assert runner.most_in_flight == limiter.max_concurrent
    assert limiter.in_flight == 0


async def test_work_is_taken_from_a_long_list_only_when_there_is_room_for_it() -> None:
    taken = 0

    def long_list() -> Any:
        nonlocal taken
        for unit in units_of(500):
            taken += 1
            assert taken - len(runner.done) <= 8 + 2
            yield unit

    runner = Counting(Limiter(8))
    await played(runner, long_list())
    assert taken == 500


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
