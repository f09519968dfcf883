"""Rollouts that workers play: the same as inline, whatever fails. Workers run in the test's own event loop here."""

from __future__ import annotations

import asyncio
import datetime
import functools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worker_world as world

import verifiers as vf
from verifiers.errors import ConfigError, NothingScoredError
from verifiers.integrations.dataserver import RemoteEnv
from verifiers.rollouts.block import BatchRequest, BlockRun, GroupPolicy
from verifiers.types import Outcome
from verifiers.workers.pool import WorkerLink


@pytest.mark.parametrize(
    "make", [world.one_turn, world.Dialogue, world.plays_itself, world.with_agent], ids=lambda make: make.__name__
)
async def test_workers_give_what_inline_gives(make: Callable[[], Any]) -> None:
    env = make()
    requests = world.requests_of(env, range(6), size=3)
    options = {"require_tokens": True}
    inline, remote = world.Model(), world.Model()
    expected = await world.runner_of(env, inline, **options).run_groups(requests)
    played, _ = world.workers_of(make)
    found = await world.runner_of(played, remote, **options).run_groups(requests)
    assert world.plain_of(found) == world.plain_of(expected)
    assert all(rollout.is_scored and rollout.rows for group in found for rollout in group.rollouts)
    # an evaluation asks by which units it is played
    assert played.plays_groups_itself == env.plays_groups_itself == (make is world.plays_itself)

    def asked(model: world.Model) -> Counter[str]:
        return Counter(repr(sorted(call.items(), key=str)) for call in model.calls)

    assert asked(remote) == asked(inline)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("make", [world.Dialogue, world.plays_itself])
async def test_workers_share_the_slots_of_rank_0(make: Callable[[], Any], slots: int) -> None:
    model = world.Model()
    played, _ = world.workers_of(make)
    await world.runner_of(played, model, slots=slots).run_groups(world.requests_of(played, range(6), size=3))
    assert model.most_in_flight == slots


class SecondIsLate(world.InLoop):
    """Workers of which the second loads its environment when it is told to."""

    def __init__(self, count: int = 2) -> None:
        super().__init__(count)
        self.links: list[WorkerLink] = []
        self.loads = asyncio.Event()

    async def start(self, link: WorkerLink) -> Any:
        self.links.append(link)
        running = await super().start(link)
        if link.number == 1:
            send = link.connection.send

            async def later(message: Any) -> None:
                await self.loads.wait()
                send(message)

            link.connection.send = lambda message: asyncio.ensure_future(later(message))  # type: ignore[method-assign]
        return running


async def test_a_worker_that_loads_later_gets_its_share_of_the_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SecondIsLate()
    monkeypatch.setattr(world, "SCORES", asyncio.Event())
    played, _ = world.workers_of(world.scored_later, engine)
    work = asyncio.create_task(world.runner_of(played).run_groups(world.requests_of(played, range(6), size=4)))
    async with asyncio.timeout(60):
        # two groups; the pool tells nobody
        while not (engine.links and engine.links[0].unscored >= 8):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        engine.loads.set()
        while sum(link.unscored for link in engine.links) < 24:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        held = [link.unscored for link in engine.links]
        world.SCORES.set()
        await work
    assert held == [12, 12]


async def test_a_worker_plays_the_next_rollout_while_it_scores_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SecondIsLate(count=1)
    monkeypatch.setattr(world, "SCORES", asyncio.Event())
    played, _ = world.workers_of(world.scored_later, engine, multiplex=1)
    work = asyncio.create_task(world.runner_of(played).run_groups(world.requests_of(played, range(3), size=1)))
    async with asyncio.timeout(60):
        while sum(link.unscored for link in engine.links) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        world.SCORES.set()
        await work


async def test_failures_are_those_of_inline() -> None:
    *requests, waiting = world.fault_requests("", "raise", "ask in vain", "score raise", "wait")

    async def plain(env: Any) -> list[dict[str, Any]]:
        groups = await world.runner_of(env).run_groups(requests)
        # only what waits for good has a short limit
        groups += await world.runner_of(env, rollout_timeout_s=0.5).run_groups([waiting])
        return world.plain_of(groups)

    expected = await plain(world.Faulty())
    played, _ = world.workers_of(world.Faulty)
    found = await plain(played)
    assert found == expected
    assert Counter(one["outcome"] for one in found) == {
        Outcome.COMPLETED: 2,
        Outcome.ENVIRONMENT_ERROR: 2,
        Outcome.PROVIDER_ERROR: 2,
        Outcome.GRADING_ERROR: 2,
        Outcome.TIMED_OUT: 2,
    }


