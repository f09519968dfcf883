"""Several servers of one model behind one backend: least loaded first, and a prefix stays where it is cached."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError, ProviderError
from verifiers.inference.endpoint import Backend, HttpBackend, single_backend_for
from verifiers.inference.retries import RetryableError
from verifiers.inference.rollout_server import Replica, ServerClient

__all__ = ["LoadBalancer", "SessionAffinity", "backend_for", "credentials", "each_server"]

logger = logging.getLogger("verifiers.rollouts")

# a prompt that ends the server which computes it must not be sent to every other
_MOST_LOST = 2
_FIRST_EJECTION_S = 1.0
_LONGEST_EJECTION_S = 60.0
# a probe that was not refused by then has got through: its answer may take minutes
_PROBE_S = 5.0
# a server that holds a prefix keeps its rollouts until it is this much busier than the idlest
_BUSIER_CALLS = 4
_BUSIER_RATIO = 1.5
# a group's rollouts begin together, so few groups are remembered at a time
_AFFINITIES_KEPT = 4096


class LoadBalancer:
    """A balancer that sends each call to the server with the fewest in flight, or to the one that holds its prefix.

    A rollout's later turns, and the rollouts of one group, go to the server that computed their prefix, unless that
    has more than 4 + 1.5 x as many calls in flight as the least loaded server.

    A server that cannot be reached, or breaks off an answer, loses its calls to the others at once, and is ejected
    for 1 s, then for twice as long each time, up to a minute. After that one call probes it, and an answer of
    whatever status brings it back; others follow when the probe was not refused for 5 s. Where all are ejected, the
    one that is due first is tried: waiting is the retry loop's. A call under which two servers broke off fails, as
    it may crash the others too.

    Args:
        servers: one for each base URL, all serving the same model; anything that `single_backend_for` takes.
        seed: of the draw between servers that are equally loaded.
        clock: seconds that only ever grow; for tests.
        up_timeout_s: seconds with all servers marked down after which calls fail; a rollout's own deadline may end
            the wait before.

    Attributes:
        replicas: the servers.

    Raises:
        ConfigError: no servers.
    """

    def __init__(
        self,
        servers: Sequence[Any],
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        up_timeout_s: float = 600.0,
    ) -> None:
        if not servers:
            raise ConfigError("there is no server to send calls to; give at least one base URL.")
        backends = [single_backend_for(server) for server in servers]
        self.replicas = [Replica(one.base_url, ServerClient(one.base_url, one.api_key), one) for one in backends]
        self.base_url = backends[0].base_url
        self.api_key = backends[0].api_key
        self._random = random.Random(seed)
        self._clock = clock
        self._affinities: dict[Hashable, Replica] = {}
        self.up_timeout_s = up_timeout_s
        self._none_up_since = -float("inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin_waits()

    @property
    def urls(self) -> list[str]:
        """The base URLs of all servers."""
        return [replica.url for replica in self.replicas]

    @property
    def backends(self) -> list[Backend]:
        """The backends of the servers that requests go to."""
        return [replica.backend for replica in self.replicas if replica.backend is not None]

    @property
    def in_flight(self) -> dict[str, int]:
        """Calls in flight at each address."""
        return {replica.url: replica.in_flight for replica in self.replicas}

    def for_rollout(self, group: Hashable = None) -> SessionAffinity:
        """Return a handle whose calls keep to one server, whose cache holds the turns so far, unless it fails.

        Args:
            group: the same for rollouts whose prompts begin alike; they begin on the same server.
        """
        return SessionAffinity(self, group)

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Make one call as `Backend.call` does, on the least loaded server."""
        return await self.for_rollout().call(path, arguments)

    async def close(self) -> None:
        """Close every backend."""
        for backend in self.backends:
            await backend.close()

    # -- choosing -----------------------------------------------------------------------------------------------

    def choose(self, but: Sequence[Replica] = (), near: Replica | None = None) -> Replica | None:
        """Return a server that is up, not ejected nor among `but`, or None.

        Without `but`, and where a server is up, there always is one: of ejected ones, the one that is due first.

        Args:
            but: servers that were tried.
            near: the server that holds the prefix; taken unless it is much busier than the least loaded.
        """
        up = [one for one in self.replicas if one.down is None and one.backend is not None and one not in but]
        now = self._clock()
        ready = [one for one in up if one.is_ready(now)]
        if not ready:
            return None if but or not up else min(up, key=lambda one: one.ejected_until)
        least = min(one.in_flight for one in ready)
        if near is not None and near in ready and near.in_flight <= _BUSIER_CALLS + _BUSIER_RATIO * least:
            return near
        idlest = [one for one in ready if one.in_flight == least]
        return idlest[0] if len(idlest) == 1 else self._random.choice(idlest)

    def affinity(self, group: Hashable) -> Replica | None:
        """Return the server on which a group began, or None."""
        return self._affinities.get(group) if group is not None else None

    def remember(self, group: Hashable, replica: Replica) -> None:
        """Remember on which server a group began; one that is gone is replaced."""
        before = self._affinities.get(group)
        if group is None or (before is not None and before.down is None and before.ejected_until <= self._clock()):
            return
        self._affinities[group] = replica
        if len(self._affinities) > _AFFINITIES_KEPT:
            del self._affinities[next(iter(self._affinities))]

    # -- which servers are up -----------------------------------------------------------------------------------

    def _begin_waits(self) -> None:
        """Make the events of the loop that calls wait on."""
        self._went_down = asyncio.Event()
        self._one_is_up = asyncio.Event()
        if len(self.down()) < len(self.replicas):
            self._one_is_up.set()

    def down(self) -> dict[str, str]:
        """Return the reason for each server that is down, by base URL."""
        return {replica.url: replica.down for replica in self.replicas if replica.down is not None}

    def mark_down(self, url: str, reason: str, *, give_up_calls: bool = True) -> None:
        """Send nothing more to a server until it is marked up. May be called from any thread.

        Args:
            url: the server's base URL.
            reason: for the log, and for calls that fail.
            give_up_calls: what it is answering is asked of other servers, as it may be gone or hold other weights;
                False lets those calls end.

        Raises:
            ConfigError: no server has that base URL.
        """
        replica = self._replica(url)
        was_down, replica.down = replica.down is not None, replica.down or reason
        if give_up_calls:
            self._soon(lambda: _end_calls(replica))
        if was_down:
            return
        replica.outages += 1
        if all(one.down is not None for one in self.replicas):
            self._one_is_up.clear()
            self._none_up_since = self._clock()
        logger.warning("rollout server %s is down: %s", replica.url, reason)
        self._soon(self._went_down.set)

    def mark_up(self, url: str) -> None:
        """Use a server again, and resume the calls that waited for one. May be called from any thread.

        Raises:
            ConfigError: no server has that base URL.
        """
        replica = self._replica(url)
        if replica.down is not None:
            replica.down = None
            logger.warning("rollout server %s is up", replica.url)
            self._soon(self._one_is_up.set)

    def _replica(self, url: str) -> Replica:
        for replica in self.replicas:
            if replica.url == url.rstrip("/"):
                return replica
        raise ConfigError(f"no server has the base URL {url!r}; there are {', '.join(self.urls)}.")

    def _soon(self, work: Callable[[], object]) -> None:
        """Run `work` on the loop of the calls; at once where there is none, since nothing waits for it then."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            work() if self._loop is None else self._loop.call_soon_threadsafe(work)

    async def until_one_is_up(self) -> None:
        """Wait until a server is not down.

        Raises:
            ProviderError: none was, for `up_timeout_s` seconds.
        """
        self._loop = asyncio.get_running_loop()
        # counted from when the last server went down: retries must not begin the wait again
        deadline = asyncio.timeout(max(0.0, self._none_up_since + self.up_timeout_s - self._clock()))
        try:
            async with deadline:
                await self._one_is_up.wait()
        except TimeoutError as error:
            reasons = "; ".join(f"{url}: {reason}" for url, reason in self.down().items())
            # not worth a retry: this was the wait
            raise ProviderError(f"no rollout server was up for {self.up_timeout_s:g} s ({reasons})") from error

    # -- one call on one server ---------------------------------------------------------------------------------

    async def call_on(self, replica: Replica, path: str, arguments: Mapping[str, Any]) -> Any:
        """Make one try on one server, and note whether it could be reached."""
        replica.in_flight += 1
        probes = replica.failure_count > 0 and replica.probed_until == -float("inf")
        if probes:
            replica.probed_until = self._clock() + _PROBE_S
        try:
            answer = await self._try(replica, path, arguments)
        except RetryableError as error:
            if error.unreachable:
                self._note_unreachable(replica, error)
            elif error.status is not None:
                self._note_reached(replica)
            # a late answer does not show whether the server is there
            raise
        except Exception:
            self._note_reached(replica)
            raise
        else:
            self._note_reached(replica)
            return answer
        finally:
            replica.in_flight -= 1
            if probes:
                replica.probed_until = -float("inf")

    async def _try(self, replica: Replica, path: str, arguments: Mapping[str, Any]) -> Any:
        assert replica.backend is not None
        return await replica.backend.call(path, arguments)

    def _note_reached(self, replica: Replica) -> None:
        if replica.failure_count:
            logger.info("%s is back", replica.url)
            replica.failure_count, replica.ejected_until = 0, -float("inf")

    def _note_unreachable(self, replica: Replica, error: RetryableError) -> None:
        if replica.ejected_until > self._clock():
            # calls that were in flight together fail together, and count once
            return
        ejected_s = min(_LONGEST_EJECTION_S, _FIRST_EJECTION_S * 2**replica.failure_count)
        replica.failure_count += 1
        replica.outages += 1
        replica.ejected_until = self._clock() + ejected_s
        logger.warning("%s cannot be reached; ejected for %g s", replica.url, ejected_s)


def _end_calls(replica: Replica) -> None:
    now = asyncio.get_running_loop().time()
    for call in list(replica.calls):
        # it may have ended meanwhile
        with contextlib.suppress(RuntimeError):
            call.reschedule(now)


class SessionAffinity:
    """One rollout's handle on several servers: its calls go to one of them until that one fails."""

    def __init__(self, balancer: LoadBalancer, group: Hashable = None) -> None:
        self._balancer = balancer
        self._group = group
        self._replica: Replica | None = None
        self._failed: list[Replica] = []
        # where the newest try was answered with an error of the server's own
        self._erred: Replica | None = None
        # base URLs of lost servers, each with its outage: calls of a rollout may be in flight together
        self._lost: list[tuple[str, int]] = []
        self.base_url = balancer.base_url
        self.api_key = balancer.api_key

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """Make one call as `Backend.call` does; a server that cannot be reached is replaced by each of the others.

        Raises:
            ProviderError: also where servers were lost twice while they answered, with no answer in between.
        """
        self._note_outage_after_error()
        balancer = self._balancer
        near = self._replica or balancer.affinity(self._group)
        # a server that refuses at once always looks idle
        replica = balancer.choose(self._failed, near) or balancer.choose(near=near)
        while replica is None:
            await balancer.until_one_is_up()
            replica = balancer.choose(near=near)
        self._failed = []
        tried: list[Replica] = []
        while replica is not None:
            self._replica, self.base_url = replica, replica.url
            balancer.remember(self._group, replica)
            tried.append(replica)
            try:
                answer = await balancer.call_on(replica, path, arguments)
            except RetryableError as error:
                if error.status != 429:
                    # a limit is best waited for where the prefix is; after anything else, the next try goes elsewhere
                    self._replica, self._failed = None, tried
                if error.status is not None and error.status >= 500:
                    self._erred = replica
                if error.broke:
                    self._lose(replica, error)
                replica = balancer.choose(tried) if error.unreachable else None
                if replica is None:
                    raise
            else:
                self._lost = []
                return answer
        raise AssertionError("there is at least one server")

    def _note_outage_after_error(self) -> None:
        """Count a server as lost that answered with an error first and ended then, as vLLM does."""
        erred, self._erred = self._erred, None
        if erred is not None and erred.down is not None:
            self._lose(erred, None)

    def _lose(self, replica: Replica, error: RetryableError | None) -> None:
        outage = (replica.url, replica.outages)
        if outage in self._lost:
            return
        self._lost.append(outage)
        if len(self._lost) >= _MOST_LOST:
            lost, self._lost = self._lost, []
            raise ProviderError(
                f"{' and then '.join(url for url, _ in lost)} broke off while answering the same request; it "
                "is not sent to another server, because it may crash them"
            ) from error

    async def close(self) -> None:
        """Do nothing: connections belong to the balancer."""


def credentials(backend: Backend) -> tuple[str, dict[str, str]]:
    """Return the API key and the headers that a backend's servers are sent; records of a run must not hold them."""
    headers: dict[str, str] = {}
    for index, one in enumerate(each_server(backend)):
        given = one.endpoint.headers if isinstance(one, HttpBackend) else {}
        headers |= {f"{index}:{name}": value for name, value in given.items()}
    return backend.api_key, headers


def each_server(backend: Backend) -> list[Backend]:
    """Return the backend of each server, where there are several behind one."""
    return backend.backends if isinstance(backend, LoadBalancer) else [backend]


def backend_for(client: Any) -> Backend:
    """Return the backend for one server, as `single_backend_for`, or for a list of several of the same model."""
    if not isinstance(client, (list, tuple)):
        return single_backend_for(client)
    return single_backend_for(client[0]) if len(client) == 1 else LoadBalancer(client)
