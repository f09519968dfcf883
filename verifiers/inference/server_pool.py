"""The rollout servers of a run: which are up, which weights they hold, and how they get new ones.

Everything happens on one event loop: the loop of the pool's own thread, where the generator's rollouts run too. The
trainer's thread asks for a push and waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, WeightSyncError
from verifiers.inference.endpoint import CHAT, COMPLETIONS, GENERATE, Backend, HttpBackend
from verifiers.inference.load_balancer import LoadBalancer, each_server
from verifiers.inference.retries import RetryableError
from verifiers.inference.rollout_server import (
    HEALTH_S,
    SHUTDOWN_S,
    NoAnswerError,
    Replica,
    ServerClient,
    WeightUpdate,
    apply_update,
    release_all,
)
from verifiers.inference.wire import plain_data, sampled_tokens
from verifiers.loop_thread import LoopThread

__all__ = ["CHECK_INTERVAL_S", "ServerPool"]

logger = logging.getLogger("verifiers.train")

T = TypeVar("T")

CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of a server's health and weight version."""

_RETRY_S = 0.25
_SAMPLING_ROUTES = frozenset({CHAT, COMPLETIONS, GENERATE})


class ServerPool(LoadBalancer):
    """Rollout servers that weights are pushed to; routing as of `LoadBalancer`.

    A server that cannot be reached, or breaks off an answer, is down: it may come back with old weights, so it gets
    requests again when it holds the pushed ones (or after `mark_up`).

    No answer from weights that were never pushed is used. An answer that names such weights is refused; one that
    names none counts once its server was asked for its version after the call began.

    Args:
        servers, seed, up_timeout_s, clock: as of `LoadBalancer`.
        api_key: bearer token of the servers' control routes; that of their backends when left out.
        timeout_s: deadline of one push to servers that answer, in seconds.

    Attributes:
        restart_timeout_s, stall_timeout_s: as of `configure`; `timeout_s` until then.

    Raises:
        ConfigError: no servers, or two for one base URL.
    """

    def __init__(
        self,
        servers: Sequence[Any],
        *,
        seed: int = 0,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        up_timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(servers, seed=seed, clock=clock, up_timeout_s=up_timeout_s)
        for replica, backend in zip(self.replicas, self.backends, strict=True):
            replica.server = ServerClient(replica.url, api_key or backend.api_key, timeout_s)
        if len(set(self.urls)) < len(self.replicas):
            raise ConfigError(f"the base URLs {self.urls} name a server twice; name each once.")
        self.timeout_s = timeout_s
        self._health_s = min(HEALTH_S, timeout_s)
        self.restart_timeout_s = timeout_s
        self.stall_timeout_s = timeout_s
        self._on_version: Callable[[int], None] | None = None
        # what all servers are to hold, and the versions of all weights that they were told to load
        self._current: WeightUpdate | None = None
        self._pushed: set[str] = set()
        self._thread: LoopThread | None = None
        self._begin_on_loop()

    def configure(
        self,
        *,
        restart_timeout_s: float,
        stall_timeout_s: float,
        on_version: Callable[[int], None] | None = None,
    ) -> None:
        """Set the deadlines of a run, and what is told of its pushes.

        Args:
            restart_timeout_s: seconds that a push, or a call, waits where no server can be reached.
            stall_timeout_s: seconds for which code may block the event loop during a push.
            on_version: called with the version of a push that all servers hold, before requests in flight continue.
        """
        self.restart_timeout_s = self.up_timeout_s = restart_timeout_s
        self.stall_timeout_s, self._on_version = stall_timeout_s, on_version

    def _begin_on_loop(self) -> None:
        """Make what belongs to one event loop."""
        self._updating = asyncio.Lock()
        self._checking: asyncio.Task[None] | None = None
        self._begin_waits()
        for replica in self.replicas:
            replica.check = None

    @property
    def servers(self) -> list[ServerClient]:
        """Control clients of the servers that are up; of the first one where none is."""
        up = [replica.server for replica in self.replicas if replica.down is None]
        return up or [self.replicas[0].server]

    @property
    def restarts(self) -> int:
        """Number of times a server held other weights than were pushed, and got them again."""
        return sum(replica.restarts for replica in self.replicas)

    @property
    def repeated_loads(self) -> int:
        """Number of times a server got weights again: it was restarted, or a load before had failed.

        Log-probs of such a server are to be verified.
        """
        return sum(replica.restarts + replica.repeated_loads for replica in self.replicas)

    # -- requests -----------------------------------------------------------------------------------------------

    def route(self, backend: Backend) -> Backend:
        """Send the requests of `backend` through the pool, so that none is answered from weights not pushed.

        That needs requests that are ours, to servers that get the weights: base URLs, Endpoints and plain openai
        clients. A client object that has to be called as it is (a subclass, a wrapper, one with an HTTP client of its
        own) is returned as it is, with a warning.
        """
        if backend is self:
            return self
        parts = each_server(backend)
        missed = [
            one.base_url or type(one).__name__
            for one in parts
            if not isinstance(one, HttpBackend) or one.base_url not in self.urls
        ]
        if missed:
            logger.warning(
                "rollouts use a client that bypasses the weight checks (%s; the servers that get the weights: %s): "
                "after a restart, a server may answer from old weights.",
                ", ".join(missed),
                ", ".join(sorted(self.urls)),
            )
            return backend
        by_url = {one.base_url: one for one in parts}
        for replica in self.replicas:
            replica.backend = by_url.get(replica.url)
        self.base_url, self.api_key = parts[0].base_url, parts[0].api_key
        return self

    async def _try(self, replica: Replica, path: str, arguments: Mapping[str, Any]) -> Any:
        assert replica.backend is not None
        self._loop = asyncio.get_running_loop()
        given_up, sent_at = asyncio.timeout(None), self._clock()
        try:
            async with given_up:
                if replica.down is not None:
                    raise RetryableError(f"{replica.url} is down: {replica.down}", unreachable=True)
                replica.calls.add(given_up)
                answer = await replica.backend.call(path, arguments)
                if self._pushed and path in _SAMPLING_ROUTES:
                    await self._refuse_unpushed(replica, answer, sent_at)
                return answer
        except TimeoutError as error:
            if not given_up.expired():
                raise
            text = f"{replica.url} was given up: {replica.down or 'it was down'}"
            raise RetryableError(text, unreachable=True, broke=True) from error
        finally:
            replica.calls.discard(given_up)

    def _note_unreachable(self, replica: Replica, error: RetryableError) -> None:
        # the next process at that address may hold other weights
        self.mark_down(replica.url, str(error), give_up_calls=False)

    async def _refuse_unpushed(self, replica: Replica, answer: Any, sent_at: float) -> None:
        """Refuse an answer from weights that were never pushed.

        Raises:
            RetryableError: the answer names such weights; the server is marked down.
        """
        answer = plain_data(answer)
        spans = sampled_tokens(answer).versions if answer.get("choices") else ()
        names = [span.get("version") for span in spans if isinstance(span, Mapping)]
        foreign = {str(name).removesuffix("+reload") for name in names if isinstance(name, (str, int))} - self._pushed
        if foreign:
            reason = f"it answered from weights {', '.join(map(repr, foreign))}, which were never pushed"
            self.mark_down(replica.url, reason)
            raise RetryableError(f"{replica.url} was given up: {reason}", unreachable=True)
        # had the answer come from a process that was restarted, a version check after the call began would show it
        if not spans and replica.verified_at < sent_at:
            await self._until_verified(replica.url, float("inf"))

    # -- the pool's thread --------------------------------------------------------------------------------------

    def thread(self) -> LoopThread:
        """Return the pool's event loop in its thread, started where it does not run."""
        if self._thread is None or not self._thread.is_alive:
            self._begin_on_loop()
            self._thread = LoopThread(close_last=self._end, failed=_log_failure, name="verifiers-servers")
            self._thread.start()
            self._loop = self._thread.loop
        return self._thread

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the pool's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.thread().loop)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the pool's loop and wait for its result; not to be called on that loop.

        Raises:
            DeadlineError: the coroutine did not end in time, or code blocks the loop for `stall_timeout_s`.
            GenerationError: code of the environment ended the loop.
            WeightSyncError: what the coroutine raised, or the pool was stopped.
        """
        try:
            ending_s = SHUTDOWN_S + _RETRY_S
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
            releasing = threading.Thread(target=lambda: asyncio.run(release_all(self.replicas)), daemon=True)
            releasing.start()
            releasing.join(2 * SHUTDOWN_S)

    async def _end(self) -> None:
        # the files that a restarted server would load from are about to be removed
        self._current = self._checking = None
        await release_all(self.replicas)
        await self.close()

    # -- pushing ------------------------------------------------------------------------------------------------

    def connect(self, deadline_s: float) -> None:
        """Wait for all servers and verify that they can take weights; from then on they are checked every second.

        Raises:
            WeightSyncError: one did not answer in time, or lacks the routes.
        """
        self.run(self._connect(deadline_s), deadline_s + 2 * self.timeout_s)

    async def _connect(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        for server in (replica.server for replica in self.replicas):
            await server.wait_until_healthy(max(0.0, deadline - time.monotonic()))
            try:
                await server.retried(server.weight_version)
            except WeightSyncError as error:
                raise WeightSyncError(
                    f"the server at {server.root} has no weight routes, so it cannot be trained against "
                    f"({error}); use vf-serve, vf-vllm, or vLLM with VLLM_SERVER_DEV_MODE=1."
                ) from error
        if self._checking is None:
            self._checking = asyncio.create_task(self._check_all())

    def push(self, update: WeightUpdate) -> None:
        """Bring every server that can be reached to these weights.

        A server that cannot be reached is left out, and gets them when it is back. Where none can be reached, they
        are waited for.

        Raises:
            WeightSyncError: a server refused, or none could be reached in time.
        """
        self.run(self._push(update), 2 * self.timeout_s + self.restart_timeout_s + 2 * HEALTH_S)

    async def _push(self, update: WeightUpdate) -> None:
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
            await self._apply_where_reachable(update)
        except BaseException as error:
            # a server that comes back must not get what was refused, or what a run that is stopped removes
            self._current = before
            if not isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(
                f"the weights of step {update.version} did not reach the rollout server: {error}"
            ) from error
        finally:
            self._updating.release()

    async def _apply_where_reachable(self, update: WeightUpdate) -> None:
        deadline = time.monotonic() + self.restart_timeout_s
        while not await self._apply(await self._reachable(), update, self._on_version):
            if time.monotonic() + _RETRY_S >= deadline:
                raise NoAnswerError(self.replicas[0].down or "it does not answer")
            await asyncio.sleep(_RETRY_S)

    async def _reachable(self) -> list[Replica]:
        """Return the servers that are up, and where nothing else brings them back, those that answer."""
        down = [replica for replica in self.replicas if replica.down is not None]
        if self._checking is not None and len(down) < len(self.replicas):
            # the checks bring the others back and give them these weights: a host that is gone delays no push
            answers = [False] * len(down)
        else:
            answers = await gather_owned(replica.server.is_healthy(self._health_s) for replica in down)
        left_out = {replica.url for replica, is_healthy in zip(down, answers, strict=True) if not is_healthy}
        return [replica for replica in self.replicas if replica.url not in left_out]

    async def _apply(
        self, replicas: Sequence[Replica], update: WeightUpdate, loaded: Callable[[int], None] | None = None
    ) -> list[Replica]:
        """Give weights to servers, use those that hold them now, and return these."""
        deadline = time.monotonic() + self.timeout_s
        reached = await apply_update(replicas, update, deadline, mark_down=self.mark_down, loaded=loaded)
        for replica in reached:
            self.mark_up(replica.url)
        return reached

    # -- checks between pushes ----------------------------------------------------------------------------------

    async def _check_all(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_INTERVAL_S):
                    await self._went_down.wait()
            self._went_down.clear()
            for replica in self.replicas:
                self._check(replica)

    def _check(self, replica: Replica) -> asyncio.Task[None]:
        """Begin to check a server, or join the check that runs."""
        if replica.check is None or replica.check.done():
            replica.check = asyncio.create_task(self._checked(replica))
        return replica.check

    async def _checked(self, replica: Replica) -> None:
        try:
            await self.check(replica)
        except Exception as error:
            # whatever a server answers: without these checks none would come back
            logger.warning("%s could not be brought back yet: %s", replica.server.root, error)

    async def check(self, replica: Replica) -> None:
        """Ask a server for its version, give it the newest weights where it holds others, and mark it up.

        A restart shows in the version: pushed versions are numbers, and a server that was just started calls its
        weights something else.

        Raises:
            WeightSyncError: it refused.
        """
        update, began = self._current, self._clock()
        if update is None or (replica.down is not None and not await replica.server.is_healthy(self._health_s)):
            return
        try:
            name = await replica.server.weight_version(self._health_s)
        except NoAnswerError as error:
            if not error.timed_out:
                self.mark_down(replica.url, str(error))
            return
        if name in replica.versions:
            replica.verified_at = began
        # a push that is under way, or came meanwhile, finds out by itself
        if self._updating.locked() or self._current is not update:
            return
        async with self._updating:
            if name != str(update.version):
                self.mark_down(replica.url, f"it holds weights {name!r} where {update.version} was pushed")
                if not await self._apply([replica], update):
                    return
                logger.warning("%s was given the weights of step %d again", replica.server.root, update.version)
            elif replica.is_paused:
                # it did not answer at the end of a push
                await replica.resume(time.monotonic() + self.timeout_s)
            self.mark_up(replica.url)

    def holds_pushed_weights(self, url: str) -> bool:
        """Return whether the server at `url` says that it holds pushed weights, or none were pushed."""
        return not self._pushed or self.run(self._is_verified(url), 4 * HEALTH_S + 2 * self.timeout_s)

    def wait_until_restored(self, url: str, timeout_s: float) -> bool:
        """Wait until a server that was restarted holds pushed weights; False where it does not in time."""
        if not self._pushed:
            return False
        deadline = time.monotonic() + timeout_s
        return self.run(self._until_verified(url, deadline), timeout_s + 4 * HEALTH_S + 2 * self.timeout_s)

    async def _until_verified(self, url: str, deadline: float) -> bool:
        while not await self._is_verified(url):
            await asyncio.sleep(_RETRY_S)
            if time.monotonic() >= deadline:
                return False
        return True

    async def _is_verified(self, url: str) -> bool:
        replica, began = self._replica(url), self._clock()
        restarts = replica.restarts
        # a check that runs may have begun before, and one may fail
        for _ in range(4):
            await asyncio.shield(self._check(replica))
            if replica.restarts > restarts or replica.verified_at >= began:
                break
        return replica.restarts == restarts and replica.verified_at >= began


def _log_failure(error: BaseException) -> None:
    logger.warning("the thread of the rollout servers failed: %r", error)
