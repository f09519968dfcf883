"""Workers as actors of a real Ray cluster: its size, the loss of a node, of the driver, and what is left."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import worker_world as world

from verifiers.errors import ConfigError
from verifiers.types import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.ray]


@pytest.fixture
def new_engine(ray_cluster: Any) -> Callable[..., Any]:
    from verifiers.workers.ray_engine import RayEngine

    return functools.partial(RayEngine, address=ray_cluster.address)


@pytest.fixture
def spots(ray_cluster: Any) -> Iterator[list[Any]]:
    """Two more nodes, with a place for one worker that asks for a spot each."""
    nodes = [ray_cluster.add_node(num_cpus=1, resources={"spot": 1}) for _ in range(2)]
    yield nodes
    for node in nodes:
        if node in ray_cluster.worker_nodes:
            ray_cluster.remove_node(node)


def actors() -> list[int]:
    """Return the processes of this test's cluster that are workers."""
    mark = f"VERIFIERS_TEST_CLUSTER={os.environ['VERIFIERS_TEST_CLUSTER']}"
    return [pid for pid in world.processes_with(mark) if "ray::RolloutActor" in command(pid)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_no_actor_is_left_when_a_run_ends(new_engine: Callable[..., Any]) -> None:
    async def play() -> None:
        played, _ = world.workers_of(world.one_turn, new_engine(2))
        await world.runner_of(played).run_groups(world.requests_of(played, range(6)))
        assert len(actors()) == 2

    asyncio.run(play())
    asyncio.run(asyncio.wait_for(world.until(lambda: not actors()), world.WITHIN_S))


async def test_a_node_that_is_lost_costs_the_rollouts_on_it_alone(
    ray_cluster: Any, spots: list[Any], new_engine: Callable[..., Any], tmp_path: Path
) -> None:
    waiting = [tmp_path / "await release", tmp_path / "await release, too"]
    make = functools.partial(world.Faulty, str(tmp_path))
    # a worker on each of the two nodes, and a rollout in each worker
    played, workers = world.workers_of(make, new_engine(2, resources={"spot": 1.0}), multiplex=1)

    async def lose_a_node() -> None:
        await world.until(lambda: all(path.exists() for path in waiting))
        await asyncio.to_thread(ray_cluster.remove_node, spots[0])
        await world.until(lambda: sum(link.may_play for link in workers.pool()._links) == 1)
        (tmp_path / "release").touch()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(lose_a_node())
        names = [path.name for path in waiting]
        block = await world.play(world.runner_of(played), names, retries=1, size=1)
    assert block.outcomes() == {Outcome.COMPLETED: 2}
    assert [one.reward for one in block.launched] == [1.0, 1.0]
    assert sorted(one.attempts for one in block.launched) == [1, 2]


@pytest.mark.parametrize("what", ["wait", "hang"])
def test_no_actor_is_left_when_the_driver_is_killed(what: str, ray_cluster: Any, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import asyncio, worker_world as world\n"
        "from verifiers.workers.ray_engine import RayEngine\n"
        "async def main():\n"
        f"    engine = RayEngine(2, address={ray_cluster.address!r})\n"
        "    played, _ = world.workers_of(world.Faulty, engine, multiplex=1)\n"
        f"    await world.runner_of(played).run_groups(world.fault_requests({what!r}, 'wait', size=1))\n"
        "asyncio.run(main())\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + world.WITHIN_S
        while sum(".serve" in command(pid) for pid in actors()) < 2:
            assert time.monotonic() < limit
            assert driver.poll() is None
            time.sleep(0.05)
        driver.send_signal(signal.SIGKILL)
        driver.wait(world.WITHIN_S)
        while (left := actors()) and time.monotonic() < limit:
            time.sleep(0.1)
        assert left == []
    finally:
        driver.kill()
        driver.wait()


def run(played: Any) -> Any:
    return world.runner_of(played).run_groups(world.requests_of(played, [0]))


@pytest.mark.parametrize(
    ("count", "options", "sentence"),
    [
        (50, {}, "room for 4 workers of 1 CPU, and not for 50: its nodes have 4 CPU together"),
        (1, {"cpus": 3.0}, "room for 0 workers of 3 CPU, and not for 1: its nodes have 4 CPU together"),
        (None, {"resources": {"docker": 0.1}}, "room for 0 workers of 1 CPU, 0.1 docker"),
    ],
)
async def test_a_cluster_that_is_too_small_is_a_sentence(
    new_engine: Callable[..., Any], count: int | None, options: dict[str, Any], sentence: str
) -> None:
    played, _ = world.workers_of(world.one_turn, new_engine(count, **options))
    with pytest.raises(ConfigError) as refused:
        await run(played)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", ["address", "RAY_ADDRESS"])
async def test_a_cluster_that_is_not_there_is_a_sentence(
    name: str, new_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        engine = new_engine(1, address="auto" if name == "RAY_ADDRESS" else address)
        played, _ = world.workers_of(world.one_turn, engine)
        with pytest.raises(ConfigError, match=rf"cannot join the Ray cluster at {name} = '{address}' .*refused"):
            await run(played)


async def test_a_worker_without_room_is_waited_for_until_its_deadline(
    spots: list[Any], new_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, _ = world.workers_of(world.one_turn, new_engine(resources={"spot": 1.0}))
    await run(holder)
    monkeypatch.setattr("verifiers.workers.ray_engine._PENDING_S", 1.0)
    late, _ = world.workers_of(world.one_turn, new_engine(1, resources={"spot": 1.0}))
    with pytest.raises(ConfigError, match=r"no node of the Ray cluster had 1 CPU, 1 spot free within 1 s"):
        await run(late)


async def test_a_node_with_other_versions_is_refused(
    new_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from verifiers.workers import ray_engine

    monkeypatch.setattr(ray_engine, "_versions", lambda: "verifiers 99.0 on Python 3.11")
    played, _ = world.workers_of(world.one_turn, new_engine(1))
    with pytest.raises(ConfigError, match=r"node 127\.0\.0\.1 has verifiers .* and rank 0 has verifiers 99\.0"):
        await run(played)


async def test_a_stranger_is_not_let_in(new_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from verifiers.workers import ray_engine

    monkeypatch.setattr(ray_engine, "_GREETING_S", 0.5)
    engine = new_engine(1)
    played, _ = world.workers_of(world.one_turn, engine)
    await run(played)
    for greeting in (b"0" * 64 + b"\n", b"x" * 10_000, b""):
        reader, writer = await asyncio.open_connection(*engine.listens_at)
        writer.write(greeting)
        async with asyncio.timeout(world.WITHIN_S):
            try:
                said = await reader.read()
            except ConnectionResetError:
                said = b""
        assert said == b""
        writer.close()
    await run(played)
