"""Reward functions run in threads until they are known to be quick, the event loop from then on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from verifiers.rubrics import Rubric, scoring
from verifiers.rubrics.scoring import PreparedCall
from verifiers.types import State


class Clock:
    """A perf_counter that moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(scoring, "time", self)

    def perf_counter(self) -> float:
        return self.now


class Timed:
    """A reward function that takes the given seconds, one a call, and notes its thread."""

    def __init__(self, clock: Clock, *seconds: float) -> None:
        self.clock = clock
        self.seconds = list(seconds)
        self.threads: list[bool] = []

    def __call__(self, answer: str) -> float:
        self.clock.now += self.seconds.pop(0)
        self.threads.append(threading.current_thread() is not threading.main_thread())
        return 1.0


async def threads_used(func: Timed) -> list[bool]:
    call = PreparedCall(func)
    while func.seconds:
        await call({"answer": "a"})
    return func.threads


async def test_a_function_proven_quick_moves_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    func = Timed(Clock(monkeypatch), *[0.0005] * 5)
    assert await threads_used(func) == [True, True, True, False, False]


async def test_a_slow_first_call_only_delays_the_move(monkeypatch: pytest.MonkeyPatch) -> None:
    func = Timed(Clock(monkeypatch), 2.0, 0.0005, 0.0005, 0.0005, 0.0005)
    assert await threads_used(func) == [True, True, True, True, False]


async def test_a_function_that_is_not_quick_stays_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    func = Timed(Clock(monkeypatch), *[0.0005, 0.0005, 0.002] * 3)
    assert await threads_used(func) == [True] * 9


async def test_one_slow_call_on_the_loop_sends_it_back_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    func = Timed(Clock(monkeypatch), *[0.0005] * 3, 0.006, *[0.0005] * 5)
    assert await threads_used(func) == [True] * 3 + [False] + [True] * 5


async def test_a_slow_function_does_not_stall_the_loop() -> None:
    release = threading.Event()

    def slow(answer: str) -> float:
        return 1.0 if release.wait(10) else 0.0

    state = State(prompt="p", completion="c", answer="a")
    scoring = asyncio.create_task(Rubric(funcs=[slow]).score_rollout(state))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not scoring.done()
    release.set()
    assert (await scoring).reward == 1.0


def test_functions_run_on_any_number_of_event_loops() -> None:
    rubric = Rubric(funcs=[lambda answer: 1.0])

    async def score() -> Any:
        return (await rubric.score_rollout("p", "c", "a", State())).reward

    assert [asyncio.run(score()) for _ in range(5)] == [1.0] * 5
