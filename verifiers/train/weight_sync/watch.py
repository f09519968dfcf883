"""Looking after the rollout servers between pushes: one that was started again gets the newest weights.

How a restart is noticed: by the version that a server reports. Pushed versions are numbers; a server that has just
started calls its weights something else. It is asked every second, and whenever a request failed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from verifiers.train.weight_sync.giving import Giving
from verifiers.train.weight_sync.members import LOOK_S, Held, Member, Routing
from verifiers.train.weight_sync.server import NoAnswerError

__all__ = ["WATCH_INTERVAL_S", "Watch"]

logger = logging.getLogger("verifiers.train")

WATCH_INTERVAL_S = 1.0


class Watch:
    """A thread without torch, beside the trainer that trains or waits.

    Args:
        members: all servers of the run.
        newest: what they are to hold, None where nothing was pushed; asked with a member's lock held, so that it
            cannot change while the member gets it.
        ending: set where the run ends.
        timeout_s: deadline for giving weights to one server, in seconds.
    """

    def __init__(
        self,
        members: Sequence[Member],
        routing: Routing,
        giving: Giving,
        newest: Callable[[], Held | None],
        ending: threading.Event,
        timeout_s: float,
    ) -> None:
        self._members = members
        self._routing = routing
        self._giving = giving
        self._newest = newest
        self._ending = ending
        self._timeout_s = timeout_s
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether somebody looks."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to look; again after `end`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="verifiers-fleet", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Look now instead of within the next second."""
        self._wake.set()

    def end(self, within_s: float) -> None:
        """Wait so long for the thread, which ends by itself where `ending` is set. May be called twice."""
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=within_s)

    def _run(self) -> None:
        while not self._ending.is_set():
            self._wake.wait(WATCH_INTERVAL_S)
            self._wake.clear()
            for member in self._members:
                if self._ending.is_set():
                    return
                try:
                    self.look_after(member)
                except Exception as error:
                    # whatever a server answers: without this thread none would come back
                    logger.warning("%s could not be brought back yet: %s", member.control.root, error)

    def look_after(self, member: Member) -> None:
        """Give the newest weights to a member that holds others, and use it again where it answers.

        Raises:
            WeightSyncError: it refused.
        """
        # without its lock: a push to the others would wait as long as the question to a host that is gone
        if self._routing.is_down(member) and not member.control.is_healthy(LOOK_S):
            member.is_silent = True
            return
        # a push that is under way finds out by itself
        if not member.lock.acquire(blocking=False):
            return
        try:
            held = self._newest()
            if held is not None:
                self._bring_back(member, held)
        finally:
            member.lock.release()

    def _bring_back(self, member: Member, held: Held) -> None:
        control = member.control
        try:
            if self._routing.is_down(member):
                control.request("GET", "/health", timeout_s=LOOK_S)
            name = control.weight_version(LOOK_S)
        except NoAnswerError as error:
            member.is_silent = True
            if not error.timed_out:
                self._routing.mark_down(member, str(error))
            return
        member.is_silent = False
        deadline = time.monotonic() + self._timeout_s
        if name != str(held.version):
            self._routing.mark_down(member, f"it holds weights {name!r} where {held.version} was pushed")
            if not self._giving.give([member], held, deadline):
                return
            logger.warning("%s was given the weights of step %d again", control.root, held.version)
        elif member.is_paused:
            # it did not answer at the end of a push
            self._giving.resume(member, deadline)
        self._routing.mark_up(member)
