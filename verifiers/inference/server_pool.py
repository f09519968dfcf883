"""Several servers of one model behind one backend: which are up, which weights they hold, and how they get new ones.

Where weights are pushed, everything happens on the event loop of the pool's own thread, where the generator's
rollouts run too; the trainer's thread asks for a push and waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import logging
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, ProviderError, WeightSyncError
from verifiers.inference.endpoint import CHAT, COMPLETIONS, GENERATE, Backend, HttpBackend, single_backend_for
from verifiers.inference.retry import RetryableError, retry
from verifiers.inference.server_client import (
    CONTROL_RETRIES,
    HEALTH_S,
    NoAnswerError,
    RefusedError,
    ServerClient,
    log_retry,
    passes_in_place,
)
from verifiers.inference.wire import plain_data, version_spans
from verifiers.loop_thread import LoopThread

logger = logging.getLogger("verifiers.rollouts")

T = TypeVar("T")

CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of a server."""

LOAD_INTERVAL_S = 5.0
"""Seconds between two readings of how full a server is."""

SHUTDOWN_S = 1.0
"""Seconds to wait for an unresponsive server at the end of a run."""

PARTIALLY_LOADED = "partially-loaded"
"""Name of weights whose load failed; the next push, of whatever process, must load twice."""

_RETRY_S = 0.25
# a request that hangs leaves time for others
_TRIES_IN_TIME = 3
_SAMPLING_ROUTES = frozenset({CHAT, COMPLETIONS, GENERATE})
# a prompt that ends the server which computes it must not be sent to every other
_MOST_LOST = 2
# a server that holds a prefix keeps its rollouts until it is this much busier than the idlest
_BUSIER_CALLS = 4
_BUSIER_RATIO = 1.5
_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "cache_use",
    "vf_sequences_running": "running",
    "vf_sequences_waiting": "waiting",
    "vf_slots_used": "cache_use",
}
_LINE = re.compile(rf"^({'|'.join(_GAUGES)})(?:{{.*}})? (\d+(?:\.\d+)?(?:e[+-]?\d\d?)?)(?!\S)", re.MULTILINE)


def time_left(deadline: float) -> float:
    """Return the seconds until a deadline of time.monotonic, at least 0.1."""
    return max(0.1, deadline - time.monotonic())


class Load(Protocol):
    """Makes a paused server load weights; called again after an error that may pass, and after a load that failed."""

    def __call__(self, server: ServerClient, /, *, timeout_s: float) -> Awaitable[Any]: ...


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """Weights that every server of a pool is to hold; `version` is the optimizer step they come from."""

    version: int
    load: Load


@dataclass(slots=True)
class ServerLoad:
    """Sums over readings of how full servers are, by their /metrics: vLLM's, and the embedded server's.

    Attributes:
        cache_use: share of its cache (vLLM) or its slots (embedded server) in use; the fullest engine's.
        busy: readings with any request.
        full: of these, readings with one that waited.
    """

    readings: int = 0
    running: float = 0.0
    waiting: float = 0.0
    cache_use: float = 0.0
    busy: int = 0
    full: int = 0

    def take(self, text: str) -> bool:
        """Add a reading in the text form of Prometheus; False where it has no such counts."""
        found: dict[str, list[float]] = {}
        for name, value in _LINE.findall(text):
            found.setdefault(_GAUGES[name], []).append(float(value))
        if not {"running", "waiting"} <= found.keys():
            return False
        running, waiting = sum(found["running"]), sum(found["waiting"])
        self.readings += 1
        self.running += running
        self.waiting += waiting
        self.cache_use += max(found.get("cache_use", [0.0]))
        self.busy += running + waiting > 0
        self.full += waiting > 0
        return True

    def metrics(self) -> dict[str, float]:
        """Return means over the readings, and the share of the busy ones in which requests waited; {} without any."""
        if not self.readings:
            return {}
        means = {name: getattr(self, name) / self.readings for name in ("running", "waiting", "cache_use")}
        full = {"full": self.full / self.busy} if self.busy else {}
        return {f"server/{name}": value for name, value in {**means, **full}.items()}


