"""Several servers of one model behind one backend: least loaded first, and a prefix stays where it is cached.

Evaluation and training share it. They differ in what happens to a server that cannot be reached: in evaluation it is
tried again after a while (`managed=False`); in training it may have come back with old weights, so it gets nothing
until whoever pushes weights says that it is up (`managed=True`, `mark_up`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import ConfigError, ProviderError
from verifiers.rollouts.endpoint import Backend, Endpoint, HttpBackend
from verifiers.rollouts.pinned import PinnedBackend
from verifiers.rollouts.retries import RetryableError

__all__ = ["BalancedBackend", "server_pool"]

logger = logging.getLogger("verifiers.rollouts")

_FIRST_ASIDE_S = 1.0
_LONGEST_ASIDE_S = 60.0
# a probe that was not refused by then has got through: its answer may take minutes
_PROBE_S = 5.0
# a server that holds a prefix keeps its rollouts until it is this much busier than the idlest
_BUSIER_CALLS = 4
_BUSIER_RATIO = 1.5
# a group's rollouts begin together, so few groups are remembered at a time
_HOMES_KEPT = 4096


@dataclass(slots=True)
class Server:
    """One server as calls are spread; times are the balanced backend's clock.

    Attributes:
        in_flight: calls that wait for its answer.
        failures: how often it was set aside since it last answered.
        falls: how often it went down, or was set aside; calls that fail together are of one fall.
        aside_until: when it may be tried again.
        probed_until: how long the call that tries it is alone there.
        down: why it gets nothing until `mark_up`; None where it is up.
        calls: what it is answering, each with the loop that waits; filled where servers are managed.
    """

    backend: Backend
    in_flight: int = 0
    failures: int = 0
    falls: int = 0
    aside_until: float = -float("inf")
    probed_until: float = -float("inf")
    down: str | None = None
    calls: dict[asyncio.Timeout, asyncio.AbstractEventLoop] = field(default_factory=dict)


class BalancedBackend:
    """Sends each call to the server with the fewest calls in flight, or to the one that holds its prefix.

    A rollout's later turns, and the rollouts of one group, go to the server that computed their prefix, unless that
    has more than 4 + 1.5 x as many calls in flight as the least loaded server.

    A server that cannot be reached, or breaks off an answer, loses its calls to the others at once; a call under
    which two servers broke off fails, for it may be what ends them. Then:

    - `managed=False`: it is set aside for 1 s, then for twice as long each time, up to a minute. After that one call
      probes it, and an answer of whatever status brings it back; others follow when the probe was not refused for
      5 s. Where all are set aside, the one that is due first is tried: waiting is the retry loop's.
    - `managed=True`: it is down, and gets no call until `mark_up`. Where all are down, calls wait for `mark_up`.

    `urls`, `mark_down`, `mark_up` and `down` may be used from any thread.

    Args:
        backends: one for each base URL, all serving the same model.
        seed: of the draw between servers that are equally loaded.
        managed: somebody watches the servers, and says when one may be used again.
        on_down: called with URL and reason each time a server goes down, in the thread that noticed; it must return
            at once. May be set later.
        up_timeout_s: how long no server may be up before calls fail, in seconds; a rollout's own deadline may end
            the wait before.
        clock: seconds that only ever grow; for tests.

    Raises:
        ConfigError: no backends, or two for one base URL.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        *,
        seed: int = 0,
        managed: bool = False,
        on_down: Callable[[str, str], None] | None = None,
        up_timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not backends:
            raise ConfigError("there is no backend to send calls to; give at least one base URL.")
        self._servers = [Server(backend) for backend in backends]
        self._by_url = {server.backend.base_url: server for server in self._servers}
        if managed and len(self._by_url) < len(self._servers):
            raise ConfigError(f"the base URLs {[b.base_url for b in backends]} name a server twice; name each once.")
        self.managed = managed
        self.on_down = on_down
        self.up_timeout_s = up_timeout_s
        self._random = random.Random(seed)
        self._clock = clock
        self._homes: dict[Hashable, Server] = {}
        self._lock = threading.Lock()
        self._none_up_since = -float("inf")
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self.base_url = backends[0].base_url
        self.api_key = backends[0].api_key

    # -- who is up ----------------------------------------------------------------------------------------------

    @property
    def urls(self) -> list[str]:
        """The base URLs of all servers, up or down."""
        return [server.backend.base_url for server in self._servers]

    base_urls = urls

    @property
    def backends(self) -> list[Backend]:
        """The servers' own backends, in the order of `urls`."""
        return [server.backend for server in self._servers]

    @property
    def in_flight(self) -> dict[str, int]:
        """Calls in flight at each address."""
        return {server.backend.base_url: server.in_flight for server in self._servers}

    def down(self) -> dict[str, str]:
        """Why each server that is down is down, by base URL."""
        with self._lock:
            return {server.backend.base_url: server.down for server in self._servers if server.down is not None}

    def mark_down(self, url: str, reason: str, *, give_up_calls: bool = True) -> None:
        """Send nothing more to a server until `mark_up`.

        Args:
            give_up_calls: what it is answering is asked anew elsewhere: it may be gone without a word, or hold other
                weights. False lets that end. Needs `managed=True`.

        Raises:
            ConfigError: no server has that base URL.
        """
        server = self._server(url)
        with self._lock:
            was_down, server.down = server.down is not None, server.down or reason
            if not was_down:
                server.falls += 1
                if all(one.down is not None for one in self._servers):
                    self._none_up_since = self._clock()
            calls = list(server.calls.items()) if give_up_calls else []
        for call, loop in calls:
            # a loop that has ended has nobody who waits
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_end_now, call, loop)
        if was_down:
            return
        logger.warning("%s is down: %s", server.backend.base_url, reason)
        if self.on_down is not None:
            self.on_down(server.backend.base_url, reason)

    def mark_up(self, url: str) -> None:
        """Use a server again, and let go on what waited for one.

        Raises:
            ConfigError: no server has that base URL.
        """
        server = self._server(url)
        with self._lock:
            was_down, server.down = server.down is not None, None
            server.failures, server.aside_until = 0, -float("inf")
            waiting, self._waiting = self._waiting, []
        if was_down:
            logger.info("%s is up", server.backend.base_url)
        for loop, woken in waiting:
            # a loop that has ended has nobody who waits
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake, woken)

    def _server(self, url: str) -> Server:
        try:
            return self._by_url[url.rstrip("/")]
        except KeyError:
            raise ConfigError(f"no server has the base URL {url!r}; there are {', '.join(self._by_url)}.") from None

    async def until_one_is_up(self) -> None:
        """Wait until a server is not down.

        Raises:
            ProviderError: none was, for `up_timeout_s` seconds.
        """
        # counted from when the last server went down: retries must not begin the wait anew
        deadline = asyncio.timeout(max(0.0, self._none_up_since + self.up_timeout_s - self._clock()))
        try:
            async with deadline:
                while True:
                    with self._lock:
                        if any(server.down is None for server in self._servers):
                            return
                        loop = asyncio.get_running_loop()
                        woken: asyncio.Future[None] = loop.create_future()
                        self._waiting.append((loop, woken))
                    await woken
        except TimeoutError as error:
            if not deadline.expired():
                raise
            reasons = "; ".join(f"{url}: {reason}" for url, reason in self.down().items())
            # not worth a retry: this was the wait
            raise ProviderError(f"no rollout server was up for {self.up_timeout_s:g} s ({reasons})") from error

    # -- routing --------------------------------------------------------------------------------------------------

    def for_rollout(self, group: Hashable = None) -> PinnedBackend:
        """A handle whose calls keep to one server, whose cache holds the turns so far, unless it fails.

        Args:
            group: the same for rollouts whose prompts begin alike; they begin on the same server.
        """
        return PinnedBackend(self, group)

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """As `Backend.call`, on the least loaded server."""
        return await self.for_rollout().call(path, arguments)

    async def call_on(self, server: Server, path: str, arguments: Mapping[str, Any]) -> Any:
        """One try on one server, counted; whether it could be reached is remembered."""
        server.in_flight += 1
        probes = server.failures > 0 and server.probed_until == -float("inf")
        if probes:
            server.probed_until = self._clock() + _PROBE_S
        reached: bool | None = None
        try:
            if self.managed:
                answer = await self._call_unless_given_up(server, path, arguments)
            else:
                answer = await server.backend.call(path, arguments)
            reached = True
            return answer
        except RetryableError as error:
            # an answer that is late says nothing of whether the server is there
            reached = False if error.unreachable else (True if error.status is not None else None)
            if self.managed and error.unreachable:
                # whatever listens there next may hold other weights
                self.mark_down(server.backend.base_url, str(error), give_up_calls=False)
            raise
        except Exception:
            reached = True
            raise
        finally:
            server.in_flight -= 1
            if probes:
                server.probed_until = -float("inf")
            if reached is not None and not self.managed:
                self._remember(server, reached)

    async def _call_unless_given_up(self, server: Server, path: str, arguments: Mapping[str, Any]) -> Any:
        given_up = asyncio.timeout(None)
        try:
            async with given_up:
                with self._lock:
                    if server.down is not None:
                        raise RetryableError(f"{server.backend.base_url} is down: {server.down}", unreachable=True)
                    server.calls[given_up] = asyncio.get_running_loop()
                return await server.backend.call(path, arguments)
        except TimeoutError as error:
            if not given_up.expired():
                raise
            text = f"{server.backend.base_url} was given up: {server.down or 'it was down'}"
            raise RetryableError(text, unreachable=True, broke=True) from error
        finally:
            with self._lock:
                server.calls.pop(given_up, None)

    def choose(self, but: Sequence[Server] = (), near: Server | None = None) -> Server | None:
        """A server that is up, not set aside nor among `but`, or None where there is none.

        Without `but`, and where a server is up, there always is one: where all are set aside, the one that is due
        first.

        Args:
            near: the server that holds the prefix; taken unless it is much busier than the least loaded.
        """
        others = [one for one in self._servers if one.down is None and not any(one is tried for tried in but)]
        if not others:
            return None
        now = self._clock()
        ready = [server for server in others if server.aside_until <= now and server.probed_until <= now]
        if not ready:
            return None if but else min(others, key=lambda server: server.aside_until)
        if len(ready) == 1:
            return ready[0]
        least = min(server.in_flight for server in ready)
        if near is not None and near in ready and near.in_flight <= _BUSIER_CALLS + _BUSIER_RATIO * least:
            return near
        return self._random.choice([server for server in ready if server.in_flight == least])

    def home(self, group: Hashable) -> Server | None:
        """The server where a group began, or None."""
        return self._homes.get(group) if group is not None else None

    def settle(self, group: Hashable, server: Server) -> None:
        """Remember where a group begins; the first rollout says, and again where that server is gone."""
        if group is None:
            return
        home = self._homes.get(group)
        if home is not None and self.is_ready(home):
            return
        self._homes[group] = server
        if len(self._homes) > _HOMES_KEPT:
            del self._homes[next(iter(self._homes))]

    def is_ready(self, server: Server) -> bool:
        """True where the server is neither down nor set aside."""
        return server.down is None and server.aside_until <= self._clock()

    def _remember(self, server: Server, reached: bool) -> None:
        if reached:
            if server.failures:
                logger.info("%s is back", server.backend.base_url)
            server.failures, server.aside_until = 0, -float("inf")
        elif server.aside_until <= self._clock():
            # calls that were in flight together fail together, and count once
            aside_s = min(_LONGEST_ASIDE_S, _FIRST_ASIDE_S * 2**server.failures)
            server.failures += 1
            server.falls += 1
            server.aside_until = self._clock() + aside_s
            logger.warning("%s cannot be reached; set aside for %g s", server.backend.base_url, aside_s)

    async def close(self) -> None:
        """Close every backend."""
        for server in self._servers:
            await server.backend.close()


def server_pool(
    urls: Sequence[str], *, api_key: str = "EMPTY", timeout_s: float = 600.0, **options: Any
) -> BalancedBackend:
    """A `BalancedBackend` over base URLs.

    Args:
        urls: base URLs with the version, e.g. "http://127.0.0.1:8000/v1".
        api_key: sent to each as a bearer token.
        timeout_s: deadline of one try of one call, in seconds.
        options: as `BalancedBackend` takes them, e.g. `managed=True`.

    Raises:
        ConfigError: no URL, or one that is no HTTP address.
    """
    return BalancedBackend([HttpBackend(Endpoint(url, api_key, timeout_s=timeout_s)) for url in urls], **options)


def _end_now(call: asyncio.Timeout, loop: asyncio.AbstractEventLoop) -> None:
    # it may have ended meanwhile
    with contextlib.suppress(RuntimeError):
        call.reschedule(loop.time())


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
