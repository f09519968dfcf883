"""One rollout server of a pool: its health, its load, the weights it holds, and the steps that give it new ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verifiers.concurrency import gather_owned
from verifiers.errors import WeightSyncError
from verifiers.inference.endpoint import Backend
from verifiers.inference.server_client import NoAnswerError, RefusedError, ServerClient, time_left

__all__ = [
    "HEALTH_S",
    "PARTIALLY_LOADED",
    "SHUTDOWN_S",
    "Replica",
    "WeightUpdate",
    "apply_update",
    "release_all",
]

logger = logging.getLogger("verifiers.train")

T = TypeVar("T")

HEALTH_S = 5.0
"""Seconds for a question that a healthy server answers at once."""

SHUTDOWN_S = 1.0
"""Seconds to wait for an unresponsive server at the end of a run."""

PARTIALLY_LOADED = "partially-loaded"
"""Name of weights whose load failed; the next push, of whatever process, must load twice."""

# statuses that a server, or a proxy before it, may not answer with a second time
_TRANSIENT = frozenset({500, 502, 503, 504})
_RETRY_WAITS_S = (0.25, 1.0, 4.0)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights that every server of a pool is to hold.

    Attributes:
        version: the optimizer step they come from.
        apply: makes a paused server load them; called with the server and the seconds left, once or several times.
            Raises WeightSyncError.
        is_repeatable: `apply` may be called again after the server answered with an error.
    """

    version: int
    apply: Callable[[ServerClient, float], Awaitable[None]]
    is_repeatable: bool = True


