"""Messages that cross between rank 0 and a worker: answers, drops, deadlines and ends."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest
import worker_world as world

import verifiers as vf
from verifiers.errors import ConfigError, OverlongPromptError, RolloutWorkerError
from verifiers.inference.wire import WireObject, plain_data
from verifiers.types import Outcome
from verifiers.workers import pool
from verifiers.workers.pool import WorkerLink

Act = Callable[[vf.State], Any]


@pytest.fixture
def begin_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Act], None]:
    """Return a function that sets what rollouts of `Scripted` begin with."""
    return lambda act: monkeypatch.setattr(world.Scripted, "act", staticmethod(act), raising=False)


async def nothing(state: vf.State) -> None:
    pass


def ask(state: vf.State, what: str, **arguments: Any) -> Any:
    messages = [{"role": "user", "content": what}]
    return state["client"].chat.completions.create(model=state["model"], messages=messages, **arguments)


async def test_an_answer_on_its_way_to_a_call_that_was_given_up_is_not_trained(begin_with: Any) -> None:
    calls: list[asyncio.Future[Any]] = []

    async def hang_up(state: vf.State) -> None:
        calls.append(asyncio.ensure_future(ask(state, "hang up")))
        await asyncio.wait(calls)

    class HangsUp(world.Model):
        async def call(self, path: str, arguments: Any) -> Any:
            answer = await super().call(path, arguments)
            if arguments["messages"][-1]["content"] == "hang up":
                # rank 0 has recorded the answer then, and the worker has not read it
                asyncio.get_running_loop().call_soon(calls[0].cancel)
            return answer

    begin_with(hang_up)
    played, _ = world.workers_of(world.Scripted)
    runner = world.runner_of(played, HangsUp(), require_tokens=True)
    group = await runner.run_group(world.requests_of(played, [0], size=1)[0])
    (rollout,) = group.rollouts
    assert calls[0].cancelled()
    assert (rollout.outcome, rollout.turns, len(rollout.rows)) == (Outcome.COMPLETED, 1, 1)


@pytest.mark.parametrize("place", ["inline", "worker"])
async def test_an_overflow_that_the_environment_made_good_is_none(begin_with: Any, place: str) -> None:
    class Overflows(world.Model):
        async def call(self, path: str, arguments: Any) -> Any:
            if arguments["messages"][-1]["content"] == "too long":
                raise OverlongPromptError("too long")
            return await super().call(path, arguments)

    async def overflow(state: vf.State) -> None:
        with pytest.raises(OverlongPromptError):
            await ask(state, "too long")
        state["client"].overlong = False

    begin_with(overflow)
    played = world.workers_of(world.Scripted)[0] if place == "worker" else world.Scripted()
    group = await world.runner_of(played, Overflows()).run_group(world.requests_of(played, [0])[0])
    assert {one.outcome for one in group.rollouts} == {Outcome.COMPLETED}


async def test_a_call_whose_answer_cannot_be_written_fails_at_once(begin_with: Any) -> None:
    class Deep(world.Model):
        async def call(self, path: str, arguments: Any) -> Any:
            answer = await super().call(path, arguments)
            nested: list[Any] = []
            for _ in range(5000):
                nested = [nested]
            return WireObject({**plain_data(answer), "extra": nested})

    begin_with(nothing)
    played, _ = world.workers_of(world.Scripted)
    async with asyncio.timeout(20):
        (rollout,) = await world.runner_of(played, Deep()).play(world.requests_of(played, [0], size=1)[0])
    assert rollout.outcome is not Outcome.COMPLETED
    assert "recursion" in str(rollout.failure)


async def test_a_call_that_follows_the_end_of_its_rollout_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[asyncio.Future[Any]] = []

    async def play(self: Any, state: vf.State) -> None:
        await vf.SingleTurnEnv.play(self, state)
        calls.append(asyncio.ensure_future(ask(state, "late")))

    monkeypatch.setattr(world.Scripted, "play", play)
    monkeypatch.setattr(world.Scripted, "act", staticmethod(nothing), raising=False)
    played, _ = world.workers_of(world.Scripted)
    model = world.Model()
    (rollout,) = await world.runner_of(played, model).play(world.requests_of(played, [0], size=1)[0])
    assert rollout.outcome is Outcome.COMPLETED
    async with asyncio.timeout(20):
        with pytest.raises(ConfigError, match="the rollout is over"):
            await calls[0]
    assert len(model.calls) == 1


async def both_ready(workers: Any) -> list[WorkerLink]:
    links = workers.pool()._links
    async with asyncio.timeout(20):
        while len(links) < 2 or not all(link.may_play for link in links):  # noqa: ASYNC110 - nobody waits for all
            await asyncio.sleep(0.005)
    return links


async def test_a_group_in_two_workers_is_freed_in_both(begin_with: Any) -> None:
    begin_with(nothing)
    engine = world.InLoop(2)
    played, workers = world.workers_of(world.Scripted, engine)
    links = await both_ready(workers)
    runner = world.runner_of(played)
    states = [(await runner.play(group))[0].state for group in world.requests_of(played, [0, 1], size=1)]
    assert len({state.held[0] for state in states}) == 2
    with pytest.raises(RolloutWorkerError, match="before the rollouts of its group were scored"):
        await played.rubric.score_group(states)
    assert [(link.unscored, link._rollouts) for link in links] == [(0, {}), (0, {})]
    async with asyncio.timeout(20):
        while any(running.worker._held for running in engine.running):  # noqa: ASYNC110 - a worker tells nobody
            await asyncio.sleep(0.005)


async def test_states_that_are_no_plain_data_end_their_rollouts(begin_with: Any) -> None:
    class Broken:
        def model_dump(self) -> Any:
            raise LookupError("no dump")

    async def fill(state: vf.State) -> None:
        row = state["answer"]
        if row == "a":
            state["answer"] = state["array"] = np.arange(3)
        if row == "b":
            loop: dict[str, Any] = {}
            loop["again"] = [loop, loop, loop]
            state["loop"] = loop
        if row == "c":
            state["broken"] = Broken()
        if row == "d":
            state["number"] = 10**5000

    begin_with(fill)
    played, _ = world.workers_of(world.Scripted)
    async with asyncio.timeout(20):
        batches = [await world.runner_of(played).play(group) for group in world.requests_of(played, range(4), size=1)]
    (array,), (loop,), (broken,), (long,) = batches
    assert (array.outcome, array.answer, array.state["array"]) == (Outcome.COMPLETED, [0, 1, 2], [0, 1, 2])
    assert loop.outcome is Outcome.COMPLETED
    assert broken.outcome is Outcome.ENVIRONMENT_ERROR
    assert "no dump" in str(broken.failure)
    assert (long.outcome, long.state["number"]) == (Outcome.COMPLETED, hex(10**5000))


async def test_a_rollout_that_its_environment_cancels_fails_at_once(begin_with: Any) -> None:
    async def cancel(state: vf.State) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    begin_with(cancel)
    played, _ = world.workers_of(world.Scripted)
    async with asyncio.timeout(20):
        (rollout,) = await world.runner_of(played).play(world.requests_of(played, [0], size=1)[0])
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "CancelledError" in str(rollout.failure)


async def test_a_deadline_lets_what_a_rollout_cleans_up_take_longer_than_rank_0_waits(
    begin_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_CANCEL_S", 0.0)
    goes_on, ends, ended = asyncio.Event(), list[str](), asyncio.Event()

    async def clean_up(state: vf.State) -> None:
        if state["answer"] != "a":
            return
        try:
            await asyncio.sleep(3600)
        finally:
            try:
                await goes_on.wait()
                ends.append("cleaned up")
            finally:
                ended.set()

    begin_with(clean_up)
    played, _ = world.workers_of(world.Scripted, world.InLoop(1))
    late, next_one = world.requests_of(played, [0, 1], size=1)
    (rollout,) = await world.runner_of(played, rollout_timeout_s=0.1).play(late)
    assert rollout.outcome is Outcome.TIMED_OUT
    # messages arrive in order, so all that was told of the first has arrived then
    await world.runner_of(played).play(next_one)
    goes_on.set()
    async with asyncio.timeout(20):
        await ended.wait()
    assert ends == ["cleaned up"]


@pytest.mark.parametrize("what", ["image", "tool"])
async def test_what_one_agent_in_a_worker_asks_does_not_end_the_run(what: str) -> None:
    def refuse(sent: Any) -> None:
        if sent.get("tool_choice") == "required":
            raise vf.ConfigError("tool_choice is 'required'")

    played, _ = world.workers_of(functools.partial(world.with_asking_agent, what))
    runner = world.runner_of(played, require_tokens=True, check_call=refuse)
    group = await runner.run_group(world.requests_of(played, [0])[0])
    assert {one.outcome for one in group.rollouts} == {Outcome.COMPLETED}
    assert [one.turns for one in group.rollouts] == [1, 1]


async def test_a_worker_whose_connection_is_lost_gets_no_group() -> None:
    engine = world.InLoop()
    played, workers = world.workers_of(world.one_turn, engine)
    runner = world.runner_of(played)
    await runner.run_groups(world.requests_of(played, [0]))
    link = next(link for link in workers.pool()._links if link.may_play)

    async def late() -> str:
        await asyncio.sleep(1.0)
        return "died"

    # as of a process, or of Ray's, the end is known some time after the connection's
    link.running.wait = late
    link.connection.abort()
    await world.until(link.lost.done)
    blocks = await runner.run_groups(world.requests_of(played, [1, 2]))
    assert {one.outcome for group in blocks for one in group.rollouts} == {Outcome.COMPLETED}


async def test_an_untrained_call_has_the_arguments_of_the_sdk(begin_with: Any) -> None:
    async def judge(state: vf.State) -> None:
        messages = [{"role": "user", "content": "judge"}]
        await state["client"].untrained.chat.completions.create(
            model="judge", messages=messages, temperature=openai.NOT_GIVEN, timeout=openai.Timeout(5.0)
        )

    begin_with(judge)
    played, _ = world.workers_of(world.Scripted)
    model = world.Model()
    group = await world.runner_of(played, model).run_group(world.requests_of(played, [0], size=1)[0])
    assert group.rollouts[0].failure is None
    (asked,) = [call for call in model.calls if call["model"] == "judge"]
    assert asked["timeout"] == 5.0
    assert "temperature" not in asked


async def test_answers_to_two_roles_at_once_are_each_trained_as_its_own(begin_with: Any) -> None:
    async def ask_both(state: vf.State) -> None:
        async with asyncio.TaskGroup() as calls:
            for name in ("one", "two"):
                create = state["client"].role(name).chat.completions.create
                messages = [{"role": "user", "content": name}]
                calls.create_task(create(model=state["model"], messages=messages))

    begin_with(ask_both)
    played, _ = world.workers_of(world.Scripted)
    runner = world.runner_of(played, require_tokens=True)
    group = await runner.run_group(world.requests_of(played, [0], size=1)[0])
    assert {row.role for row in group.rollouts[0].rows} == {"one", "two", None}


async def test_a_score_that_is_given_up_leaves_nothing_in_the_worker() -> None:
    engine = world.InLoop(1)
    played, _ = world.workers_of(world.Faulty, engine)
    async with asyncio.timeout(20):
        group = await world.runner_of(played, grading_timeout_s=0.1).run_group(world.fault_requests("score wait")[0])
        assert {one.outcome for one in group.rollouts} == {Outcome.GRADING_ERROR}
        await world.until(lambda: not engine.running[0].worker._held)


async def test_every_environment_of_a_run_is_loaded_before_the_first_rollout() -> None:
    env, other = world.one_turn(), world.Scripted()
    unmade = functools.partial(world.Faulty, nonsense=1)
    workers = world.RemoteWorkers(world.InLoop, [(env, world.one_turn), (other, unmade)])
    with pytest.raises(ConfigError, match=r"could not load its environment.*nonsense"):
        await world.runner_of(workers.of(env)).run_groups(world.requests_of(env, [0]))
