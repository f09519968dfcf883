"""Workers as real processes: what ends them, what ends with them, and what is in them."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worker_world as world

from verifiers.rollouts.block import BlockRun, GroupPolicy
from verifiers.types import Outcome
from verifiers.workers.processes import ProcessEngine

pytestmark = pytest.mark.slow

WITHIN_S = 120.0


def workers_in_processes(make: Callable[[], Any], count: int = 2, **options: Any) -> Any:
    played, _ = world.workers_of(make, ProcessEngine(count), **options)
    return played


def processes_with(text: str) -> list[int]:
    """Return the processes whose command or environment has this text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


async def play(runner: Any, names: list[str], *, retries: int = 0, size: int = 2) -> Any:
    requests = [request for group in world.fault_requests(*names, size=size) for request in group]
    async with asyncio.timeout(WITHIN_S):
        return await BlockRun(runner, 0, requests, policy=GroupPolicy(retries)).run(0)


async def test_processes_give_what_inline_gives_and_end_with_the_run() -> None:
    env = world.Dialogue()
    requests = world.requests_of(env, range(6), size=3)
    before = children()
    expected = await world.runner_of(env, require_tokens=True).run_groups(requests)

    async def in_processes() -> Any:
        played = workers_in_processes(world.Dialogue)
        return await world.runner_of(played, require_tokens=True).run_groups(requests)

    found = await asyncio.to_thread(lambda: asyncio.run(in_processes()))
    assert world.plain_of(found) == world.plain_of(expected)
    assert children() == before


@pytest.mark.parametrize("what", ["die", "hang", "fill memory"])
async def test_a_fault_of_a_worker_costs_its_own_rollouts_alone(what: str) -> None:
    played = workers_in_processes(world.Faulty, multiplex=2, blocked_s=1.0)
    block = await play(world.runner_of(played), ["", what])
    assert block.outcomes() == {Outcome.COMPLETED: 2, Outcome.ENVIRONMENT_ERROR: 2}
    assert sum(block.outcomes().values()) == len(block.launched)
    kinds = Counter(one.failure.kind for one in block.launched if one.failure is not None)
    assert kinds == {"MemoryError" if what == "fill memory" else "RolloutWorkerError": 2}
    if what == "hang":
        text = str(next(one.failure for one in block.launched if one.failure is not None))
        assert "setup_state (" in text
        assert "has blocked the event loop for 1 s" in text


@pytest.mark.parametrize("what", ["die once", "score die once"])
async def test_retries_play_what_a_dead_worker_lost(what: str, tmp_path: Path) -> None:
    make = functools.partial(world.Faulty, str(tmp_path))
    block = await play(world.runner_of(workers_in_processes(make)), [what, ""], retries=1)
    assert block.outcomes() == {Outcome.COMPLETED: 4}
    assert sorted({one.attempts for one in block.launched}) in ([1, 2], [2])


def is_alive(pid: str) -> bool:
    # a zombie waits for its parent's parent
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


async def until(is_true: Callable[[], Any]) -> None:
    while not is_true():  # noqa: ASYNC110 - a process tells nobody
        await asyncio.sleep(0.05)


async def test_a_killed_worker_leaves_no_process_of_its_own(tmp_path: Path) -> None:
    played, workers = world.workers_of(functools.partial(world.Faulty, str(tmp_path)), ProcessEngine(1))
    noted = tmp_path / "child"
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(world.runner_of(played).run_groups(world.fault_requests("start a process", size=1)))
        await until(lambda: noted.exists() and noted.read_text())
        assert is_alive(noted.read_text())
        workers.pool()._links[0].running.kill()
        await until(lambda: not is_alive(noted.read_text()))


async def test_logs_and_prints_reach_the_run_with_the_number_of_their_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with caplog.at_level(logging.INFO):
        played = workers_in_processes(world.Talkative, 1)
        await world.runner_of(played).run_group(world.requests_of(played, [0], size=1)[0])
    said = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    assert ("mine", "WARNING", "worker 0: a log line of the environment") in said
    assert ("verifiers.workers", "INFO", "worker 0: a printed line") in said


async def test_nothing_heavy_is_in_a_worker_that_its_environment_does_not_import() -> None:
    played = workers_in_processes(world.Talkative, 1)
    group = await world.runner_of(played).run_group(world.requests_of(played, [0], size=1)[0])
    modules = set(group.rollouts[0].state["modules"])
    assert "verifiers.workers.worker" in modules
    assert modules.isdisjoint({"torch", "transformers", "trl", "ray", "openai", "pytest"})


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM, None])
def test_workers_end_with_their_parent_whatever_ends_it(ends: signal.Signals | None, tmp_path: Path) -> None:
    mark = f"VERIFIERS_TEST_{os.getpid()}_{time.monotonic_ns()}"
    # two workers wait in a rollout, one blocks its event loop
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import asyncio, worker_world as world\n"
        "from verifiers.workers.processes import ProcessEngine\n"
        "async def main():\n"
        "    played, _ = world.workers_of(world.Faulty, ProcessEngine(3), multiplex=1)\n"
        "    groups = world.runner_of(played).run_groups(world.fault_requests('wait', 'hang', 'wait', size=1))\n"
        f"    await asyncio.wait_for(groups, {3600 if ends else 8})\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, mark: "1"}, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + WITHIN_S
        while len(processes_with(mark)) < 4:
            assert time.monotonic() < until
            assert parent.poll() is None
            time.sleep(0.05)
        if ends is not None:
            time.sleep(3)
            parent.send_signal(ends)
        parent.wait(WITHIN_S)
        until = time.monotonic() + 30
        while (left := processes_with(mark)) and time.monotonic() < until:
            time.sleep(0.1)
        assert left == []
    finally:
        parent.kill()
        parent.wait()


# as many imports, on as many cores as there are
@pytest.mark.timeout(900)
def test_200_idle_workers_start_and_end_with_the_run() -> None:
    before = children()

    async def start() -> int:
        played, workers = world.workers_of(world.idle, ProcessEngine(200))
        async with asyncio.timeout(800):
            await world.runner_of(played).run_group(world.requests_of(played, [0])[0])
            links = workers.pool()._links
            while not all(link.is_ready for link in links):  # noqa: ASYNC110 - nobody waits for all of them
                await asyncio.sleep(0.1)
        return len(links)

    assert asyncio.run(start()) == 200
    assert children() == before
