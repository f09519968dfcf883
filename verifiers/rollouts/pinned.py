"""One rollout's handle on several servers: its calls keep together, and none takes down one server after another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from verifiers.errors import ProviderError
from verifiers.rollouts.retries import RetryableError

if TYPE_CHECKING:
    from verifiers.rollouts.balancing import BalancedBackend, Server

__all__ = ["PinnedBackend"]

# a prompt that ends the server which computes it would else be asked of every other, again and again
_MOST_LOST = 2


class PinnedBackend:
    """One rollout's handle on a `BalancedBackend`: its calls go to one server until that one fails."""

    def __init__(self, balanced: BalancedBackend, group: Hashable = None) -> None:
        self._balanced = balanced
        self._group = group
        self._server: Server | None = None
        self._failed: list[Server] = []
        # where the newest try was answered with an error of the server's own
        self._erred: Server | None = None
        # base URLs of lost servers, each with which of its falls it was: calls of a rollout may be in flight together
        self._lost: list[tuple[str, int]] = []
        self.base_url = balanced.base_url
        self.api_key = balanced.api_key

    async def call(self, path: str, arguments: Mapping[str, Any]) -> Any:
        """As `Backend.call`; a server that cannot be reached is replaced by each of the others in turn.

        Raises:
            ProviderError: also where servers were lost twice while they answered, with no answer in between.
        """
        self._note_fall_after_error()
        balanced = self._balanced
        near = self._server or balanced.home(self._group)
        # a server that refuses at once always looks idle
        server = balanced.choose(self._failed, near) or balanced.choose(near=near)
        while server is None:
            await balanced.until_one_is_up()
            server = balanced.choose(near=near)
        self._failed = []
        tried: list[Server] = []
        while server is not None:
            self._server, self.base_url = server, server.backend.base_url
            balanced.settle(self._group, server)
            tried.append(server)
            try:
                answer = await balanced.call_on(server, path, arguments)
            except RetryableError as error:
                if error.status != 429:
                    # a limit is best waited for where the prefix is; with anything else, the next try goes elsewhere
                    self._server, self._failed = None, tried
                if error.status is not None and error.status >= 500:
                    self._erred = server
                if error.broke:
                    self._lose(server, error)
                server = balanced.choose(tried) if error.unreachable else None
                if server is None:
                    raise
            else:
                self._lost = []
                return answer
        raise AssertionError("there is at least one server")

    def _note_fall_after_error(self) -> None:
        """vLLM answers with an error first, and ends then."""
        erred, self._erred = self._erred, None
        if erred is not None and erred.down is not None:
            self._lose(erred, None)

    def _lose(self, server: Server, error: RetryableError | None) -> None:
        fall = (server.backend.base_url, server.falls)
        if fall in self._lost:
            return
        self._lost.append(fall)
        if len(self._lost) >= _MOST_LOST:
            lost, self._lost = self._lost, []
            raise ProviderError(
                f"{' and then '.join(url for url, _ in lost)} went away while it answered one request, which is "
                "asked of no other: it may be what ends them"
            ) from error

    async def close(self) -> None:
        """Nothing to close: connections belong to the balanced backend."""
