"""The ranks of a run: what rank 0 does for all of them, and the end of all where one fails.

The launcher (torchrun, accelerate launch) supervises the ranks: once one has ended with an error, it sends SIGTERM to
the others. That ends a rank above 0 wherever it is, also inside a collective; rank 0 closes the run first.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import datetime
import faulthandler
import itertools
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from verifiers.errors import RankError
from verifiers.interrupt import EndedBySignal, Termination, ended_by_signals, handlers

T = TypeVar("T")


class Ranks:
    """The processes of a run, as the trainer's parts use them; every rank has one and calls it in the same order."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._joint_work: dict[str, Callable[..., Any]] = {}

    @property
    def index(self) -> int:
        return int(self._state.process_index)

    @property
    def count(self) -> int:
        return int(self._state.num_processes)

    @property
    def is_main(self) -> bool:
        return bool(self._state.is_main_process)

    def wait_for_all(self) -> None:
        self._state.wait_for_everyone()

    def gather(self, own: T) -> list[T]:
        """Return what each rank gives, in their order, on every rank."""
        if self.count == 1:
            return [own]
        from accelerate.utils import gather_object

        gathered: list[T] = gather_object([own])
        return gathered

    def on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 and return its result on all ranks, or raise its failure on all of them.

        That is where an error of rank 0's generator ends the others.

        Raises:
            RankError: on the other ranks, where `work` failed.
        """
        if not self.is_main:
            return self._serve_rank_0()
        payload: Any = None
        failure: Exception | None = None
        try:
            payload = work()
        except Exception as error:
            failure = error
        if self.count > 1:
            _broadcast(_Result(payload, _error_text(failure) if failure is not None else None))
        if failure is not None:
            raise failure
        return payload

    def scatter(self, work: Callable[[], Sequence[T]]) -> T:
        """Make one payload a rank on rank 0, in their order, and return each rank its own.

        Each payload is pickled and sent to its own rank alone. Raises as `on_rank_0` does.
        """
        payloads: list[T] = []
        self.on_rank_0(lambda: payloads.extend(work()))
        if self.count == 1:
            (own,) = payloads
            return own
        import torch.distributed

        received: list[Any] = [None]
        torch.distributed.scatter_object_list(received, payloads if self.is_main else None, src=0)
        mine: T = received[0]
        return mine

    def register(self, name: str, work: Callable[..., Any]) -> None:
        """Name what rank 0 may have all ranks do at once, such as a forward pass of a model sharded over them."""
        self._joint_work[name] = work

    def together(self, name: str, *args: Any) -> Any:
        """Run on all ranks what was registered under a name, from inside `on_rank_0`; return what rank 0 gets."""
        if self.count > 1:
            _broadcast(_Call(name, args))
        return self._joint_work[name](*args)

    def _serve_rank_0(self) -> Any:
        while True:
            message = _broadcast(None)
            if isinstance(message, _Call):
                self._joint_work[message.name](*message.args)
                continue
            if message.failure is not None:
                raise RankError(f"rank 0 stopped: {message.failure}")
            return message.payload


class _Call(NamedTuple):
    name: str
    args: tuple[Any, ...]


class _Result(NamedTuple):
    payload: Any
    failure: str | None


def _broadcast(message: Any) -> Any:
    from accelerate.utils import broadcast_object_list

    (received,) = broadcast_object_list([message], from_process=0)
    return received


# -- the end of a run ------------------------------------------------------------------------------------------------


def end_together(
    accelerator: Any,
    work: Callable[[Termination], T],
    close: Callable[[], None],
    *,
    monitored: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> T:
    """Run this rank's part of a run, and then `close`, whatever ends it.

    Every rank must call it. Where one of several ranks fails, its own error is raised there; rank 0 raises RankError
    with the same text, and the launcher ends the rest.

    Args:
        monitored: makes a context that is left after `close`, with what ended the run.

    Raises:
        RankError: another rank failed first.
    """
    several = accelerator.num_processes > 1
    failures = _FirstFailure(accelerator.process_index) if several else None
    with contextlib.ExitStack() as stack:
        termination = Termination()
        if accelerator.is_main_process:
            termination = stack.enter_context(ended_by_signals(keep_after_failure=several))
        else:
            # it holds nothing that would be missed
            stack.enter_context(handlers({signal.SIGINT: signal.SIG_DFL}))
        with monitored():
            try:
                result = work(termination)
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
                    if failures is not None and failures.is_of_other:
                        _await_launcher(termination)
        termination.raise_waiting()
    return result


@contextlib.contextmanager
def ended_if_stuck(
    termination: Termination, loop: asyncio.AbstractEventLoop, give_back: Callable[[BaseException], None]
) -> Iterator[None]:
    """Have another thread's loop end this process where a signal finds the main thread in a call without an end.

    Args:
        give_back: releases shared resources (paused servers, pushed weights); called before, with what ends the run.
    """
    if signal.getsignal(signal.SIGTERM) != termination.handle:
        yield
        return
    arrived, wakes = socket.socketpair()
    arrived.setblocking(False)
    wakes.setblocking(False)

    def end_process() -> None:
        os.write(2, b"a signal ends this process, whose main thread is inside a call that does not return.\n")
        try:
            give_back(EndedBySignal(signal.SIGTERM))
        finally:
            os._exit(128 + signal.SIGTERM)

    def check() -> None:
        if not termination.has_begun:
            threading.Thread(target=end_process, daemon=True).start()

    def note() -> None:
        if {signal.SIGINT, signal.SIGTERM} & set(arrived.recv(4096)):
            loop.call_later(_HANDLED_WITHIN_S, check)

    loop.call_soon_threadsafe(loop.add_reader, arrived, note)
    # the C code behind Python's handlers writes to it at once
    before = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        # a reader of a closed connection would be called again and again; the loop may have ended
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.remove_reader, arrived)
        wakes.close()


def recorded(main: Callable[[], T]) -> T:
    """Call a program's main function; under torchrun its exception reaches torchrun's report, with traceback."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return main()
    from torch.distributed.elastic.multiprocessing.errors import record

    result: Any = record(main)()
    return result


