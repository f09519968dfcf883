"""One server of a pool: where calls go, which weights it holds, and the requests by which it gets others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import WeightSyncError
from verifiers.inference.endpoint import Backend
from verifiers.inference.server_client import NoAnswerError, RefusedError, ServerClient

__all__ = ["PARTIALLY_LOADED", "Load", "Replica", "WeightUpdate", "time_left"]

logger = logging.getLogger("verifiers.train")

PARTIALLY_LOADED = "partially-loaded"
"""Name of weights whose load failed; the next push, of whatever process, must load twice."""

# a request that hangs leaves time for others
_TRIES_IN_TIME = 3


def time_left(deadline: float) -> float:
    """Return the seconds until a deadline of time.monotonic, at least 0.1."""
    return max(0.1, deadline - time.monotonic())


Load = Callable[[ServerClient, float], Awaitable[Any]]
"""Makes a paused server load weights, given the server and the seconds left; called again after an error that may
pass, and after a load that failed."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights that every server of a pool is to hold.

    Attributes:
        version: the optimizer step they come from.
        load: makes one server load them.
    """

    version: int
    load: Load


@dataclass(slots=True, eq=False)
class Replica:
    """One server of a pool; used on the pool's event loop alone.

    Attributes:
        url: its base URL.
        server: its control routes.
        backend: the path of calls; None for a server that gets weights but no calls.
        in_flight: the calls that wait for an answer, each by the timeout that can end it.
        down: the reason why it gets no calls; None while it is up.
        outages: number of times it went down; calls that fail together belong to one outage.
        versions: names that its weights may have now; none before the first push, and after a restart.
        verified_at: start of the newest version check that found pushed weights.
        is_paused: it was told to pause, and not yet to resume.
        is_partially_loaded: its last load failed, so that the next one may mix tensors of both.
        resets_cache: it has the route /reset_prefix_cache.
        restarts: number of times it held other weights than were pushed, and got them again.
        repeated_loads: number of times weights were loaded twice because the load before had failed.
        check: the running check of its health and version.
    """

    url: str
    server: ServerClient
    backend: Backend | None = None
    in_flight: set[asyncio.Timeout] = field(default_factory=set)
    down: str | None = None
    outages: int = 0
    versions: frozenset[str] = frozenset()
    verified_at: float = -float("inf")
    is_paused: bool = False
    is_partially_loaded: bool = False
    resets_cache: bool = True
    restarts: int = 0
    repeated_loads: int = 0
    check: asyncio.Task[None] | None = None

    def give_up_calls(self) -> None:
        """End the calls in flight, as the server may be gone or hold other weights: they are asked of others."""
        now = asyncio.get_running_loop().time()
        for call in self.in_flight:
            if not call.expired():
                call.reschedule(now)

    async def pause(self, deadline: float) -> None:
        """Stop sampling; requests are kept."""
        self.is_paused = True
        await self._post("/pause?mode=keep", deadline)

    async def load(self, deadline: float, update: WeightUpdate) -> None:
        """Load weights, drop keys and values of the old ones, and name the version; the server is paused."""
        name = str(update.version)
        found = await self.server.weight_version(time_left(deadline) / _TRIES_IN_TIME)
        if found == PARTIALLY_LOADED:
            self.is_partially_loaded = True
        elif self.versions and found not in self.versions:
            self.restarts += 1
            self.versions = frozenset()
        if self.versions:
            # the embedded server marks weights that were loaded and not yet named
            self.versions |= {name} | {f"{old}+reload" for old in self.versions}
        # vLLM keeps the tensors of a layer whose load failed, and completes the layer with them in the next load,
        # without an error; the load after that is whole
        loads = 2 if self.is_partially_loaded else 1
        self.is_partially_loaded = True
        for _ in range(loads):
            await update.load(self.server, time_left(deadline))
        self.is_partially_loaded = False
        if loads > 1:
            logger.warning("%s loaded the weights twice, because the load before failed", self.server.root)
            self.repeated_loads += 1
        if self.resets_cache:
            await self._reset_cache(deadline)
        await self._post("/update_weight_version", deadline, {"new_version": name})
        self.versions = frozenset({name})

    async def resume(self, deadline: float) -> None:
        """Resume requests."""
        await self._post("/resume", deadline)
        self.is_paused = False

    async def release(self, deadline: float) -> None:
        """Mark weights that are not whole, and resume requests after a push that failed."""
        try:
            if self.is_partially_loaded:
                await self._post("/update_weight_version", deadline, {"new_version": PARTIALLY_LOADED})
        finally:
            await self.resume(deadline)

    async def _reset_cache(self, deadline: float) -> None:
        try:
            # requests in flight compute their keys and values again, under the new weights
            answer = await self._post("/reset_prefix_cache?reset_running_requests=true", deadline)
        except RefusedError as error:
            if error.status != 404:
                raise
            # the embedded server does so by itself
            self.resets_cache = False
            return
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightSyncError(f"{self.server.root} did not drop keys and values of the old weights.")

    async def _post(self, path: str, deadline: float, body: object = None) -> Any:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise NoAnswerError(f"no time was left for POST {self.server.root}{path}", timed_out=True)
        return await self.server.request("POST", path, body or {}, timeout_s=left_s / _TRIES_IN_TIME)
