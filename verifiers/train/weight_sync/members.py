"""The rollout servers of a run one by one: what each holds, whether rollouts may go to it, how it is asked."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from verifiers.errors import WeightSyncError
from verifiers.train.weight_sync.server import NoAnswerError, RefusedError, ServerControl

__all__ = ["LOOK_S", "Held", "Member", "Pool", "Routing", "at_once", "begin", "insist", "locked", "time_left"]

logger = logging.getLogger("verifiers.train")

T = TypeVar("T")
LOOK_S = 5.0
"""How long a question is given that every server answers at once."""

# errors that a server, or a proxy before it, may not answer with a second time
_PASSING = frozenset({500, 502, 503, 504})
_WAITS_S = (0.25, 1.0, 4.0)


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


@dataclass(slots=True, eq=False)
class Member:
    """One server.

    Attributes:
        lock: held by whoever gives it weights.
        names: that its weights may have now; none before the first push.
        down: why nothing is asked of it, None where it is up.
        is_silent: it did not answer when it was last looked after.
        is_paused: it was told to pause, and not yet told to go on.
        is_torn: its last load did not end well, so that the next one may mix tensors of both.
        resets_cache: it has the route for that.
    """

    control: ServerControl
    lock: threading.Lock = field(default_factory=threading.Lock)
    names: frozenset[str] = frozenset()
    down: str | None = None
    is_silent: bool = False
    is_paused: bool = False
    is_torn: bool = False
    resets_cache: bool = True


class Pool(Protocol):
    """Where rollouts are routed; `verifiers.rollouts.balancing.BalancedBackend` with `managed=True`."""

    on_down: Callable[[str, str], None] | None

    @property
    def urls(self) -> list[str]: ...

    def mark_down(self, url: str, reason: str) -> None: ...

    def mark_up(self, url: str) -> None: ...

    def down(self) -> dict[str, str]: ...


class Routing:
    """Which members rollouts may go to.

    Attributes:
        pool: told of it; None where nobody routes.
    """

    def __init__(self) -> None:
        self.pool: Pool | None = None

    def is_down(self, member: Member) -> bool:
        """Whether it was left out, here or by the pool."""
        return member.down is not None or (self.pool is not None and member.control.url in self.pool.down())

    def mark_down(self, member: Member, reason: str) -> None:
        """Nothing may go there."""
        if member.down is None:
            logger.warning("rollout server %s: %s", member.control.root, reason)
        member.down = reason
        if self.pool is not None and member.control.url in self.pool.urls:
            self.pool.mark_down(member.control.url, reason)

    def mark_up(self, member: Member) -> None:
        """It holds the pushed weights and answers."""
        member.down = None
        member.is_silent = False
        if self.pool is not None and member.control.url in self.pool.down():
            self.pool.mark_up(member.control.url)


def insist(
    control: ServerControl,
    work: Callable[[], T],
    deadline: float,
    ending: threading.Event,
    *,
    is_repeatable: bool = True,
) -> T:
    """What `work` gives; done again, after longer and longer waits, where the server's error may pass.

    Args:
        deadline: of time.monotonic; no wait goes past it.
        ending: set where the run ends, which nothing is repeated for.

    Raises:
        NoAnswerError: it answered with such an error because what does the work behind its routes is gone.
        WeightSyncError: what `work` raised.
    """
    waits = iter(_WAITS_S if is_repeatable else ())
    while True:
        try:
            return work()
        except RefusedError as error:
            if error.status not in _PASSING:
                raise
            if not control.is_healthy(min(LOOK_S, time_left(deadline))):
                raise NoAnswerError(f"{error}; and {control.root}/health does not answer 200") from error
            wait_s = next(waits, None)
            if wait_s is None or time.monotonic() + wait_s >= deadline or ending.wait(wait_s):
                raise
            logger.warning("%s; it is asked again", error)


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """What `work` will give, in a thread of that name which the process does not wait for when it ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            # raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def at_once(members: Sequence[Member], work: Callable[[Member], object]) -> list[WeightSyncError | None]:
    """Do something on all members together; gives what each raised.

    Nobody who is interrupted meanwhile waits for their answers.
    """

    def attempt(member: Member) -> WeightSyncError | None:
        try:
            work(member)
        except WeightSyncError as error:
            return error
        return None

    if len(members) < 2:
        return [attempt(member) for member in members]
    begun = [begin(functools.partial(attempt, member), "verifiers-push") for member in members]
    # all of them, before one that raised something else is told
    wait(begun)
    return [future.result() for future in begun]


@contextlib.contextmanager
def locked(member: Member, deadline: float) -> Iterator[None]:
    """Nobody else gives weights to the member meanwhile; raises WeightSyncError where somebody still does."""
    if not member.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise WeightSyncError(
            f"{member.control.root} was asked for its version, or given earlier weights; that got no answer by the "
            "deadline (weight_sync_timeout)."
        )
    try:
        yield
    finally:
        member.lock.release()


def time_left(deadline: float) -> float:
    """Seconds until a deadline of time.monotonic; a little where it is past."""
    return max(0.1, deadline - time.monotonic())
