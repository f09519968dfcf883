"""Bringing rollout servers to given weights: pause, load, forget, name, go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from verifiers.errors import WeightSyncError
from verifiers.train.weight_sync.members import Held, Member, Routing, at_once, insist, time_left
from verifiers.train.weight_sync.server import NoAnswerError, RefusedError

__all__ = ["FAREWELL_S", "HALF_LOADED", "Giving"]

logger = logging.getLogger("verifiers.train")

FAREWELL_S = 1.0
"""What a run that ends waits for a server that does not answer."""

HALF_LOADED = "half-loaded"
"""Name of weights whose load did not end well; who pushes next, in whatever process, must load twice."""


class Giving:
    """How members get weights.

    Args:
        routing: told which members do not answer, and which hold the weights.
        ending: set where the run ends.

    Attributes:
        restarts: how often a server was found to hold other weights than were pushed, and got them again.
        repeated_loads: how often weights were loaded twice because the load before did not end well.
    """

    def __init__(self, routing: Routing, ending: threading.Event) -> None:
        self._routing = routing
        self._ending = ending
        self.restarts = 0
        self.repeated_loads = 0

    def give(
        self, members: Sequence[Member], held: Held, deadline: float, loaded: Callable[[], None] | None = None
    ) -> list[Member]:
        """The members that hold the weights now; the others do not answer. All stages end on all of them first.

        Their locks are held by the caller.

        Args:
            loaded: called when all have the weights, before requests in flight go on.

        Raises:
            WeightSyncError: one refused, or was too slow.
        """
        reached = list(members)
        try:
            reached = self._on_each(reached, lambda member: self._pause(member, deadline))
            reached = self._on_each(reached, lambda member: self._load(member, held, deadline))
            if reached and loaded is not None:
                loaded()
            reached = self._on_each(reached, lambda member: self.resume(member, deadline))
        except BaseException:
            # also where the run is stopped: a server that stays paused answers nobody. The first failure is the one
            # to report
            self.take_leave(members)
            raise
        for member in reached:
            self._routing.mark_up(member)
        return reached

    def resume(self, member: Member, deadline: float) -> None:
        """Let a member's requests go on."""
        self._ask(member, "/resume", deadline)
        member.is_paused = False

    def take_leave(self, members: Sequence[Member]) -> None:
        """Let all go on that may be paused, and say which weights are not whole; who does not answer is left."""
        deadline = time.monotonic() + FAREWELL_S
        named_by = deadline - FAREWELL_S / 2

        def leave(member: Member) -> None:
            try:
                if member.is_torn:
                    self._ask(member, "/update_weight_version", named_by, {"new_version": HALF_LOADED})
            finally:
                self.resume(member, deadline)

        at_once([member for member in members if member.is_paused], leave)

    def _pause(self, member: Member, deadline: float) -> None:
        member.is_paused = True
        self._ask(member, "/pause?mode=keep", deadline)

    def _load(self, member: Member, held: Held, deadline: float) -> None:
        name = str(held.version)
        control = member.control
        found = insist(control, lambda: control.weight_version(time_left(deadline)), deadline, self._ending)
        if found == HALF_LOADED:
            member.is_torn = True
        elif member.names and found not in member.names:
            self.restarts += 1
        if member.names:
            # the embedded server marks weights that were loaded and not yet named
            member.names |= {name} | {f"{old}+reload" for old in member.names}

        def load() -> None:
            was_torn, member.is_torn = member.is_torn, True
            held.load(control, time_left(deadline))
            if was_torn:
                # vLLM keeps the tensors of a layer whose load broke off, and closes it too early in the next load,
                # without an error; the load after that is whole
                logger.warning("%s loads the weights twice, for the load before did not end well", control.root)
                held.load(control, time_left(deadline))
                self.repeated_loads += 1
            member.is_torn = False

        insist(control, load, deadline, self._ending, is_repeatable=held.repeatable)
        if member.resets_cache:
            self._reset_cache(member, deadline)
        self._ask(member, "/update_weight_version", deadline, {"new_version": name})
        member.names = frozenset({name})

    def _reset_cache(self, member: Member, deadline: float) -> None:
        try:
            # requests in flight compute their keys and values anew, under the new weights
            answer = self._ask(member, "/reset_prefix_cache?reset_running_requests=true", deadline)
        except RefusedError as error:
            if error.status != 404:
                raise
            # the embedded server does so by itself
            member.resets_cache = False
            return
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightSyncError(f"{member.control.root} did not give up keys and values of the old weights.")

    def _on_each(self, members: Sequence[Member], work: Callable[[Member], object]) -> list[Member]:
        """Do something on all members at once; those that answered. Raises the first refusal, after all are done."""
        reached = []
        for member, failure in zip(members, at_once(members, work), strict=True):
            if failure is None:
                reached.append(member)
            elif isinstance(failure, NoAnswerError) and not failure.timed_out:
                self._routing.mark_down(member, str(failure))
            else:
                raise failure
        return reached

    def _ask(self, member: Member, path: str, deadline: float, body: object = None) -> object:
        def ask() -> object:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NoAnswerError(f"no time was left for POST {member.control.root}{path}", timed_out=True)
            return member.control.request("POST", path, {} if body is None else body, timeout_s=left)

        return insist(member.control, ask, deadline, self._ending)
