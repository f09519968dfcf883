"""The end of a run: by an error, by a signal, or because another rank failed.

The launcher (torchrun, accelerate launch) supervises the ranks: once one has ended with an error, it sends SIGTERM to
the others. That ends a rank above 0 wherever it is, also inside a collective; rank 0 closes the run first.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import itertools
import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from verifiers.errors import RankError
from verifiers.train.processes.distributed import error_text
from verifiers.watchdog import exit_if_signal_is_unhandled

__all__ = ["Termination", "end_together", "ended_by_signals", "recorded"]

T = TypeVar("T")


def end_together(
    accelerator: Any,
    work: Callable[[], T],
    close: Callable[[], None],
    *,
    monitored: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    give_back: Callable[[BaseException], None] = lambda error: None,
) -> T:
    """Run this rank's part of a run, and then `close`, whatever ends it.

    Every rank must call it. Where one of several ranks fails, its own error is raised there; rank 0 raises RankError
    with the same text, and the launcher ends the rest.

    Args:
        accelerator: accelerate's Accelerator or PartialState.
        work: the part of this rank.
        close: gives back what this rank holds.
        monitored: makes a context that is left after `close`, with what ended the run.
        give_back: releases shared resources (paused servers, pushed weights); called with what ended the run, in
            another thread, where a signal finds rank 0 inside a call that does not return.

    Raises:
        RankError: another rank failed first.
    """
    several = accelerator.num_processes > 1
    if several and not accelerator.is_main_process:
        signals = _killed_by_signals()
    else:
        signals = ended_by_signals(give_back if several else None)
    failures = _FirstFailure(accelerator.process_index) if several else None
    with signals as termination:
        with monitored():
            try:
                result = work()
                if several:
                    # a rank that fails after this one is done must still end the run
                    accelerator.wait_for_everyone()
            except BaseException as error:
                # the launcher's SIGTERM may come while the cause is looked up, and must not take its place
                termination.begin()
                cause = failures.cause_of(error) if failures is not None else error
                if cause is error:
                    raise
                raise cause from error
            finally:
                try:
                    termination.begin()
                finally:
                    # also where a signal came just before
                    close()
                    if failures is not None and failures.is_unexplained:
                        time.sleep(_LAUNCHER_POLLS_S)
        termination.raise_waiting()
    return result


def recorded(main: Callable[[], T]) -> T:
    """Call a program's main function; under torchrun its exception reaches torchrun's report, with traceback."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return main()
    from torch.distributed.elastic.multiprocessing.errors import record

    result: Any = record(main)()
    return result


_STORE_TIMEOUT_S = 5.0
_TRACEBACK_CHARACTERS = 2**13

_LAUNCHER_S = 3.0
"""Seconds that a rank above 0 which follows another rank's failure waits to be ended by the launcher.

Otherwise the launcher's report could name this rank as the first that failed.
"""

_LAUNCHER_POLLS_S = 0.5
"""Seconds that rank 0 outlasts a rank that was killed, so that torchrun, which polls every 0.1 s, names that rank."""

_EXIT_S = 2.0
"""Seconds that the interpreter may take to exit after a failure: it would wait for collectives that cannot end."""

_run_number = itertools.count()


class _FirstFailure:
    """The first failure of a run, kept in the store at which torch's ranks met, so that rank 0 can name it.

    Args:
        rank: the rank of this process.

    Attributes:
        is_unexplained: another rank has gone and left no error behind.
    """

    def __init__(self, rank: int) -> None:
        from torch.distributed import DistError, TCPStore

        self.is_unexplained = False
        self._rank = rank
        # the ranks make their runs in the same order
        self._key = f"verifiers/failure/{next(_run_number)}"
        self._store: Any = None
        with contextlib.suppress(KeyError, ValueError, DistError):
            self._store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=datetime.timedelta(seconds=_STORE_TIMEOUT_S),
            )

    def cause_of(self, error: BaseException) -> BaseException:
        """Return what to raise for an error of this rank: the error itself, or RankError where another was first."""
        atexit.register(_exit_within, _EXIT_S)
        follows = isinstance(error, RankError) or _broke_off(error)
        first = self._exchange(None if follows or _is_by_signal(error) else error)
        is_of_other = first is not None and first["rank"] != self._rank
        cause = error
        if first is not None and is_of_other and not isinstance(error, (RankError, KeyboardInterrupt)):
            cause = RankError(f"rank {first['rank']} stopped: {first['text']}")
            cause.add_note(f"On rank {first['rank']}:\n{first['traceback']}")
        elif _broke_off(error):
            self.is_unexplained = True
            cause = RankError(
                "another rank ended without an error of its own, so it was killed (out of memory?), crashed, or lost "
                f"its host; the launcher's report names it ({error_text(error)})."
            )
        if self._rank and isinstance(cause, RankError):
            time.sleep(_LAUNCHER_S)
        return cause

    def _exchange(self, error: BaseException | None) -> dict[str, Any] | None:
        """Write a failure down unless there is one; return the first."""
        if self._store is None:
            return None
        try:
            if error is not None:
                text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
                own = {"rank": self._rank, "text": error_text(error)[:_TRACEBACK_CHARACTERS], "traceback": text}
                first = self._store.compare_set(self._key, "", json.dumps(own))
            elif self._store.check([self._key]):
                first = self._store.get(self._key)
            else:
                return None
        except RuntimeError:
            # the host of the store is lost
            return None
        found: dict[str, Any] = json.loads(first)
        return found


