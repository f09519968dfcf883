"""The rollout servers of a run: all get every push, and one that was started again gets it before it samples.

A push pauses every server, loads, forgets what was computed from old weights, names the version, and lets the
requests go on (`giving`). What a server needs to get the newest version once more (`Held.load`) is kept, so that a
thread without torch can give it to a server that came back while the trainer trains or waits (`watch`).

A restart is noticed by the version that a server reports: by that thread, and on every new connection of the
rollouts' client (`holds_pushed_weights`), for a server cannot have restarted without them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from verifiers.errors import WeightSyncError
from verifiers.train.weight_sync.giving import FAREWELL_S, Giving
from verifiers.train.weight_sync.members import LOOK_S, Held, Member, Pool, Routing, at_once, locked
from verifiers.train.weight_sync.server import NoAnswerError, ServerControl
from verifiers.train.weight_sync.watch import Watch

__all__ = ["Fleet", "Held", "Pool"]

_RETRY_S = 0.25


class Fleet:
    """The servers of a run.

    Args:
        urls: their base URLs, with or without "/v1".
        timeout_s: deadline for one push to servers that answer, in seconds.

    Attributes:
        restart_timeout_s: how long a push waits where no server can be reached, in seconds; `timeout_s` until set.
        on_version: called with the version of a push when all servers have it, before requests in flight go on.
    """

    def __init__(self, urls: Sequence[str], api_key: str = "EMPTY", timeout_s: float = 120.0) -> None:
        self.timeout_s = timeout_s
        self.restart_timeout_s = timeout_s
        self.on_version: Callable[[int], None] | None = None
        self._members = [Member(ServerControl(url, api_key, timeout_s)) for url in urls]
        # changes only while the locks of all members are held
        self._current: Held | None = None
        self._closing = threading.Event()
        self._routing = Routing()
        self._giving = Giving(self._routing, self._closing)
        self._watch = Watch(
            self._members, self._routing, self._giving, lambda: self._current, self._closing, timeout_s
        )

    @property
    def urls(self) -> list[str]:
        """Base URLs of all servers, with /v1."""
        return [member.control.url for member in self._members]

    @property
    def servers(self) -> list[ServerControl]:
        """Those that are up; the first one where none is."""
        up = [member.control for member in self._members if member.down is None]
        return up or [self._members[0].control]

    @property
    def pool(self) -> Pool | None:
        """Told which servers may be used; set by whoever routes, None where nobody does."""
        return self._routing.pool

    @pool.setter
    def pool(self, pool: Pool | None) -> None:
        self._routing.pool = pool

    @property
    def restarts(self) -> int:
        """How often a server was found to hold other weights than were pushed, and got them again."""
        return self._giving.restarts

    @property
    def repeated_loads(self) -> int:
        """How often a server got weights again: it was started again, or a load before did not end well.

        Whoever pushes proves by a probe that the server took them.
        """
        return self._giving.restarts + self._giving.repeated_loads

    def connect(self, deadline_s: float) -> None:
        """Wait for all servers and check that they can take weights, then watch over them.

        Raises:
            WeightSyncError: one did not answer in time, or lacks the routes.
        """
        deadline = time.monotonic() + deadline_s
        for member in self._members:
            member.control.wait_until_healthy(max(0.0, deadline - time.monotonic()))
            try:
                member.control.weight_version()
            except WeightSyncError as error:
                raise WeightSyncError(
                    f"the server at {member.control.root} has no weight routes, so it cannot be trained against "
                    f"({error}); use vf-serve, vf-vllm, or vLLM with VLLM_SERVER_DEV_MODE=1."
                ) from error
        self._closing.clear()
        self._watch.start()

    def route_through(self, pool: Pool) -> None:
        """Tell `pool` which servers may be used, and be told by it which ones failed."""
        self.pool = pool
        pool.on_down = lambda url, reason: self.look()

    def look(self) -> None:
        """Look after the servers now instead of within the next second."""
        self._watch.look()

    def close(self) -> None:
        """End the watch, and leave no server paused. May be called twice."""
        self._closing.set()
        # what was kept for a server that comes back is about to be removed
        self._current = None
        self._watch.end(FAREWELL_S)
        # the watch may still wait for a server that loads
        self._giving.take_leave(self._members)

    # -- pushing ------------------------------------------------------------------------------------------------

    def push(self, held: Held) -> None:
        """Bring every server that can be reached to these weights.

        A server that cannot be reached is left out, and gets them when it is back. Where none can be reached, they
        are waited for.

        Raises:
            WeightSyncError: a server refused, or none could be reached in time.
        """
        with contextlib.ExitStack() as stack:
            locked_by = time.monotonic() + self.timeout_s
            for member in self._members:
                stack.enter_context(locked(member, locked_by))
            # not before all are locked: the watch would give it to one of them while others still sample old weights
            before, self._current = self._current, held
            try:
                self._give_to_some(held)
            except BaseException as error:
                # a server that comes back must not get what was refused, or what a run that is stopped removes
                self._current = before
                if not isinstance(error, WeightSyncError):
                    raise
                raise WeightSyncError(
                    f"the weights of step {held.version} did not reach the rollout server: {error}"
                ) from error

    def _give_to_some(self, held: Held) -> None:
        def loaded() -> None:
            if self.on_version is not None:
                self.on_version(held.version)

        deadline = time.monotonic() + self.restart_timeout_s
        while not self._giving.give(self._reachable(), held, time.monotonic() + self.timeout_s, loaded):
            if time.monotonic() + _RETRY_S >= deadline:
                raise NoAnswerError(self._members[0].down or "it does not answer")
            time.sleep(_RETRY_S)

    def _reachable(self) -> list[Member]:
        """All but those that are down and do not answer."""
        down = [member for member in self._members if self._routing.is_down(member)]
        asked = down
        if len(down) < len(self._members) and self._watch.is_running:
            # the watch asks these every second and brings them back: the others need not wait for a host that is gone
            asked = [member for member in down if not member.is_silent]

        def ask(member: Member) -> None:
            member.control.request("GET", "/health", timeout_s=min(LOOK_S, self.timeout_s))

        left_out = set(down)
        for member, failure in zip(asked, at_once(asked, ask), strict=True):
            member.is_silent = failure is not None
            if failure is None:
                left_out.remove(member)
            else:
                member.down = member.down or str(failure)
        return [member for member in self._members if member not in left_out]

    # -- which weights a server has -----------------------------------------------------------------------------

    def holds_pushed_weights(self, url: str) -> bool:
        """Whether the server at `url` has weights that were pushed to it; asks it, from any thread."""
        root = ServerControl(url).root
        for member in self._members:
            if member.control.root == root and member.names:
                try:
                    # a server that loads weights answers when it has loaded them
                    return member.control.weight_version(self.timeout_s) in member.names
                except WeightSyncError:
                    return False
        return True

    def wait_until_held(self, url: str, timeout_s: float) -> bool:
        """Wait until the server at `url` is back with weights that were pushed; False where it was not in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._closing.is_set():
            self.look()
            if self.holds_pushed_weights(url):
                return True
            self._closing.wait(_RETRY_S)
        return False