@dataclass(slots=True, eq=False)
class Replica:
    """One server of a pool; used on the pool's event loop alone.

    Attributes:
        in_flight: the calls that wait for an answer, each by the timeout that can end it.
        down: the reason why it gets no calls; None while it is up.
        versions: names that its weights may have now; none before the first push, and after a restart.
        verified_at: start of the newest version check that found pushed weights.
        is_partially_loaded: its last load failed, so that the next one may mix tensors of both.
        resets_cache: it has the route /reset_prefix_cache.
        tells_load: its /metrics has counts of requests, as far as is known.
        repeated_loads: number of times it got weights again: it was restarted, or a load before had failed.
        check: the running check of its health and version.
    """

    url: str
    server: ServerClient
    backend: Backend
    in_flight: set[asyncio.Timeout] = field(default_factory=set)
    down: str | None = None
    versions: frozenset[str] = frozenset()
    verified_at: float = -float("inf")
    is_paused: bool = False
    is_partially_loaded: bool = False
    resets_cache: bool = True
    tells_load: bool = True
    repeated_loads: int = 0
    check: asyncio.Task[None] | None = None

    def give_up_calls(self) -> None:
        """End the calls in flight, as the server may be gone or hold other weights: they are asked of others."""
        now = asyncio.get_running_loop().time()
        for call in self.in_flight:
            if not call.expired():
                call.reschedule(now)

    async def pause(self, deadline: float) -> None:
        self.is_paused = True
        await self._post("/pause?mode=keep", deadline)

    async def load(self, deadline: float, update: WeightUpdate) -> None:
        """Load weights, drop keys and values of the old ones, and name the version; the server is paused."""
        name = str(update.version)
        found = await self.server.weight_version(time_left(deadline) / _TRIES_IN_TIME)
        if found == PARTIALLY_LOADED:
            self.is_partially_loaded = True
        elif self.versions and found not in self.versions:
            # a new process, which holds nothing of a load that the old one did not end
            self.repeated_loads += 1
            self.versions, self.is_partially_loaded = frozenset(), False
        if self.versions:
            # the embedded server marks weights that were loaded and not yet named
            self.versions |= {name} | {f"{old}+reload" for old in self.versions}
        # vLLM keeps the tensors of a layer whose load failed, and completes the layer with them in the next load,
        # without an error; the load after that is whole
        loads = 2 if self.is_partially_loaded else 1
        self.is_partially_loaded = True
        for _ in range(loads):
            await update.load(self.server, timeout_s=time_left(deadline))
        self.is_partially_loaded = False
        if loads > 1:
            logger.warning("%s loaded the weights twice, because the load before failed", self.server.root)
            self.repeated_loads += 1
        if self.resets_cache:
            await self._reset_cache(deadline)
        await self._post("/update_weight_version", deadline, {"new_version": name})
        self.versions = frozenset({name})

    async def resume(self, deadline: float) -> None:
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