def _broke_off(error: BaseException) -> bool:
    """Return whether a collective raised an error because another rank has gone."""
    from torch.distributed import DistError

    text = str(error)
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text))


def _is_by_signal(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and error.code == _BY_SIGTERM)


def _exit_within(seconds: float) -> None:
    """End this process after `seconds`, also where other code holds the interpreter's lock."""
    # not closed: the file is written to when the time is over
    faulthandler.dump_traceback_later(seconds, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115


# -- signals -------------------------------------------------------------------------------------------------------

_ENDS_WITHIN_S = 6.0
"""Seconds in which a run that is being ended has ended; signals wait meanwhile."""

_HANDLED_WITHIN_S = 1.5
"""Seconds after which a signal that the main thread has not handled finds it inside a call that does not return."""

_GIVE_BACK_WITHIN_S = 0.6

_HELD = (
    "a signal arrived, and a function of one of these threads keeps Python from handling it (a regular expression "
    "that tries too many ways?), so the process is killed. The run resumes from its newest checkpoint."
)

# SystemExit with a string prints it and exits with 1
_BY_SIGTERM = "ended by SIGTERM"

_HANDLED_OVER = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""The handlers that are replaced; a caller's own handlers stay."""


class Termination:
    """The state of a run that signals end: the first raises, those of the next seconds wait until all is given back.

    SIGINT raises KeyboardInterrupt and SIGTERM, which schedulers and launchers send before they kill, SystemExit. An
    impatient second Ctrl-C would otherwise leave a server paused, or pushed weights in memory.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._waiting: int | None = None

    @property
    def has_begun(self) -> bool:
        """True while the run is being ended."""
        return self._since is not None

    def begin(self) -> None:
        """Hold back further signals: the run is being ended, for whatever reason."""
        if self._since is None:
            self._since = time.monotonic()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT or SIGTERM."""
        now = time.monotonic()
        if self._since is not None and now - self._since < _ENDS_WITHIN_S:
            self._waiting = number
            return
        self._since = now
        _raise(number)

    def raise_waiting(self) -> None:
        """Raise what waited, at the end of a run that ended well: its caller is to end, too."""
        number, self._waiting = self._waiting, None
        if number is not None:
            _raise(number)


@contextlib.contextmanager
def ended_by_signals(give_back: Callable[[BaseException], None] | None = None) -> Iterator[Termination]:
    """Handle SIGINT and SIGTERM as `Termination` says, while this is open.

    It does nothing in other threads than the main one, which get no signals.

    Args:
        give_back: called with SystemExit before the process is ended, where the main thread does not handle a signal
            because it is inside a collective that does not end; None leaves the process as it is then.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return
    before = {number: handler for number, handler in _HANDLED_OVER.items() if signal.getsignal(number) is handler}
    for number in before:
        signal.signal(number, termination.handle)
    try:
        with contextlib.ExitStack() as guards:
            if before:
                guards.enter_context(exit_if_signal_is_unhandled(_HELD, tuple(before)))
            if give_back is not None:
                guards.enter_context(_ended_if_stuck(termination, give_back))
            yield termination
    except BaseException:
        if give_back is not None:
            # the launcher's SIGTERM is on its way, and must not cut off what is still to be said of the error
            before.clear()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _killed_by_signals() -> Iterator[Termination]:
    """Make SIGINT kill this process, as SIGTERM does: a rank above 0 holds nothing that would be missed."""
    is_replaced = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if is_replaced:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield Termination()
    finally:
        if is_replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def _ended_if_stuck(termination: Termination, give_back: Callable[[BaseException], None]) -> Iterator[None]:
    """End this process from another thread where the main thread does not come to handle a signal.

    Python runs a handler only between two steps of the main thread's own code. The C code behind it writes each
    signal to a pipe at once.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)

    def watch() -> None:
        deadline: float | None = None
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([readable], [], [], left_s)[0]:
                if not termination.has_begun:
                    _end_process(give_back)
                deadline = None
                continue
            number = os.read(readable, 1)[0]
            # 0 is not a signal, and ends the thread
            if number == 0:
                return
            if number in _HANDLED_OVER and deadline is None:
                deadline = time.monotonic() + _HANDLED_WITHIN_S

    fd_before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    thread = threading.Thread(target=watch, name="verifiers-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        os.write(writable, b"\0")
        thread.join()
        os.close(readable)
        os.close(writable)


def _end_process(give_back: Callable[[BaseException], None]) -> None:
    os.write(2, b"a signal ends this process, whose main thread is inside a call that does not return.\n")
    error = SystemExit(_BY_SIGTERM)
    closing = threading.Thread(target=give_back, args=(error,), name="verifiers-closing", daemon=True)
    closing.start()
    closing.join(_GIVE_BACK_WITHIN_S)
    os._exit(1)


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(_BY_SIGTERM)
