"""Every rank ends when one of them does: whoever fails tells the others, and each is got out of what it waits in."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import queue
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable

from verifiers.errors import RankError
from verifiers.train.rank_links import Links, RankFailure
from verifiers.train.rank_wake import Signals, break_collectives, came_from_collective
from verifiers.train.termination import Ending

__all__ = ["RankWatch"]

_WAKE_AFTER_S = 0.3
"""What is still waiting then is inside a collective, or computes."""
_LEAVE_AFTER_S = 3.5
_CLOSED_AFTER_S = 4.2
"""As `_LEAVE_AFTER_S`, for one that has got out and closes what it holds."""
_GIVE_BACK_WITHIN_S = 0.6
_GONE_AFTER_S = 4.9
_LINGER_S = 2.0
_LEAVE_AT_EXIT_S = 8.0


class RankWatch:
    """Tells the other ranks of this one's failure, and this one of theirs.

    A thread listens on the lines between the ranks, and to the signals of this process. When another rank fails or
    vanishes, it raises RankError in the main thread; where that is inside a collective, it breaks the collective;
    where neither helps within seconds, it calls `give_back` and ends the process with the sentence.

    Args:
        links: the lines to the other ranks.
        ranks: how many there are.
        give_back: gives back what other processes would miss, and notes the cause; called only where the main thread
            cannot.

    Attributes:
        ending: what SIGINT and SIGTERM do.
    """

    def __init__(self, links: Links, ranks: int, give_back: Callable[[BaseException], None]) -> None:
        self._links, self._ranks, self._give_back = links, ranks, give_back
        self.ending = Ending()
        self._heard: RankFailure | None = None
        self._was_heard = threading.Event()
        self._pressed_since: float | None = None
        self._has_failed = False
        self._was_forced = False
        self._is_over = False
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._signals = Signals(self._raise_heard, self.ending)
        links.on_failure = self._hear
        links.selector.register(self._signals.readable, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="verifiers-ranks", daemon=True)
        self._thread.start()

    def conclude(self, error: BaseException) -> BaseException:
        """Tell the others of this rank's failure.

        Returns:
            What is to be raised: `error`, or where it only follows from another rank's failure, that one's.
        """
        self.ending.begin()
        atexit.register(_exit_after, _LEAVE_AT_EXIT_S)
        if isinstance(error, Exception) and came_from_collective(error):
            # the connection of a rank that dies may break before the word of it has come
            self._was_heard.wait(1.0)
        self._has_failed = True
        if isinstance(error, RankError):
            return error
        if self._heard is not None and isinstance(error, Exception):
            cause = _rank_error(self._heard)
            cause.__cause__ = error
            return cause
        failure = _failure_of(self._links.rank, error)
        self._do(lambda: self._links.say_failure(failure))
        return error

    def end(self) -> None:
        """This rank is done with the others."""
        self.ending.begin()
        if self._has_failed:
            # the main thread is out of everything
            self._pressed_since = None
            faulthandler.cancel_dump_traceback_later()
        deadline = time.monotonic() + _LINGER_S
        # rank 0's output is where people look, and a launcher ends every rank once one has ended
        awaited = set(range(1, self._ranks)) if self._links.rank == 0 else {0}
        if self._heard is not None:
            awaited.discard(self._heard.rank)
        self._do(self._links.say_ended)
        while self._has_failed and not awaited <= self._links.ended and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._has_failed:
            # what is still under way in torch's threads would be waited for when the interpreter ends
            break_collectives()
        self._is_over = True
        self._signals.nudge()
        self._thread.join(timeout=1.0)
        if self._was_forced:
            faulthandler.cancel_dump_traceback_later()
        if not self._thread.is_alive():
            self._signals.close()
            self._links.close()

    # -- in the thread --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._is_over:
            for key, _ in self._links.selector.select(0.05 if self._pressed_since is not None else None):
                if key.fileobj != self._signals.readable:
                    self._links.handle(key.fileobj)
                elif self._signals.read() and self._pressed_since is None:
                    # does the main thread get to run the signal's handler?
                    self._pressed_since = time.monotonic()
                    self._signals.wake()
            while not self._tasks.empty():
                self._tasks.get()()
            self._press()

    def _hear(self, failure: RankFailure) -> None:
        if self._heard is not None or self._has_failed:
            return
        self._heard, self._pressed_since = failure, time.monotonic()
        self._was_heard.set()
        if not failure.traceback:
            # told at once: a launcher that sees a rank vanish ends the others within a tenth of a second
            os.write(2, f"rank {self._links.rank}: {failure.sentence}\n".encode())
        self._signals.wake()

    def _press(self) -> None:
        """Get the main thread out of what it is in, harder the longer it takes."""
        if self._pressed_since is None:
            return
        if self._heard is None and self._signals.answered:
            self._pressed_since = None
            return
        waited_s = time.monotonic() - self._pressed_since
        if not self._was_forced and waited_s > _WAKE_AFTER_S:
            self._was_forced = True
            _exit_after(_GONE_AFTER_S - waited_s)
            if not self._has_failed:
                break_collectives()
        if waited_s > (_CLOSED_AFTER_S if self._has_failed else _LEAVE_AFTER_S):
            self._leave()

    def _leave(self) -> None:
        """End this process without its main thread."""
        heard = self._heard
        if heard is None:
            heard = RankFailure(self._links.rank, "ended by a signal")
            self._links.say_failure(heard)
        text = f"rank {self._links.rank} ends amid other code, which did not return; {heard.sentence}\n"
        os.write(2, (heard.traceback + text).encode())
        error = _rank_error(heard)
        giving = threading.Thread(target=self._give_back, args=(error,), name="verifiers-closing", daemon=True)
        giving.start()
        giving.join(timeout=_GIVE_BACK_WITHIN_S)
        os._exit(1)

    # -- in the main thread ---------------------------------------------------------------------------------------

    def _raise_heard(self) -> None:
        heard = self._heard
        if heard is not None and not self.ending.has_begun:
            self.ending.begin()
            raise _rank_error(heard)

    def _do(self, task: Callable[[], None]) -> None:
        """Have the thread do something on the lines; returns when it is done, after at most a second."""
        done = threading.Event()

        def work() -> None:
            task()
            done.set()

        self._tasks.put(work)
        self._signals.nudge()
        done.wait(1.0)


def _failure_of(rank: int, error: BaseException) -> RankFailure:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return RankFailure(rank, text, "".join(traceback.format_exception(error)))


def _rank_error(failure: RankFailure) -> RankError:
    error = RankError(failure.sentence)
    if failure.traceback:
        error.add_note(f"On rank {failure.rank}:\n{failure.traceback}")
    return error


def _exit_after(seconds: float) -> None:
    """End this process then, also where some code holds the interpreter's lock; tells where it stood."""
    output = sys.__stderr__
    # a standard error that is no file cannot be written to without the lock
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        if output is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=output)