class ServerPool:
    """Servers of one model that share its calls, and that get the trained weights where they are pushed.

    A rollout begins on the least loaded server. Those of one group begin on the same one, which has their prompt in
    its cache: of those that are up the first by rendezvous hashing (Thaler and Ravishankar, 1998). A rollout stays
    where it began, unless that server fails, or has more than 4 + 1.5 x as many calls in flight as the least loaded.

    A server that cannot be reached, or breaks off an answer, is down, and its calls go to the others at once. It is
    asked every second whether it is up again. A call under which two servers broke off fails, as it may crash the
    others too.

    Once weights are pushed, a server that is down may come back with old ones, so it gets calls again when it holds
    the pushed ones; until one does, calls wait. No answer from weights that were never pushed is used: one that names
    such weights is refused; one that names none counts once its server was asked for its version after the call
    began, and every server is asked for it each second.

    Args:
        servers: one for each base URL; anything that `single_backend_for` takes.
        api_key: bearer token of the servers' control routes; that of their backends when left out.
        timeout_s: deadline of one push to servers that answer, in seconds.

    Raises:
        ConfigError: no servers, or two for one base URL.
    """

    def __init__(self, servers: Sequence[Any], *, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        if not servers:
            raise ConfigError("there is no server to send calls to; give at least one base URL.")
        backends = [single_backend_for(server) for server in servers]
        self.replicas = [
            Replica(one.base_url, ServerClient(one.base_url, api_key or one.api_key, timeout_s), one)
            for one in backends
        ]
        if len(set(self.urls)) < len(self.replicas):
            raise ConfigError(f"the base URLs {self.urls} name a server twice; name each once.")
        self.base_url, self.api_key = backends[0].base_url, backends[0].api_key
        self.timeout_s = self.restart_timeout_s = self.stall_timeout_s = timeout_s
        self._on_version: Callable[[int], None] | None = None
        # what all servers are to hold, and the versions of all weights that they were told to load
        self._current: WeightUpdate | None = None
        self._pushed: set[str] = set()
        self._is_connected = False
        self._load, self._load_read_at = ServerLoad(), -float("inf")
        self._went_down_at = time.monotonic()
        self._thread: LoopThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin_on_loop()

    def configure(
        self,
        *,
        restart_timeout_s: float,
        stall_timeout_s: float,
        on_version: Callable[[int], None] | None = None,
    ) -> None:
        """Set the deadlines of a run.

        Args:
            restart_timeout_s: seconds that a push, or a call, waits where no server can be reached.
            stall_timeout_s: seconds for which code may block the event loop during a push.
            on_version: called with the version of a push that all servers hold, before requests in flight continue.
        """
        self.restart_timeout_s, self.stall_timeout_s = restart_timeout_s, stall_timeout_s
        self._on_version = on_version

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self.replicas]

    @property
    def backends(self) -> list[Backend]:
        return [replica.backend for replica in self.replicas]

    @property
    def servers(self) -> list[ServerClient]:
        """Control clients of the servers that are up; of the first one where none is."""
        up = [replica.server for replica in self.replicas if replica.down is None]
        return up or [self.replicas[0].server]

    @property
    def down(self) -> dict[str, str]:
        return {replica.url: replica.down for replica in self.replicas if replica.down is not None}

    @property
    def repeated_loads(self) -> int:
        """Number of times a server got weights again: it was restarted, or a load before had failed.

        Log-probs of such a server are to be verified.
        """
        return sum(replica.repeated_loads for replica in self.replicas)

    # -- calls --------------------------------------------------------------------------------------------------

    def route(self, backend: Backend) -> Backend:
        """Send the calls of `backend` through the pool, so that none is answered from weights not pushed.

        A client object that has to be called as it is (a subclass, a wrapper, one with an HTTP client of its own), or
        one of servers that get no weights, is returned as it is, with a warning.
        """
        if backend is self:
            return self
        by_url = {one.base_url: one for one in each_server(backend)}
        missed = [
            url or type(one).__name__
            for url, one in by_url.items()
            if not isinstance(one, HttpBackend) or url not in self.urls
        ]
        if missed:
            logger.warning(
                "rollouts use a client that bypasses the weight checks (%s; the servers that get the weights: %s): "
                "after a restart, a server may answer from old weights.",
                ", ".join(missed),
                ", ".join(sorted(self.urls)),
            )
            return backend
        for replica in self.replicas:
            replica.backend = by_url.get(replica.url, replica.backend)
        self.base_url, self.api_key = self.backends[0].base_url, self.backends[0].api_key
        return self

    def for_rollout(self, group: Hashable = None) -> SessionAffinity:
        """Return a handle whose calls keep to one server, whose cache holds the turns so far, unless it fails.

        Those of a `group`, whose prompts begin alike, begin on the same server.
        """
        return SessionAffinity(self, group)

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        return await self.for_rollout().call(path, arguments)

    async def close(self) -> None:
        if self._loop is asyncio.get_running_loop():
            for task in (self._watching, self._reading_load, *(replica.check for replica in self.replicas)):
                if task is not None:
                    task.cancel()
        for backend in self.backends:
            await backend.close()

    def usable(self) -> list[Replica]:
        """Return the servers that calls may be sent to now.

        Where no weights are pushed and none is up, these are all: an answer shows that a server is up, too.
        """
        return [one for one in self.replicas if one.down is None] or ([] if self._pushed else self.replicas)

    async def choose(
        self, group: Hashable = None, home: Replica | None = None, but: Sequence[Replica] = ()
    ) -> Replica:
        """Return the server for a call.

        Args:
            group: of the rollout; None for the least loaded server.
            home: the one that holds the turns so far.
            but: those that failed; where all did, the last of them is left out.

        Raises:
            ProviderError: no server was up for `restart_timeout_s` seconds.
        """
        self._enter_loop()
        while not (usable := self.usable()):
            await self._until_one_is_up()
        others = [one for one in usable if one not in but] or [one for one in usable if one is not but[-1]] or usable
        most = _BUSIER_CALLS + _BUSIER_RATIO * min(len(one.in_flight) for one in others)
        fit = [one for one in others if len(one.in_flight) <= most]
        if home in fit:
            return home
        if group is not None:
            return max(fit, key=lambda one: _weight(group, one.url))
        return min(fit, key=lambda one: (len(one.in_flight), random.random()))

    async def _until_one_is_up(self) -> None:
        # counted from when the last server went down: retries must not begin the wait again
        left_s = self._went_down_at + self.restart_timeout_s - time.monotonic()
        self._came_up.clear()
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                await self._came_up.wait()
        except TimeoutError as error:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in self.down.items())
            # not worth a retry: this was the wait
            raise ProviderError(f"no rollout server was up for {self.restart_timeout_s:g} s ({reasons})") from error

    async def call_on(self, replica: Replica, path: str, arguments: Mapping[str, Any]) -> Any:
        """Make one try on one server, and note whether it could be reached."""
        given_up, sent_at = asyncio.timeout(None), time.monotonic()
        replica.in_flight.add(given_up)
        try:
            async with given_up:
                answer = await replica.backend.call(path, arguments)
                if self._pushed and path in _SAMPLING_ROUTES:
                    await self._refuse_unpushed(replica, answer, sent_at)
        except TimeoutError as error:
            if not given_up.expired():
                raise
            text = f"{replica.url} was given up: {replica.down or 'it was down'}"
            raise RetryableError(text, unreachable=True, broke=True) from error
        except RetryableError as error:
            if error.unreachable:
                self._mark_down(replica, str(error), gives_up_calls=False)
            raise
        finally:
            replica.in_flight.discard(given_up)
        if not self._pushed:
            self._mark_up(replica)
        return answer

    async def _refuse_unpushed(self, replica: Replica, answer: Any, sent_at: float) -> None:
        spans = version_spans(plain_data(answer))
        names = [span.get("version") for span in spans if isinstance(span, Mapping)]
        foreign = {str(name).removesuffix("+reload") for name in names if isinstance(name, (str, int))} - self._pushed
        if foreign:
            reason = f"it answered from weights {', '.join(map(repr, foreign))}, which were never pushed"
            self._mark_down(replica, reason)
            raise RetryableError(f"{replica.url} was given up: {reason}", unreachable=True)
        # had the answer come from a process that was restarted, a version check after the call began would show it
        if not spans and replica.verified_at < sent_at:
            await self._until_verified(replica, float("inf"))

    # -- which servers are up -----------------------------------------------------------------------------------

    def _begin_on_loop(self) -> None:
        self._updating = asyncio.Lock()
        self._went_down, self._came_up = asyncio.Event(), asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._reading_load: asyncio.Task[None] | None = None
        for replica in self.replicas:
            replica.check = None

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._begin_on_loop()

    def _mark_down(self, replica: Replica, reason: str, *, gives_up_calls: bool = True) -> None:
        """Send nothing more to a server until a check finds it up, and ask others for what it is answering."""
        if gives_up_calls:
            replica.give_up_calls()
        if replica.down is not None:
            return
        replica.down = reason
        self._went_down_at = time.monotonic()
        logger.warning("%s is down: %s", replica.url, reason)
        if self._pushed:
            # it may be there, and only need the weights
            self._went_down.set()
        self._watch()

    def _mark_up(self, replica: Replica) -> None:
        if replica.down is not None:
            replica.down = None
            logger.warning("%s is up", replica.url)
            self._came_up.set()

    def _watch(self) -> None:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._check_all())

    async def _check_all(self) -> None:
        # a server that is up, and is not trained against, need not be asked
        while self._is_connected or self.down:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._went_down.wait()
            self._went_down.clear()
            for replica in self.replicas:
                self._check(replica)
            is_read = self._reading_load is None or self._reading_load.done()
            if is_read and time.monotonic() >= self._load_read_at + LOAD_INTERVAL_S:
                self._load_read_at = time.monotonic()
                self._reading_load = asyncio.create_task(self._read_load())

    async def _read_load(self) -> None:
        for replica in self.replicas:
            if replica.down is None and replica.tells_load:
                with contextlib.suppress(NoAnswerError):
                    try:
                        text = await replica.server.request("GET", "/metrics", timeout_s=HEALTH_S)
                        replica.tells_load = isinstance(text, str) and self._load.take(text)
                    except RefusedError:
                        replica.tells_load = False

    def take_load(self) -> ServerLoad:
        """Return how full the servers were since the last call."""
        load, self._load = self._load, ServerLoad()
        return load

    def _check(self, replica: Replica) -> asyncio.Task[None]:
        if replica.check is None or replica.check.done():
            replica.check = asyncio.create_task(self._checked(replica))
        return replica.check

    async def _checked(self, replica: Replica) -> None:
        try:
            if self._pushed:
                await self._check_weights(replica)
            elif replica.down is not None and await self._answers(replica):
                self._mark_up(replica)
        except Exception as error:
            # whatever a server answers: without these checks none would come back
            logger.warning("%s could not be brought back yet: %s", replica.server.root, error)

    async def _answers(self, replica: Replica) -> bool:
        """Return whether a server can be reached; a client object takes no such question, only calls."""
        can_be_asked = isinstance(replica.backend, HttpBackend)
        return not can_be_asked or await replica.server.is_up(min(HEALTH_S, self.timeout_s))

    async def _check_weights(self, replica: Replica) -> None:
        """Ask a server for its version, give it the newest weights where it holds others, and use it.

        A restart shows in the version: pushed versions are numbers, and a server that was just started calls its
        weights something else.
        """
        update, began = self._current, time.monotonic()
        if update is None or (replica.down is not None and not await self._answers(replica)):
            return
        try:
            name = await replica.server.weight_version(min(HEALTH_S, self.timeout_s))
        except NoAnswerError as error:
            if not error.timed_out:
                self._mark_down(replica, str(error))
            return
        if name in replica.versions:
            replica.verified_at = began
        # a push that is under way, or came meanwhile, finds out by itself
        if self._updating.locked() or self._current is not update:
            return
        async with self._updating:
            if name != str(update.version):
                self._mark_down(replica, f"it holds weights {name!r} where {update.version} was pushed")
                await self._bring_up(replica, _stages(update))
                logger.warning("%s was given the weights of step %d again", replica.server.root, update.version)
            else:
                # one that is paused did not answer at the end of a push
                await self._bring_up(replica, [Replica.resume] if replica.is_paused else [])

    async def _bring_up(self, replica: Replica, stages: Sequence[Stage]) -> None:
        deadline = time.monotonic() + self.timeout_s
        try:
            for stage in stages:
                await _tried(stage, replica, deadline)
        except BaseException:
            await self._release()
            raise
        self._mark_up(replica)

    # -- pushes -------------------------------------------------------------------------------------------------

    async def connect(self, deadline_s: float) -> None:
        """Wait for all servers and verify that they can take weights; from then on they are checked every second.

        Raises:
            WeightSyncError: one did not answer in time, or lacks the routes.
        """
        self._enter_loop()
        deadline = time.monotonic() + deadline_s
        for server in (replica.server for replica in self.replicas):
            await server.wait_until_up(max(0.0, deadline - time.monotonic()))
            try:
                await retry(server.weight_version, CONTROL_RETRIES, log_retry)
            except WeightSyncError as error:
                if isinstance(error, RefusedError) and error.status in (401, 403):
                    raise WeightSyncError(
                        f"the server at {server.root} wants a key ({error}); start it without one, or give it in "
                        "Python, to GRPOTrainer as client=openai.AsyncOpenAI(base_url=..., api_key=...)."
                    ) from error
                raise WeightSyncError(
                    f"the server at {server.root} has no weight routes, so it cannot be trained against "
                    f"({error}); use vf-serve, vf-vllm, or vLLM with VLLM_SERVER_DEV_MODE=1."
                ) from error
        self._is_connected = True
        self._watch()

    async def push(self, update: WeightUpdate) -> None:
        """Bring every server that is up to these weights, each stage ending on all of them first.

        A server that is down gets them when it is back. Where all are, the push waits for one.

        Raises:
            WeightSyncError: a server refused, or none could be reached in time.
        """
        async with self._turn(update):
            give_up_at = time.monotonic() + self.restart_timeout_s
            reached: list[Replica] = []
            while not reached:
                deadline, reached = time.monotonic() + self.timeout_s, await self._reachable()
                for stage in _stages(update):
                    if stage is Replica.resume and reached and self._on_version is not None:
                        self._on_version(update.version)
                    tries = [_tried(stage, replica, deadline) for replica in reached]
                    outcomes = await asyncio.gather(*tries, return_exceptions=True)
                    reached = self._still_there(reached, outcomes)
                if not reached:
                    if time.monotonic() + _RETRY_S >= give_up_at:
                        raise NoAnswerError(self.replicas[0].down or "it does not answer")
                    await asyncio.sleep(_RETRY_S)
            for replica in reached:
                self._mark_up(replica)

    @contextlib.asynccontextmanager
    async def _turn(self, update: WeightUpdate) -> AsyncIterator[None]:
        """Let nothing else load meanwhile, and make this what all servers are to hold, where it succeeds."""
        self._enter_loop()
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._updating.acquire()
        except TimeoutError:
            raise WeightSyncError(
                f"the weights of step {update.version} did not reach the rollout server: another server is still "
                "being given earlier weights at the deadline (weight_sync_timeout)."
            ) from None
        before, self._current = self._current, update
        self._pushed.add(str(update.version))
        try:
            yield
        except BaseException as error:
            # a server that comes back must not get what was refused, or what a run that is stopped removes
            self._current = before
            # nor may one stay paused, where the run is stopped: it would answer nobody
            await self._release()
            if not isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(
                f"the weights of step {update.version} did not reach the rollout server: {error}"
            ) from error
        finally:
            self._updating.release()

    async def _reachable(self) -> list[Replica]:
        """Return the servers that are up; where none is, those that answer."""
        up = [replica for replica in self.replicas if replica.down is None]
        # the checks bring the others back and give them these weights: a host that is gone delays no push
        if up:
            return up
        answers = await gather_owned(self._answers(replica) for replica in self.replicas)
        return [replica for replica, answered in zip(self.replicas, answers, strict=True) if answered]

    def _still_there(self, replicas: Sequence[Replica], outcomes: Sequence[BaseException | None]) -> list[Replica]:
        """Return the servers that answered; the others are down, or the push ends with their refusal."""
        for replica, failure in zip(replicas, outcomes, strict=True):
            if isinstance(failure, NoAnswerError) and not failure.timed_out:
                self._mark_down(replica, str(failure))
            elif failure is not None:
                raise failure
        return [replica for replica, failure in zip(replicas, outcomes, strict=True) if failure is None]

    async def holds_pushed_weights(self, url: str) -> bool:
        """Return whether the server at `url` says that it holds pushed weights, or none were pushed."""
        return not self._pushed or await self._is_verified(self._replica(url))

    async def wait_until_restored(self, url: str, timeout_s: float) -> bool:
        """Wait until a server that was restarted holds pushed weights; False where it does not in time."""
        deadline = time.monotonic() + timeout_s
        return bool(self._pushed) and await self._until_verified(self._replica(url), deadline)

    def _replica(self, url: str) -> Replica:
        return next(replica for replica in self.replicas if replica.url == url)

    async def _until_verified(self, replica: Replica, deadline: float) -> bool:
        while not await self._is_verified(replica):
            await asyncio.sleep(_RETRY_S)
            if time.monotonic() >= deadline:
                return False
        return True

    async def _is_verified(self, replica: Replica) -> bool:
        loads, began = replica.repeated_loads, time.monotonic()
        # a check that runs may have begun before, and one may fail
        for _ in range(4):
            await asyncio.shield(self._check(replica))
            if replica.repeated_loads > loads or replica.verified_at >= began:
                break
        return replica.repeated_loads == loads and replica.verified_at >= began

    # -- the pool's thread --------------------------------------------------------------------------------------

    def thread(self) -> LoopThread:
        """Return the pool's event loop in its thread, started where it does not run."""
        if self._thread is None or not self._thread.is_alive:
            self._thread = LoopThread(close_last=self._end, failed=_log_failure, name="verifiers-servers")
            self._thread.start()
            self._thread.loop.call_soon_threadsafe(self._enter_loop)
        return self._thread

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.thread().loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the pool's loop and wait for its result; not to be called on that loop.

        Without `timeout_s` it may take longer than any push.

        Raises:
            DeadlineError: the coroutine did not end in time, or code blocks the loop for `stall_timeout_s`.
            GenerationError: code of the environment ended the loop.
            WeightSyncError: what the coroutine raised, or the pool was stopped.
        """
        ending_s = SHUTDOWN_S + _RETRY_S
        if timeout_s is None:
            timeout_s = 2 * self.timeout_s + self.restart_timeout_s + 2 * HEALTH_S
        try:
            return self.thread().run(work, timeout_s, stall_s=self.stall_timeout_s, ending_s=ending_s)
        except concurrent.futures.CancelledError:
            raise WeightSyncError("the rollout servers were released while they were asked for something.") from None

    def stop(self) -> None:
        """End the pool's thread, and leave no server paused. May be called twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.close()
        if thread.is_alive:
            # code of the environment blocks the loop, and no server may stay paused for it
            releasing = threading.Thread(target=lambda: asyncio.run(self._release()), daemon=True)
            releasing.start()
            releasing.join(2 * SHUTDOWN_S)

    async def _end(self) -> None:
        # the files that a restarted server would load from are about to be removed
        self._current = None
        await self._release()
        await self.close()

    async def _release(self) -> None:
        """Let no server stay paused; one that does not answer is left."""
        deadline = time.monotonic() + SHUTDOWN_S
        tries = [_tried(Replica.release, replica, deadline) for replica in self.replicas if replica.is_paused]
        await asyncio.gather(*tries, return_exceptions=True)


