"""Reward functions: where and in which order they run, and the deadline of a group."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from verifiers.concurrency import threads_for
from verifiers.rubrics import Rubric
from verifiers.rubrics.judge_rubric import JudgeRubric
from verifiers.rubrics.scoring import SingleFlight, grading_deadline, waiting_turn
from verifiers.testing import FakeOpenAIServer
from verifiers.types import RewardFunc, State


def states_of(count: int) -> list[State]:
    return [State(prompt="p", completion=str(number), answer="a") for number in range(count)]


async def test_all_plain_functions_of_a_group_run_in_one_thread_and_async_ones_on_the_loop() -> None:
    threads: dict[str, set[int]] = {"plain": set(), "of_group": set(), "on_loop": set()}

    def plain(completion: str) -> float:
        threads["plain"].add(threading.get_ident())
        return float(completion)

    def of_group(completions: list[str]) -> list[float]:
        threads["of_group"].add(threading.get_ident())
        return [1.0] * len(completions)

    async def on_loop(completion: str) -> float:
        threads["on_loop"].add(threading.get_ident())
        return 1.0

    # a rubric of plain functions has one thread for them all
    scores = await Rubric([of_group, plain]).score_group(states_of(5))
    assert [score.reward for score in scores] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert threads["plain"] == threads["of_group"] != {threading.get_ident()}
    await Rubric([plain, on_loop]).score_group(states_of(5))
    assert threads["on_loop"] == {threading.get_ident()}


@pytest.mark.parametrize(
    ("parallel", "order"),
    [(True, {"a1 a2 g", "a2 a1 g"}), (False, {"a1 p1 a2 g"})],
)
async def test_functions_of_the_group_come_last_and_others_in_order_where_that_is_wanted(
    parallel: bool, order: set[str]
) -> None:
    def noting(name: str, value: Any = 1.0) -> Any:
        def note(state: Any) -> Any:
            state["order"] = f"{state.get('order', '')} {name}".strip()
            return value

        return note

    async def a1(state: State) -> float:
        await asyncio.sleep(0.001)
        return float(noting("a1")(state))

    async def a2(state: State) -> float:
        return float(noting("a2")(state))

    def group(states: list[State]) -> list[float]:
        return [noting("g")(state) for state in states]

    plain = [] if parallel else [noting("p1")]
    rubric = Rubric([group, a1, *plain, a2], parallelize_scoring=parallel)
    states = states_of(3)
    await rubric.score_group(states)
    assert {state["order"] for state in states} <= order


async def test_plain_functions_that_ask_a_judge_do_not_wait_for_each_other() -> None:
    together = threading.Barrier(4)

    def says_yes(judge: Any, prompt: Any, completion: Any, answer: Any, state: State) -> float:
        together.wait(20)
        return float("yes" in judge(prompt, completion, answer, state))

    with FakeOpenAIServer("yes") as server:
        rubric = JudgeRubric(judge_base_url=server.url, judge_model="judge", funcs=[says_yes])
        scores = await rubric.score_group(states_of(4))
    assert [score.reward for score in scores] == [1.0] * 4


async def test_a_function_that_hangs_is_left_at_the_deadline_and_nothing_after_it_is_called() -> None:
    loop, begun, release, called = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), []

    def hangs(completion: str) -> float:
        called.append(completion)
        loop.call_soon_threadsafe(begun.set)
        release.wait(20)
        return 1.0

    async def score() -> None:
        async with grading_deadline(60.0) as deadline:
            deadlines.append(deadline)
            await Rubric([hangs]).score_group(states_of(3))

    deadlines: list[asyncio.Timeout] = []
    grading = asyncio.create_task(score())
    await begun.wait()
    deadlines[0].reschedule(loop.time())
    with pytest.raises(TimeoutError):
        await grading
    assert deadlines[0].expired()
    release.set()
    await Rubric([lambda completion: 1.0]).score_group(states_of(1))
    assert called == ["0"]


async def test_waiting_for_a_free_thread_does_not_count_as_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, begun, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def occupies(completion: str) -> float:
        loop.call_soon_threadsafe(begun.set)
        return 1.0 if release.wait(20) else 0.0

    async def waits(timeout_s: float) -> None:
        async with grading_deadline(timeout_s) as deadline:
            grading = asyncio.create_task(Rubric([occupies]).score_group(states_of(1)))
            while deadline.when() is not None:  # noqa: ASYNC110 - its own turn of the loop begins the wait
                await asyncio.sleep(0)
            release.set()
            assert (await grading)[0].reward == 1.0
            assert deadline.when() is not None

    monkeypatch.setattr(threads_for("reward function", 1), "limit", 1)
    first = asyncio.create_task(Rubric([occupies]).score_group(states_of(1)))
    await begun.wait()
    await waits(60.0)
    assert (await first)[0].reward == 1.0


async def test_waiting_for_free_workers_does_not_count_as_grading() -> None:
    async with grading_deadline(0.2) as deadline:
        with waiting_turn() as first, waiting_turn() as second:
            await asyncio.sleep(0.3)
            first()
            await asyncio.sleep(0.3)
            assert deadline.when() is None
            second()
            second()
            await asyncio.sleep(0.01)
            assert deadline.when() is not None

    async def grades() -> None:
        async with grading_deadline(0.05):
            with waiting_turn() as begun:
                begun()
                await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await grades()


async def test_a_cancelled_caller_leaves_the_work_to_the_next() -> None:
    shared, begun = SingleFlight(), asyncio.Event()
    release = asyncio.Event()

    async def work() -> str:
        begun.set()
        await release.wait()
        return "done"

    first = asyncio.create_task(shared.result("key", work))
    await begun.wait()
    second = asyncio.create_task(shared.result("key", work))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    release.set()
    assert await asyncio.wait_for(second, 5) == "done"


def test_functions_of_one_name_are_numbered_as_lambdas_are() -> None:
    def at_least(least: int) -> RewardFunc:
        def check(completion: str) -> float:
            return float(len(completion) >= least)

        return check

    funcs = [at_least(1), lambda completion: 0.0, at_least(1000), lambda completion: 0.0, at_least(2)]
    assert Rubric(funcs).get_reward_func_names() == ["check_1", "lambda_1", "check_2", "lambda_2", "check_3"]
    assert Rubric(funcs[:2]).get_reward_func_names() == ["check", "<lambda>"]
