"""Several servers of one model behind one backend: least loaded first, one server for all turns of a rollout."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError
from verifiers.rollouts.endpoint import Backend
from verifiers.rollouts.retries import RetryableError

__all__ = ["BalancedBackend", "PinnedBackend"]

logger = logging.getLogger("verifiers.rollouts")

_FIRST_ASIDE_S = 1.0
_LONGEST_ASIDE_S = 60.0
# a probe that was not refused by then has got through: its answer may take minutes
_PROBE_S = 5.0


@dataclass(slots=True)
class _Server:
    backend: Backend
    in_flight: int = 0
    failures: int = 0
    aside_until: float = -float("inf")
    probed_until: float = -float("inf")


class BalancedBackend:
    """Sends each call to the server with the fewest calls in flight.

    A server that cannot be reached, or breaks off an answer, is set aside for 1 s, then for twice as long each time,
    up to a minute; the call goes to another one at once. After that time one call probes it, and an answer
    of whatever status brings it back; others follow when the probe was not refused for 5 s. Where all are set
    aside, the one that is due first is tried: waiting is the retry loop's.

    Args:
        backends: one for each base URL, all serving the same model.
        seed: of the draw between servers that are equally loaded.
        clock: seconds that only ever grow; for tests.

    Raises:
        ConfigError: no backends.
    """

    def __init__(
        self, backends: Sequence[Backend], *, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not backends:
            raise ConfigError("there is no backend to send calls to; give at least one base URL.")
        self._servers = [_Server(backend) for backend in backends]
        self._random = random.Random(seed)
        self._clock = clock
        self.base_url = backends[0].base_url
        self.api_key = backends[0].api_key

    @property
    def base_urls(self) -> list[str]:
        """The addresses of all servers."""
        return [server.backend.base_url for server in self._servers]

    @property
    def in_flight(self) -> dict[str, int]:
        """Calls in flight at each address."""
        return {server.backend.base_url: server.in_flight for server in self._servers}

    def for_rollout(self) -> PinnedBackend:
        """A handle whose calls keep to one server, whose cache holds the turns so far, unless it fails."""
        return PinnedBackend(self)

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """As `Backend.call`, on the least loaded server."""
        return await self.for_rollout().call(path, arguments)

    async def call_on(self, server: _Server, path: str, arguments: Mapping[str, Any]) -> Any:
        """One try on one server, counted; whether it could be reached is remembered."""
        server.in_flight += 1
        probes = server.failures > 0 and server.probed_until == -float("inf")
        if probes:
            server.probed_until = self._clock() + _PROBE_S
        reached: bool | None = None
        try:
            answer = await server.backend.call(path, arguments)
            reached = True
            return answer
        except RetryableError as error:
            # an answer that is late says nothing of whether the server is there
            reached = False if error.unreachable else (True if error.status is not None else None)
            raise
        except Exception:
            reached = True
            raise
        finally:
            server.in_flight -= 1
            if probes:
                server.probed_until = -float("inf")
            if reached is not None:
                self._remember(server, reached)

    def choose(self, but: Sequence[_Server] = ()) -> _Server | None:
        """The least loaded server that is not set aside nor among `but`, or None.

        Without `but` there always is one: where all are set aside, the one that is due first.
        """
        others = [server for server in self._servers if not any(server is one for one in but)]
        now = self._clock()
        ready = [server for server in others if server.aside_until <= now and server.probed_until <= now]
        if not ready:
            return None if but else min(others, key=lambda server: server.aside_until)
        if len(ready) == 1:
            return ready[0]
        least = min(server.in_flight for server in ready)
        return self._random.choice([server for server in ready if server.in_flight == least])

    def is_ready(self, server: _Server) -> bool:
        """True where the server is not set aside."""
        return server.aside_until <= self._clock()

    def _remember(self, server: _Server, reached: bool) -> None:
        if reached:
            if server.failures:
                logger.info("%s is back", server.backend.base_url)
            server.failures, server.aside_until = 0, -float("inf")
        elif self.is_ready(server):
            # calls that were in flight together fail together, and count once
            aside_s = min(_LONGEST_ASIDE_S, _FIRST_ASIDE_S * 2**server.failures)
            server.failures += 1
            server.aside_until = self._clock() + aside_s
            logger.warning("%s cannot be reached; set aside for %g s", server.backend.base_url, aside_s)

    async def close(self) -> None:
        """Close every backend."""
        for server in self._servers:
            await server.backend.close()


class PinnedBackend:
    """One rollout's handle on a `BalancedBackend`: its calls go to one server until that one fails."""

    def __init__(self, balanced: BalancedBackend) -> None:
        self._balanced = balanced
        self._server: _Server | None = None
        self._failed: list[_Server] = []
        self.base_url = balanced.base_url
        self.api_key = balanced.api_key

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """As `Backend.call`; a server that cannot be reached is replaced by each of the others in turn."""
        balanced = self._balanced
        tried: list[_Server] = []
        server = self._server
        if server is None or not balanced.is_ready(server):
            # a server that refuses at once always looks idle
            server = balanced.choose(self._failed) or balanced.choose()
        self._failed = []
        while server is not None:
            self._server, self.base_url = server, server.backend.base_url
            tried.append(server)
            try:
                return await balanced.call_on(server, path, arguments)
            except RetryableError as error:
                if error.status != 429:
                    # a limit is best waited for where the prefix is; with anything else, the next try goes elsewhere
                    self._server, self._failed = None, tried
                server = balanced.choose(tried) if error.unreachable else None
                if server is None:
                    raise
        raise AssertionError("there is at least one server")

    async def close(self) -> None:
        """Nothing to close: connections belong to the balanced backend."""
