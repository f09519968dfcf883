"""Workers as real processes: what ends them, what ends with them, and what is in them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import worker_world as world

from verifiers.workers.processes import ProcessEngine

pytestmark = pytest.mark.slow


def workers_in_processes(make: Callable[[], Any], count: int = 2, **options: Any) -> Any:
    played, _ = world.workers_of(make, ProcessEngine(count), **options)
    return played


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


async def test_processes_end_with_the_run() -> None:
    before = children()

    async def play() -> None:
        played = workers_in_processes(world.one_turn)
        await world.runner_of(played).run_groups(world.requests_of(played, range(6)))

    await asyncio.to_thread(lambda: asyncio.run(play()))
    assert children() == before


async def test_nothing_heavy_is_in_a_worker_and_what_it_prints_reaches_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with caplog.at_level(logging.INFO):
        played = workers_in_processes(world.Talkative, 1)
        group = await world.runner_of(played).run_group(world.requests_of(played, [0], size=1)[0])
        # a thread reads what is printed, beside the answer
        await world.until(lambda: "worker 0: a printed line" in caplog.messages)
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
        until = time.monotonic() + world.WITHIN_S
        while len(world.processes_with(mark)) < 4:
            assert time.monotonic() < until
            assert parent.poll() is None
            time.sleep(0.05)
        if ends is not None:
            time.sleep(3)
            parent.send_signal(ends)
        parent.wait(world.WITHIN_S)
        until = time.monotonic() + 30
        while (left := world.processes_with(mark)) and time.monotonic() < until:
            time.sleep(0.1)
        assert left == []
    finally:
        parent.kill()
        parent.wait()
