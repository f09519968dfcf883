"""Guarantees of each engine: the rollouts of inline, and faults that cost only the rollouts they hit."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worker_world as world

from verifiers.errors import ConfigError
from verifiers.types import Outcome
from verifiers.workers.pool import RemoteWorkers
from verifiers.workers.processes import ProcessEngine

pytestmark = pytest.mark.slow

NewEngine = Callable[..., Any]


async def test_an_engine_gives_what_inline_gives(new_engine: NewEngine) -> None:
    env = world.Dialogue()
    requests = world.requests_of(env, range(6), size=3)
    expected = await world.runner_of(env, require_tokens=True).run_groups(requests)
    played, _ = world.workers_of(world.Dialogue, new_engine(2))
    found = await world.runner_of(played, require_tokens=True).run_groups(requests)
    assert world.plain_of(found) == world.plain_of(expected)


@pytest.mark.parametrize("what", ["die", "hang", "fill memory"])
async def test_a_fault_of_a_worker_costs_its_own_rollouts_alone(what: str, new_engine: NewEngine) -> None:
    played, workers = world.workers_of(world.Faulty, new_engine(2), multiplex=2, blocked_s=1.0)
    # a worker that is there long before the other gets both groups, one after the other
    await world.until(lambda: sum(link.may_play for link in workers.pool()._links) == 2)
    block = await world.play(world.runner_of(played), ["", what])
    assert block.outcomes() == {Outcome.COMPLETED: 2, Outcome.ENVIRONMENT_ERROR: 2}
    assert sum(block.outcomes().values()) == len(block.launched)
    kinds = Counter(one.failure.kind for one in block.launched if one.failure is not None)
    assert kinds == {"MemoryError" if what == "fill memory" else "RolloutWorkerError": 2}
    if what == "hang" and new_engine is ProcessEngine:
        # what a worker in Ray prints last is shown by Ray
        text = str(next(one.failure for one in block.launched if one.failure is not None))
        assert "one function has blocked the event loop" in text
        assert "in do" in text


@pytest.mark.parametrize("what", ["die once", "score die once"])
async def test_retries_play_what_a_dead_worker_lost(what: str, tmp_path: Path, new_engine: NewEngine) -> None:
    make = functools.partial(world.Faulty, str(tmp_path))
    played, _ = world.workers_of(make, new_engine(2))
    block = await world.play(world.runner_of(played), [what, ""], retries=1)
    assert block.outcomes() == {Outcome.COMPLETED: 4}
    assert sorted({one.attempts for one in block.launched}) in ([1, 2], [2])


def is_alive(pid: str) -> bool:
    # a zombie waits for its parent's parent
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.parametrize("by", ["the run", "another process"])
async def test_a_killed_worker_leaves_no_process_of_its_own(by: str, tmp_path: Path, new_engine: NewEngine) -> None:
    played, workers = world.workers_of(functools.partial(world.Faulty, str(tmp_path)), new_engine(1))
    noted = tmp_path / "child"
    async with asyncio.timeout(world.WITHIN_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(world.runner_of(played).run_groups(world.fault_requests("start a process", size=1)))
        await world.until(lambda: noted.exists() and noted.read_text())
        child, worker = noted.read_text().split()
        assert is_alive(child)
        if by == "the run":
            workers.pool()._links[0].running.kill()
        else:
            os.kill(int(worker), signal.SIGKILL)
        await world.until(lambda: not is_alive(child))


async def test_logs_reach_the_run_with_the_number_of_their_worker(
    new_engine: NewEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        played, _ = world.workers_of(world.Talkative, new_engine(1))
        await world.runner_of(played).run_group(world.requests_of(played, [0], size=1)[0])
    said = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert ("mine", "WARNING", "worker 0: a log line of the environment") in said


async def test_an_environment_that_takes_too_long_to_load_is_told_as_such(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifiers.workers.pool._START_S", 0.5)
    env = world.one_turn()
    workers = RemoteWorkers(functools.partial(new_engine, 1), [(env, functools.partial(time.sleep, 3600.0))])
    with pytest.raises(ConfigError, match=r"worker 0 had not loaded its environment after 0\.5 s"):
        await world.runner_of(workers.of(env)).run_groups(world.requests_of(env, [0]))