@dataclass(slots=True, eq=False)
class Replica:
    """One server of a pool; used on the pool's event loop alone.

    Attributes:
        url: its base URL.
        server: its control routes.
        backend: the path of rollouts' requests; None for a server that gets weights but no requests.
        in_flight: calls that wait for an answer.
        calls: the calls in flight of a managed pool, each by the timeout that can end it.
        down: the reason why it gets no requests until it is marked up; None while it is up.
        outages: number of times it went down or was ejected; calls that fail together belong to one outage.
        failure_count: number of ejections since it last answered.
        ejected_until: time at which an unmanaged pool may try it again.
        probed_until: end of the time in which the call that tries it is alone there.
        versions: names that its weights may have now; none before the first push.
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
    in_flight: int = 0
    calls: set[asyncio.Timeout] = field(default_factory=set)
    down: str | None = None
    outages: int = 0
    failure_count: int = 0
    ejected_until: float = -float("inf")
    probed_until: float = -float("inf")
    versions: frozenset[str] = frozenset()
    verified_at: float = -float("inf")
    is_paused: bool = False
    is_partially_loaded: bool = False
    resets_cache: bool = True
    restarts: int = 0
    repeated_loads: int = 0
    check: asyncio.Task[None] | None = None

    def is_ready(self, now: float) -> bool:
        """Return True if it is neither down, nor ejected, nor probed by another call."""
        return self.down is None and self.ejected_until <= now and self.probed_until <= now

    async def pause(self, deadline: float) -> None:
        """Stop sampling; requests are kept."""
        self.is_paused = True
        await self._post("/pause?mode=keep", deadline)

    async def resume(self, deadline: float) -> None:
        """Resume requests."""
        await self._post("/resume", deadline)
        self.is_paused = False

    async def load(self, update: WeightUpdate, deadline: float) -> None:
        """Load weights, drop keys and values of the old ones, and name the version; the server is paused."""
        name, server = str(update.version), self.server
        found = await self._retry(lambda: server.weight_version(time_left(deadline)), deadline)
        if found == PARTIALLY_LOADED:
            self.is_partially_loaded = True
        elif self.versions and found not in self.versions:
            self.restarts += 1
        if self.versions:
            # the embedded server marks weights that were loaded and not yet named
            self.versions |= {name} | {f"{old}+reload" for old in self.versions}

        async def apply() -> None:
            was_partially_loaded, self.is_partially_loaded = self.is_partially_loaded, True
            await update.apply(server, time_left(deadline))
            if was_partially_loaded:
                # vLLM keeps the tensors of a layer whose load failed, and completes the layer with them in the next
                # load, without an error; the load after that is whole
                logger.warning("%s loads the weights twice, because the load before failed", server.root)
                await update.apply(server, time_left(deadline))
                self.repeated_loads += 1
            self.is_partially_loaded = False

        await self._retry(apply, deadline, is_repeatable=update.is_repeatable)
        if self.resets_cache:
            await self._reset_cache(deadline)
        await self._post("/update_weight_version", deadline, {"new_version": name})
        self.versions = frozenset({name})

    async def release(self) -> None:
        """Resume requests after a push that failed, and mark weights that are not whole; bounded by SHUTDOWN_S."""
        deadline = time.monotonic() + SHUTDOWN_S
        try:
            if self.is_partially_loaded:
                body = {"new_version": PARTIALLY_LOADED}
                await self._post("/update_weight_version", deadline - SHUTDOWN_S / 2, body)
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
        async def post() -> Any:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NoAnswerError(f"no time was left for POST {self.server.root}{path}", timed_out=True)
            return await self.server.request("POST", path, {} if body is None else body, timeout_s=left)

        return await self._retry(post, deadline)

    async def _retry(self, work: Callable[[], Awaitable[T]], deadline: float, *, is_repeatable: bool = True) -> T:
        """Return what `work` gives, repeating it with growing waits after an error that may pass.

        Raises:
            NoAnswerError: the server answered with such an error, and its engine is gone.
            WeightSyncError: what `work` raised.
        """
        waits = iter(_RETRY_WAITS_S if is_repeatable else ())
        while True:
            try:
                return await work()
            except RefusedError as error:
                if error.status not in _TRANSIENT:
                    raise
                if not await self.server.is_healthy(min(HEALTH_S, time_left(deadline))):
                    text = f"{error}; and {self.server.root}/health does not answer 200"
                    raise NoAnswerError(text) from error
                wait_s = next(waits, None)
                if wait_s is None or time.monotonic() + wait_s >= deadline:
                    raise
                logger.warning("%s; asking again in %g s", error, wait_s)
                await asyncio.sleep(wait_s)


async def apply_update(
    replicas: Sequence[Replica],
    update: WeightUpdate,
    deadline: float,
    *,
    mark_down: Callable[[str, str], None],
    loaded: Callable[[int], None] | None = None,
) -> list[Replica]:
    """Give weights to servers, each stage ending on all of them first, and return those that hold the weights now.

    Args:
        replicas: the servers.
        update: the weights.
        deadline: of time.monotonic.
        mark_down: called with the URL of a silent server, and the reason; the others continue without it.
        loaded: called with the version when all hold the weights, before requests in flight continue.

    Raises:
        WeightSyncError: a server refused, or was too slow.
    """
    try:
        reached = await _for_each(replicas, lambda replica: replica.pause(deadline), mark_down)
        reached = await _for_each(reached, lambda replica: replica.load(update, deadline), mark_down)
        if reached and loaded is not None:
            loaded(update.version)
        return await _for_each(reached, lambda replica: replica.resume(deadline), mark_down)
    except BaseException:
        # also where the run is stopped: a server that stays paused answers nobody
        await release_all(replicas)
        raise


async def _for_each(
    replicas: Sequence[Replica],
    work: Callable[[Replica], Awaitable[None]],
    mark_down: Callable[[str, str], None],
) -> list[Replica]:
    """Do something on all servers at once, and return those that answered; a refusal is raised when all are done."""
    reached = []
    for replica, failure in zip(replicas, await _failures(replicas, work), strict=True):
        if failure is None:
            reached.append(replica)
        elif isinstance(failure, NoAnswerError) and not failure.timed_out:
            mark_down(replica.url, str(failure))
        else:
            raise failure
    return reached


async def release_all(replicas: Sequence[Replica]) -> None:
    """Release all servers that may be paused; one that does not answer is left."""
    await _failures([replica for replica in replicas if replica.is_paused], Replica.release)


async def _failures(
    replicas: Sequence[Replica], work: Callable[[Replica], Awaitable[None]]
) -> list[WeightSyncError | None]:
    """Do something on all servers at once, and return what each raised."""

    async def attempt(replica: Replica) -> WeightSyncError | None:
        try:
            await work(replica)
        except WeightSyncError as error:
            return error
        return None

    return await gather_owned(attempt(replica) for replica in replicas)
