"""The rollout servers of a run: all get every push, and one that was started again gets it before it samples.

A push pauses every server, loads, forgets what was computed from old weights, names the version, and lets the
requests go on. What a server needs to get the newest version once more (`Held.load`) is kept, so that a thread
without torch can give it to a server that came back while the trainer trains or waits.

How a restart is noticed: by the version that a server reports. Pushed versions are numbers; a server that has just
started calls its weights something else. It is asked every second, whenever a request failed, and on every new
connection of the rollouts' client (`holds_pushed_weights`), for a server cannot have restarted without them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from verifiers.errors import WeightSyncError
from verifiers.train.weight_sync.server import NoAnswerError, RefusedError, ServerControl

__all__ = ["Fleet", "Held", "Pool"]

logger = logging.getLogger("verifiers.train")

T = TypeVar("T")
WATCH_INTERVAL_S = 1.0
_LOOK_S = 5.0
_RETRY_S = 0.25
# errors that a server, or a proxy before it, may not answer with a second time
_PASSING = frozenset({500, 502, 503, 504})
_TRIES = 3
# what a run that ends waits for a server that does not answer
_FAREWELL_S = 1.0


class Pool(Protocol):
    """Where rollouts are routed; `verifiers.rollouts.balancing.BalancedBackend` with `managed=True`."""

    on_down: Callable[[str, str], None] | None

    @property
    def urls(self) -> list[str]: ...

    def mark_down(self, url: str, reason: str) -> None: ...

    def mark_up(self, url: str) -> None: ...

    def down(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class Held:
    """Weights that every server is to hold.

    Attributes:
        version: the optimizer step they come from.
        load: makes a paused server load them; called with the server and the seconds left, from any thread, once
            or again. Raises WeightSyncError.
        repeatable: it may be called again where the server answered with an error.
    """

    version: int
    load: Callable[[ServerControl, float], None]
    repeatable: bool = True


@dataclass(slots=True)
class _Member:
    control: ServerControl
    lock: threading.Lock = field(default_factory=threading.Lock)
    # names that its weights may have now; none before the first push
    names: frozenset[str] = frozenset()
    down: str | None = None
    resets_cache: bool = True


class Fleet:
    """The servers of a run.

    Args:
        urls: their base URLs, with or without "/v1".
        timeout_s: deadline for one push to servers that answer, in seconds.

    Attributes:
        restart_timeout_s: how long a push waits where no server can be reached, in seconds; `timeout_s` until set.
        pool: told which servers may be used; set by whoever routes, None where nobody does.
        on_version: called with the version when all servers have it, before requests in flight go on.
        restarts: how often a server was found to hold other weights than were pushed, and got them again.
    """

    def __init__(self, urls: Sequence[str], api_key: str = "EMPTY", timeout_s: float = 120.0) -> None:
        self.timeout_s = timeout_s
        self.restart_timeout_s = timeout_s
        self._members = [_Member(ServerControl(url, api_key, timeout_s)) for url in urls]
        self._current: Held | None = None
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.pool: Pool | None = None
        self.on_version: Callable[[int], None] | None = None
        self.restarts = 0

    @property
    def servers(self) -> list[ServerControl]:
        """Those that are up; the first one where none is."""
        up = [member.control for member in self._members if member.down is None]
        return up or [self._members[0].control]

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
        if self._thread is None:
            self._closing.clear()
            self._thread = threading.Thread(target=self._watch, name="verifiers-fleet", daemon=True)
            self._thread.start()

    def route_through(self, pool: Pool) -> None:
        """Tell `pool` which servers may be used, and be told by it which ones failed."""
        self.pool = pool
        pool.on_down = lambda url, reason: self.look()

    def look(self) -> None:
        """Look after the servers now instead of within the next second."""
        self._wake.set()

    def close(self) -> None:
        """End the watch. May be called twice."""
        self._closing.set()
        self._wake.set()
        # what was kept for a server that comes back is about to be removed
        self._current = None
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_FAREWELL_S)

    # -- pushing ------------------------------------------------------------------------------------------------

    def push(self, held: Held) -> None:
        """Bring every server that can be reached to these weights.

        A server that cannot be reached is left out, and gets them when it is back. Where none can be reached, they
        are waited for.

        Raises:
            WeightSyncError: a server refused, or none could be reached in time.
        """
        before, self._current = self._current, held
        with contextlib.ExitStack() as stack:
            locked_by = time.monotonic() + self.timeout_s
            for member in self._members:
                stack.enter_context(_locked(member, locked_by))
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
        deadline = time.monotonic() + self.restart_timeout_s
        while not self._give(self._members, held, time.monotonic() + self.timeout_s):
            if time.monotonic() + _RETRY_S >= deadline:
                raise NoAnswerError(self._members[0].down or "it does not answer")
            time.sleep(_RETRY_S)

    def _give(self, members: Sequence[_Member], held: Held, deadline: float) -> list[_Member]:
        """The members that hold the weights now; the others do not answer. All stages end on all of them first.

        Raises:
            WeightSyncError: one refused, or was too slow.
        """
        reached = list(members)
        try:
            reached = self._on_each(reached, lambda m: _ask(m, "/pause?mode=keep", deadline))
            reached = self._on_each(reached, lambda m: self._load(m, held, deadline))
            if reached and self.on_version is not None:
                self.on_version(held.version)
            reached = self._on_each(reached, lambda m: _ask(m, "/resume", deadline))
        except BaseException:
            # also where the run is stopped: a server that stays paused answers nobody. The first failure is the one
            # to report
            farewell = time.monotonic() + _FAREWELL_S
            list(_at_once(members, lambda m: _ask(m, "/resume", farewell)))
            raise
        for member in reached:
            self._mark_up(member)
        return reached

    def _load(self, member: _Member, held: Held, deadline: float) -> None:
        name = str(held.version)
        if member.names:
            if member.control.weight_version(_LOOK_S) not in member.names:
                self.restarts += 1
            # the embedded server marks weights that were loaded and not yet named
            member.names |= {name} | {f"{old}+reload" for old in member.names}
        tries = _TRIES if held.repeatable else 1
        _insist(lambda: held.load(member.control, max(0.1, deadline - time.monotonic())), deadline, tries)
        if member.resets_cache:
            self._reset_cache(member, deadline)
        _ask(member, "/update_weight_version", deadline, {"new_version": name})
        member.names = frozenset({name})

    def _reset_cache(self, member: _Member, deadline: float) -> None:
        try:
            # requests in flight compute their keys and values anew, under the new weights
            answer = _ask(member, "/reset_prefix_cache?reset_running_requests=true", deadline)
        except RefusedError as error:
            if error.status != 404:
                raise
            # the embedded server does so by itself
            member.resets_cache = False
            return
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightSyncError(f"{member.control.root} did not give up keys and values of the old weights.")

    def _on_each(self, members: Sequence[_Member], work: Callable[[_Member], object]) -> list[_Member]:
        """Do something on all members at once; those that answered. Raises the first refusal, after all are done."""
        failures = list(_at_once(members, work))
        reached = []
        for member, failure in zip(members, failures, strict=True):
            if failure is None:
                reached.append(member)
            elif isinstance(failure, NoAnswerError) and not failure.timed_out:
                self._mark_down(member, str(failure))
            else:
                raise failure
        return reached

    # -- watching -------------------------------------------------------------------------------------------------

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

    def _watch(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(WATCH_INTERVAL_S)
            self._wake.clear()
            for member in self._members:
                if self._closing.is_set():
                    return
                try:
                    self._look_after(member)
                except WeightSyncError as error:
                    logger.warning("%s could not be brought back yet: %s", member.control.root, error)

    def _look_after(self, member: _Member) -> None:
        # a push that is under way finds out by itself
        if self._current is None or not member.lock.acquire(blocking=False):
            return
        try:
            held = self._current
            assert held is not None
            try:
                if self._is_down(member):
                    member.control.request("GET", "/health", timeout_s=_LOOK_S)
                name = member.control.weight_version(_LOOK_S)
            except NoAnswerError as error:
                if not error.timed_out:
                    self._mark_down(member, str(error))
                return
            if name != str(held.version):
                self._mark_down(member, f"it holds weights {name!r} where {held.version} was pushed")
                if not self._give([member], held, time.monotonic() + self.timeout_s):
                    return
                logger.warning("%s was given the weights of step %d again", member.control.root, held.version)
            self._mark_up(member)
        finally:
            member.lock.release()

    def _is_down(self, member: _Member) -> bool:
        return member.down is not None or (self.pool is not None and member.control.url in self.pool.down())

    def _mark_down(self, member: _Member, reason: str) -> None:
        if member.down is None:
            logger.warning("rollout server %s: %s", member.control.root, reason)
        member.down = reason
        if self.pool is not None and member.control.url in self.pool.urls:
            self.pool.mark_down(member.control.url, reason)

    def _mark_up(self, member: _Member) -> None:
        member.down = None
        if self.pool is not None and member.control.url in self.pool.down():
            self.pool.mark_up(member.control.url)


def _ask(member: _Member, path: str, deadline: float, body: object = None) -> object:
    def ask() -> object:
        left = deadline - time.monotonic()
        if left <= 0:
            raise NoAnswerError(f"no time was left for POST {member.control.root}{path}", timed_out=True)
        return member.control.request("POST", path, {} if body is None else body, timeout_s=left)

    return _insist(ask, deadline)


def _insist(work: Callable[[], T], deadline: float, tries: int = _TRIES) -> T:
    """What `work` gives; asked again where the server answered with an error that may pass."""
    for left in reversed(range(tries)):
        try:
            return work()
        except RefusedError as error:
            if not left or error.status not in _PASSING or time.monotonic() + _RETRY_S >= deadline:
                raise
            logger.warning("%s; it is asked again", error)
            time.sleep(_RETRY_S)
    raise AssertionError("the last try returns or raises")


def _at_once(members: Sequence[_Member], work: Callable[[_Member], object]) -> Iterator[WeightSyncError | None]:
    def attempt(member: _Member) -> WeightSyncError | None:
        try:
            work(member)
        except WeightSyncError as error:
            return error
        return None

    if len(members) < 2:
        yield from map(attempt, members)
        return
    with ThreadPoolExecutor(len(members), thread_name_prefix="verifiers-push") as threads:
        yield from threads.map(attempt, members)


@contextlib.contextmanager
def _locked(member: _Member, deadline: float) -> Iterator[None]:
    if not member.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise WeightSyncError(
            f"{member.control.root} was asked for its version, or given earlier weights; that got no answer by the "
            "deadline (weight_sync_timeout)."
        )
    try:
        yield
    finally:
        member.lock.release()