@pytest.mark.parametrize("error", [KeyError("a key"), world.Unprintable()], ids=["KeyError", "unprintable"])
async def test_the_text_of_an_error_is_that_of_inline(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(state: Any) -> None:
        raise error

    monkeypatch.setattr(world.Scripted, "act", fails, raising=False)
    env = world.Scripted()
    requests = world.requests_of(env, [0])
    expected = world.plain_of(await world.runner_of(env, rollout_timeout_s=10).run_groups(requests))
    played, _ = world.workers_of(world.Scripted)
    assert world.plain_of(await world.runner_of(played, rollout_timeout_s=10).run_groups(requests)) == expected
    assert {rollout["outcome"] for rollout in expected} == {Outcome.ENVIRONMENT_ERROR}


async def test_a_rollout_that_times_out_in_a_worker_keeps_what_was_said() -> None:
    env = world.Stalls()
    requests = world.requests_of(env, [0])
    expected = world.plain_of(await world.runner_of(env, rollout_timeout_s=0.5).run_groups(requests))
    played, _ = world.workers_of(world.Stalls)
    assert world.plain_of(await world.runner_of(played, rollout_timeout_s=0.5).run_groups(requests)) == expected
    for rollout in expected:
        assert rollout["outcome"] is Outcome.TIMED_OUT
        assert [message["role"] for message in rollout["completion"]] == ["assistant", "user", "assistant"]


async def test_a_prompt_that_is_too_long_in_a_worker_is_truncated_and_its_group_is_scored() -> None:
    env = world.Overlong()
    requests = world.requests_of(env, range(2), size=4)
    expected = world.plain_of(await world.runner_of(env).run_groups(requests))
    played, _ = world.workers_of(world.Overlong)
    assert world.plain_of(await world.runner_of(played).run_groups(requests)) == expected
    for group in (expected[:4], expected[4:]):
        assert {(one["outcome"], one["reward"]) for one in group} == {
            (Outcome.TRUNCATED, 1.0),
            (Outcome.COMPLETED, 1.0),
        }


async def test_the_traceback_of_a_worker_reaches_rank_0() -> None:
    played, _ = world.workers_of(world.Faulty)
    group = await world.runner_of(played).run_group(world.fault_requests("raise")[0])
    failure = group.rollouts[0].failure
    assert failure is not None
    assert isinstance(failure.exception, LookupError)
    assert "in do" in str(failure.exception.__cause__)


async def test_a_mistake_in_a_worker_ends_the_run() -> None:
    played, _ = world.workers_of(world.Faulty)
    with pytest.raises(ConfigError, match="every rollout repeats"):
        await world.runner_of(played).run_groups(world.fault_requests("", "mistake"))


class Waiting:
    """Rollouts that wait in a worker until it is killed."""

    def __init__(self, engine: world.InLoop) -> None:
        self.engine = engine
        self.killed: list[Any] = []

    async def kill_busy(self) -> None:
        """Wait until a worker plays the row that waits, and kill it."""
        while True:
            for running in self.engine.running:
                is_busy = bool(running.worker.connection._work)
                if is_busy and running not in self.killed:
                    self.killed.append(running)
                    running.kill()
                    return
            await asyncio.sleep(0.005)


async def run_block(runner: Any, requests: Any, retries: int) -> Any:
    flat = [request for group in requests for request in group]
    return await BlockRun(runner, BatchRequest(0, flat), policy=GroupPolicy(retries)).run(0)


async def test_a_lost_worker_makes_its_rollouts_environment_errors_and_the_others_go_on() -> None:
    engine = world.InLoop(2)
    played, _ = world.workers_of(world.Faulty, engine)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        killing = tasks.create_task(Waiting(engine).kill_busy())
        block = await run_block(world.runner_of(played), world.fault_requests("wait", ""), 0)
        await killing
    assert block.outcomes()[Outcome.ENVIRONMENT_ERROR] >= 2
    assert sum(block.outcomes().values()) == len(block.launched) == 4
    lost = [one for one in block.launched if one.outcome is Outcome.ENVIRONMENT_ERROR]
    assert {one.failure.kind for one in lost} == {"RolloutWorkerError"}
    assert all(one.reward is None for one in lost)


async def test_a_rollout_under_which_two_workers_died_is_not_played_again() -> None:
    engine = world.InLoop(1)
    played, _ = world.workers_of(world.Faulty, engine)
    waiting = Waiting(engine)

    async def kill_twice() -> None:
        await waiting.kill_busy()
        await waiting.kill_busy()

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        killing = tasks.create_task(kill_twice())
        groups = world.fault_requests("wait")
        with pytest.raises(NothingScoredError) as failed:
            await run_block(world.runner_of(played), groups, 5)
        await killing
    assert "2 workers died under this rollout" in str(failed.value)
    # the third try has begun nowhere: a new worker is there, and has nothing to do
    assert len(engine.running) <= 3


async def test_a_worker_lost_while_it_scores_has_its_group_played_again() -> None:
    engine = world.InLoop(1)
    played, _ = world.workers_of(world.one_turn, engine)
    runner = world.runner_of(played)
    world.kill_at_score(played, engine)
    async with asyncio.timeout(20):
        block = await run_block(runner, world.requests_of(played, [0]), 1)
    assert block.outcomes() == {Outcome.COMPLETED: 2}
    assert [one.attempts for one in block.launched] == [2, 2]


@pytest.mark.parametrize(
    "make", [functools.partial(world.Faulty, nonsense=1), functools.partial(sys.exit, "nonsense")]
)
async def test_an_environment_that_cannot_be_loaded_ends_the_run_with_its_error(make: Any) -> None:
    env = world.one_turn()
    workers = vf_workers(env, make)
    with pytest.raises(ConfigError, match=r"could not load its environment.*nonsense"):
        await world.runner_of(workers.of(env)).run_groups(world.requests_of(env, [0]))


def vf_workers(env: Any, make: Any) -> Any:
    return world.RemoteWorkers(world.InLoop, [(env, make)])


def test_a_row_that_cannot_travel_is_refused_by_the_name_of_its_field() -> None:
    env = world.one_turn()
    workers = vf_workers(env, world.one_turn)
    row = {"prompt": "p", "answer": "a", "info": {"made": {"on": datetime.date(2026, 1, 1)}}}
    with pytest.raises(ConfigError, match=r"info\.made\.on is a date .* cannot travel"):
        workers.of(env, [row])


async def test_a_call_that_cannot_travel_is_refused_by_the_name_of_its_argument() -> None:
    class Sends(vf.SingleTurnEnv):
        async def get_model_response(self, client: Any, model: str, prompt: Any, **kwargs: Any) -> Any:
            return await client.chat.completions.create(model=model, messages=prompt, extra_body={"when": {1, 2}})

    world.Sends = Sends
    Sends.__module__, Sends.__qualname__ = "worker_world", "Sends"
    make = functools.partial(Sends, dataset=world.ROWS)
    played, _ = world.workers_of(make)
    with pytest.raises(ConfigError, match=r"arguments\.extra_body\.when is a set"):
        await world.runner_of(played).run_groups(world.requests_of(played, [0]))


def test_a_factory_that_a_worker_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be pickled"):
        vf_workers(world.one_turn(), lambda: world.one_turn())


def test_what_a_script_or_notebook_defines_is_refused_by_name_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_short(completion: Any) -> float:
        return 1.0

    is_short.__module__, is_short.__qualname__ = "__main__", "is_short"
    # as in a script, where its name can be looked up
    monkeypatch.setattr(sys.modules["__main__"], "is_short", is_short, raising=False)
    make = functools.partial(vf.SingleTurnEnv, dataset=world.ROWS, rubric=vf.Rubric(funcs=[is_short]))
    with pytest.raises(ConfigError, match="is_short is of the script that runs, which a worker cannot import"):
        vf_workers(make(), make)


@pytest.mark.parametrize("kind", [vf.ExternalEnv, RemoteEnv], ids=lambda kind: kind.__name__)
def test_an_environment_that_needs_rank_0_is_refused(kind: Any) -> None:
    env = kind.__new__(kind)
    with pytest.raises(ConfigError, match=f"workers cannot play {kind.__name__}: .*rank 0"):
        vf_workers(env, world.one_turn).of(env)


def test_an_environment_without_a_factory_is_refused() -> None:
    with pytest.raises(ConfigError, match="give them a factory"):
        vf_workers(world.one_turn(), world.one_turn).of(world.Faulty())


async def test_what_finished_rollouts_leave_behind_is_nothing(tmp_path: Path) -> None:
    engine = world.InLoop(2)
    played, workers = world.workers_of(world.Faulty, engine)
    requests = world.fault_requests("", "raise", "ask in vain", "score raise", "wait")
    await world.runner_of(played, rollout_timeout_s=0.3).run_groups(requests)
    async with asyncio.timeout(20):
        await world.until(
            lambda: not any(running.worker._held or running.worker.connection._work for running in engine.running)
        )
    for link in workers.pool()._links:
        assert (link.in_play, link.unscored, +link.groups) == (0, 0, {})
        assert not any((link._rollouts, link.connection._asked, link.connection._work))
