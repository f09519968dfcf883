"""One rollout server: the client of its control routes, under vLLM's names, and the pool's record of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from verifiers.concurrency import gather_owned
from verifiers.errors import ProviderError, WeightSyncError
from verifiers.inference.endpoint import MAX_ANSWER_MB, Backend, read_body
from verifiers.inference.limits import call_with_retries
from verifiers.inference.retries import RetryableError, RetryPolicy, is_retryable_status

if TYPE_CHECKING:
    import aiohttp

__all__ = [
    "HEALTH_S",
    "PARTIALLY_LOADED",
    "SHUTDOWN_S",
    "NoAnswerError",
    "RefusedError",
    "Replica",
    "ServerClient",
    "WeightUpdate",
    "apply_update",
    "release_all",
    "time_left",
]

logger = logging.getLogger("verifiers.train")

_POLL_S = 0.25
# without a limit of its own, connecting to a host that is down takes minutes
_CONNECT_S = 5.0

# more tries than a rollout has: what fails here for good ends the run
_RETRIES = RetryPolicy(max_attempts=9, cap_s=4.0)
# one that hangs leaves time for the others
_TRIES_IN_TIME = 3

T = TypeVar("T")


class NoAnswerError(WeightSyncError):
    """The server could not be reached, or did not answer in time; it may be restarting.

    Attributes:
        timed_out: the server was reached, but was too slow.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class RefusedError(WeightSyncError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def time_left(deadline: float) -> float:
    """Return the seconds until a deadline of time.monotonic, at least 0.1."""
    return max(0.1, deadline - time.monotonic())


class ServerClient:
    """Asynchronous client of the routes that pause, load, version and describe one rollout server.

    Each request has a connection of its own, so it reaches the process that listens at that moment, and no proxy of
    the environment stands in between.

    Args:
        base_url: of the OpenAI surface, with or without "/v1".
        api_key: bearer token of that surface.
        timeout_s: deadline of one request, in seconds.
    """

    def __init__(self, base_url: str, api_key: str = "EMPTY", timeout_s: float = 60.0) -> None:
        self.root = base_url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    @property
    def url(self) -> str:
        """Base URL of the OpenAI surface, with /v1."""
        return self.root + "/v1"

    async def request(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Return the parsed JSON of a 2xx answer (None for an empty one).

        Raises:
            NoAnswerError: unreachable or too late.
            RefusedError: answered with an error; the message quotes the beginning of its text.
        """
        import aiohttp

        limit_s = timeout_s or self.timeout_s
        connect_s = min(_CONNECT_S, 0.9 * limit_s)
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=connect_s)
        data = None if body is None else json.dumps(body).encode()
        asked = f"{method} {self.root}{path}"
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session,
                session.request(method, self.root + path, data=data) as response,
            ):
                if response.status >= 300:
                    text = await _error_text(response)
                    raise RefusedError(f"{asked} was answered {response.status}: {text}", response.status)
                content = await read_body(response, MAX_ANSWER_MB)
        except aiohttp.ConnectionTimeoutError as error:
            raise NoAnswerError(f"{asked} got no answer: no connection within {connect_s:.3g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            late = isinstance(error, TimeoutError)
            reason = "timed out" if late else str(error) or type(error).__name__
            raise NoAnswerError(f"{asked} got no answer: {reason}", timed_out=late) from error
        try:
            return json.loads(content) if content else None
        except ValueError:
            return content.decode(errors="replace")

    async def ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Return what `request` gives, tried again where that failed and may pass; for what may be asked twice."""
        return await self.retried(lambda: self.request(method, path, body, timeout_s))

    async def retried(
        self, work: Callable[[], Awaitable[T]], deadline: float = math.inf, *, is_repeatable: bool = True
    ) -> T:
        """Return what `work` gives, tried again after an error that may pass, no answer in time, or RetryableError.

        With a deadline (of time.monotonic), a server that cannot be reached is the caller's matter.

        Raises:
            WeightSyncError: the last failure; NoAnswerError too where the engine behind an error is gone.
        """
        tries = itertools.count(1)
        failure: WeightSyncError | None = None

        async def attempt() -> T:
            nonlocal failure
            wait_s = _RETRIES.wait_s(next(tries), None, 1.0)
            try:
                return await work()
            except (RefusedError, NoAnswerError) as error:
                failure = error
                if isinstance(error, RefusedError):
                    if not is_retryable_status(error.status):
                        raise
                    if not await self.is_healthy(min(HEALTH_S, time_left(deadline))):
                        raise NoAnswerError(f"{error}; and {self.root}/health does not answer 200") from error
                elif not error.timed_out and deadline < math.inf:
                    raise
                if not is_repeatable or time.monotonic() + wait_s >= deadline:
                    raise
                raise RetryableError(str(error)) from error

        try:
            return await call_with_retries(attempt, _RETRIES, lambda error: logger.warning("%s; asking again", error))
        except ProviderError as error:
            raise failure or NoAnswerError(str(error), timed_out=True) from error

    async def wait_until_healthy(self, deadline_s: float) -> None:
        """Poll /health until it is answered 200.

        Raises:
            WeightSyncError: it was not within `deadline_s` seconds.
        """
        deadline = time.monotonic() + deadline_s
        warned = False
        while True:
            try:
                await self.request("GET", "/health", timeout_s=_CONNECT_S)
                return
            except WeightSyncError as error:
                problem = error
                if time.monotonic() >= deadline:
                    raise WeightSyncError(
                        f"the rollout server at {self.root} did not answer within {deadline_s:.3g} s (server_wait): "
                        f"{error}; start it first, for example with: vf-serve --model DIR, or vf-vllm --model NAME"
                    ) from error
            if not warned:
                logger.warning("waiting up to %g s for the rollout server: %s", deadline_s, problem)
                warned = True
            await asyncio.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    async def is_healthy(self, timeout_s: float) -> bool:
        """Return whether /health is answered 200 within `timeout_s` seconds."""
        try:
            await self.request("GET", "/health", timeout_s=timeout_s)
        except WeightSyncError:
            return False
        return True

    async def weight_version(self, timeout_s: float | None = None) -> str:
        """Return the name of the weights that the server holds; "default" before the first push."""
        answer = await self.request("GET", "/weight_info", timeout_s=timeout_s)
        if not isinstance(answer, dict):
            raise WeightSyncError(f"{self.root}/weight_info answers {answer!r:.100}, which names no version.")
        return str(answer.get("weight_version"))

    async def model_name(self) -> str:
        """Return the first model that the server lists."""
        answer = await self.ask("GET", "/v1/models")
        models = (answer.get("data") if isinstance(answer, dict) else None) or []
        if not models:
            raise WeightSyncError(f"{self.root}/v1/models lists no model.")
        return str(models[0]["id"])


async def _error_text(response: aiohttp.ClientResponse) -> str:
    """Return the beginning of an error's text, as far as it was received."""
    import aiohttp

    try:
        return (await response.read()).decode(errors="replace")[:1000]
    except (aiohttp.ClientError, OSError) as broken:
        return f"(its text broke off: {broken!r:.100})"


# -- a server of a pool ------------------------------------------------------------------------------------------

HEALTH_S = 5.0
"""Seconds for a question that a healthy server answers at once."""

SHUTDOWN_S = 1.0
"""Seconds to wait for an unresponsive server at the end of a run."""

PARTIALLY_LOADED = "partially-loaded"
"""Name of weights whose load failed; the next push, of whatever process, must load twice."""


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
        """Return whether it is neither down, nor ejected, nor probed by another call."""
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
        found = await server.retried(lambda: server.weight_version(time_left(deadline) / _TRIES_IN_TIME), deadline)
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

        await server.retried(apply, deadline, is_repeatable=update.is_repeatable)
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
            return await self.server.request("POST", path, body or {}, timeout_s=left / _TRIES_IN_TIME)

        return await self.server.retried(post, deadline)


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
    """Run `work` on all servers at once, and return those that answered; a refusal is raised when all are done."""
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
    """Run `work` on all servers at once, and return what each raised."""

    async def attempt(replica: Replica) -> WeightSyncError | None:
        try:
            await work(replica)
        except WeightSyncError as error:
            return error
        return None

    return await gather_owned(attempt(replica) for replica in replicas)
