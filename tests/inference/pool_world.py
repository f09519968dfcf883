"""Rollout servers of a run, and what the tests of pushes to them share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from verifiers.inference import rollout_server as replica_module
from verifiers.inference import server_pool as pool_module
from verifiers.inference.rollout_server import ServerClient, WeightUpdate
from verifiers.inference.server_pool import ServerPool
from verifiers.testing import FakeOpenAIServer
from verifiers.testing.faults import Faults

NEVER_PUSHED = "default"


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def release_within(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound the time in which a pool that ends continues its servers."""
    for module in (pool_module, replica_module):
        monkeypatch.setattr(module, "SHUTDOWN_S", seconds)


def restarted(server: FakeOpenAIServer) -> None:
    """Leave what a restart leaves: weights that nobody pushed, and no pause."""
    server.weight_version = NEVER_PUSHED
    server.paused = False


def loads(server: FakeOpenAIServer) -> int:
    """Count the loads that a server was asked for."""
    return sum(call.path == "/collective_rpc" for call in server.weight_calls)


def update(version: int, load: Any = None, **options: Any) -> WeightUpdate:
    """Weights that a server loads by one request, or by `load`."""

    async def by_request(server: ServerClient, timeout_s: float) -> None:
        await server.request("POST", "/collective_rpc", {"version": version}, timeout_s=timeout_s)

    return WeightUpdate(version, load or by_request, **options)


@contextmanager
def pool_of(count: int, *, route_faults: dict[str, Faults] | None = None, **options: Any) -> Iterator[Any]:
    """Servers and the connected pool of them; the last server has the faults."""
    with ExitStack() as stack:
        made = [FakeOpenAIServer(weight_version=NEVER_PUSHED) for _ in range(count - 1)]
        made.append(FakeOpenAIServer(weight_version=NEVER_PUSHED, route_faults=route_faults))
        servers = [stack.enter_context(server) for server in made]
        pool = ServerPool([server.url for server in servers], timeout_s=options.pop("timeout_s", 30.0), **options)
        stack.callback(pool.stop)
        pool.connect(30.0)
        yield pool, servers