_HANDLED_WITHIN_S = 1.2
_STORE_TIMEOUT_S = 5.0
_TRACEBACK_CHARACTERS = 2**13

_LAUNCHER_S = 3.0
"""Seconds that a rank which follows another rank's failure waits to be ended by the launcher.

Otherwise the launcher's report could name this rank as the first that failed: the other closes its connections before
it exits.
"""

_EXIT_S = 2.0
"""Seconds that the interpreter may take to exit after a failure: it would wait for collectives that cannot end."""

_run_number = itertools.count()


class _FirstFailure:
    """The first failure of a run, kept in the store at which torch's ranks met, so that rank 0 can name it.

    Attributes:
        is_of_other: what ended this rank is the failure of another.
    """

    def __init__(self, rank: int) -> None:
        from torch.distributed import DistError, TCPStore

        self.is_of_other = False
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
        first = self._exchange(None if follows or isinstance(error, (KeyboardInterrupt, EndedBySignal)) else error)
        is_of_other = first is not None and first["rank"] != self._rank
        cause = error
        if first is not None and is_of_other and not isinstance(error, (RankError, KeyboardInterrupt)):
            cause = RankError(f"rank {first['rank']} stopped: {first['text']}")
            cause.add_note(f"On rank {first['rank']}:\n{first['traceback']}")
        elif _broke_off(error):
            cause = RankError(
                "another rank ended without an error of its own, so it was killed (out of memory?), crashed, or lost "
                f"its host; the launcher's report names it ({_error_text(error)})."
            )
        self.is_of_other = isinstance(cause, RankError)
        return cause

    def _exchange(self, error: BaseException | None) -> dict[str, Any] | None:
        """Write a failure down unless there is one; return the first."""
        if self._store is None:
            return None
        try:
            if error is not None:
                text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
                own = {"rank": self._rank, "text": _error_text(error)[:_TRACEBACK_CHARACTERS], "traceback": text}
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


def _await_launcher(termination: Termination) -> None:
    deadline = time.monotonic() + _LAUNCHER_S
    while not termination.is_waiting and time.monotonic() < deadline:
        time.sleep(0.05)


def _exit_within(seconds: float) -> None:
    """End this process after `seconds`, also where other code holds the interpreter's lock."""
    # not closed: the file is written to when the time is over
    faulthandler.dump_traceback_later(seconds, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115


def _error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