Stage = Callable[[Replica, float], Awaitable[None]]


def _stages(update: WeightUpdate) -> tuple[Stage, Stage, Stage]:
    return Replica.pause, functools.partial(Replica.load, update=update), Replica.resume


def _tried(stage: Stage, replica: Replica, deadline: float) -> Coroutine[Any, Any, None]:
    attempt = functools.partial(stage, replica, deadline)
    return retry(attempt, CONTROL_RETRIES, log_retry, deadline=deadline, passing=passes_in_place)


def _weight(group: Hashable, url: str) -> bytes:
    """Return what a group prefers a server by: the highest wins."""
    return hashlib.blake2b(f"{group!r} {url}".encode(), digest_size=8).digest()


def _log_failure(error: BaseException) -> None:
    logger.warning("the thread of the rollout servers failed: %r", error)


class SessionAffinity:
    """One rollout's handle on several servers: its calls go to one of them until that one fails."""

    def __init__(self, pool: ServerPool, group: Hashable) -> None:
        self._pool, self._group = pool, group
        self._home: Replica | None = None
        self._failed: list[Replica] = []
        # servers that broke off the present call or erred under it: vLLM answers with an error, and then ends
        self._suspects: set[Replica] = set()
        self.base_url, self.api_key = pool.base_url, pool.api_key

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Make one call as `Backend.call` does; a server that cannot be reached is replaced by each of the others.

        Raises:
            ProviderError: also where servers were lost twice under the call, with no answer in between.
        """
        tried: list[Replica] = []
        while True:
            lost = [one.url for one in self._suspects if one.down is not None]
            if len(lost) >= _MOST_LOST:
                self._suspects.clear()
                raise ProviderError(
                    f"{' and then '.join(lost)} broke off while answering the same request; it is not sent to "
                    "another server, because it may crash them"
                )
            replica = self._home = await self._pool.choose(self._group, self._home, self._failed)
            self.base_url = replica.url
            tried.append(replica)
            try:
                answer = await self._pool.call_on(replica, path, arguments)
            except RetryableError as error:
                if error.status != 429:
                    # a limit is best waited for where the prefix is; after anything else, the next try goes elsewhere
                    self._failed.append(replica)
                if error.broke or (error.status or 0) >= 500:
                    self._suspects.add(replica)
                if not error.unreachable or all(one in tried for one in self._pool.usable()):
                    raise
            else:
                self._suspects.clear()
                return answer

    async def close(self) -> None:
        """Do nothing: connections belong to the pool."""


def credentials(backend: Backend) -> tuple[str, dict[str, str]]:
    """Return the API key and the headers that a backend's servers are sent; records of a run must not hold them."""
    headers: dict[str, str] = {}
    for index, one in enumerate(each_server(backend)):
        given = one.endpoint.headers if isinstance(one, HttpBackend) else {}
        headers |= {f"{index}:{name}": value for name, value in given.items()}
    return backend.api_key, headers


def each_server(backend: Backend) -> list[Backend]:
    """Return the backend of each server, where there are several behind one."""
    return backend.backends if isinstance(backend, ServerPool) else [backend]


def backend_for(client: Any) -> Backend:
    """Return the backend for one server, as `single_backend_for`, or for a list of several of the same model."""
    if not isinstance(client, (list, tuple)):
        return single_backend_for(client)
    return single_backend_for(client[0]) if len(client) == 1 else ServerPool(client)
