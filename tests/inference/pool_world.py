"""Rollout servers of a run, and what the tests of pushes to them share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from verifiers.inference.server_client import ServerClient
from verifiers.inference.server_pool import Load, ServerPool, WeightUpdate
from verifiers.testing import FakeOpenAIServer
from verifiers.testing.faults import Faults

NEVER_PUSHED = "default"


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def restarted(server: FakeOpenAIServer) -> None:
    """Leave what a restart leaves: weights that nobody pushed, and no pause."""
    server.weight_version = NEVER_PUSHED
    server.paused = False


def loads(server: FakeOpenAIServer) -> int:
    """Count the loads that a server was asked for."""
    return sum(call.path == "/collective_rpc" for call in server.weight_calls)


def push(pool: ServerPool, version: int, load: Load | None = None) -> None:
    """Push weights that a server loads by one request, or by `load`."""

    async def by_request(server: ServerClient, timeout_s: float) -> None:
        await server.request("POST", "/collective_rpc", {"version": version}, timeout_s)

    pool.run(pool.push(WeightUpdate(version, load or by_request)))


@contextmanager
def pool_of(count: int, *, route_faults: dict[str, Faults] | None = None, timeout_s: float = 30.0) -> Iterator[Any]:
    """Servers and the connected pool of them; the last server has the faults."""
    with ExitStack() as stack:
        made = [FakeOpenAIServer(weight_version=NEVER_PUSHED) for _ in range(count - 1)]
        made.append(FakeOpenAIServer(weight_version=NEVER_PUSHED, route_faults=route_faults))
        servers = [stack.enter_context(server) for server in made]
        pool = ServerPool([server.url for server in servers], timeout_s=timeout_s)
        stack.callback(pool.stop)
        pool.run(pool.connect(30.0))
        yield pool, servers
