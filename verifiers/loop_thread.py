"""LoopThread: an event loop in a thread, for the generator's rollouts and for synchronous calls."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import faulthandler
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from verifiers.errors import DeadlineError, GenerationError
from verifiers.interrupt import exit_if_blocked

logger = logging.getLogger("verifiers")

T = TypeVar("T")

BLOCKING_ADVICE = (
    "make it a plain def where it is a reward function or the run of an AgentEnv, for those run in threads; else an "
    "async def that awaits its slow part (asyncio.to_thread)"
)
"""Advice for a blocked event loop, to end a sentence."""

_STOP_RECEIVED_S = 1.0
_CLOSING_S = 3.0
_TICK_S = 1.0

_PACKAGE = str(Path(__file__).parent) + os.sep


class LoopThread:
    """An event loop in a daemon thread, from `start` to `close`. Thread-safe.

    Args:
        close_last: awaited on the loop once all its tasks have ended.
        failed: called in the thread with the error, where the loop ends though nobody closed it, or cannot end well.

    Attributes:
        loop: the event loop, once started.
        failure: the error with which the loop ended though nobody closed it.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        *,
        failed: Callable[[BaseException], None],
        close_last: Callable[[], Coroutine[Any, Any, None]] | None = None,
        name: str = "verifiers-generator",
    ) -> None:
        self._close_last, self.failed = close_last, failed
        self.failure: GenerationError | None = None
        self._is_closed = self._is_serving = self._is_blocked = False
        self._stop_received = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._ran_at, self._suspected_at = time.monotonic(), math.inf
        self._guard: concurrent.futures.Future[None] | None = None

    def start(self) -> None:
        """Start the thread. To be called once."""
        self._thread.start()
        self._ready.wait()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def blocked_by(self, limit_s: float) -> str | None:
        """Return the function that has kept the loop from running anything for `limit_s` seconds; None for none.

        To be called every second. A process that was stopped is not blocked: its loop runs by the next call.
        """
        now = time.monotonic()
        if now - self._ran_at < max(limit_s, 2 * _TICK_S):
            return None
        if self._suspected_at > now:
            self._suspected_at = min(self._suspected_at, now + _TICK_S)
            return None
        return running_function(self._thread.ident)

    def exit_if_blocked(self, limit_s: float) -> None:
        """End the process where one function lets nothing else run for `limit_s` seconds, until `close`."""
        self._guard = asyncio.run_coroutine_threadsafe(exit_if_blocked(limit_s), self.loop)

    def run(
        self, work: Coroutine[Any, Any, T], timeout_s: float, *, stall_s: float = math.inf, ending_s: float = 0.0
    ) -> T:
        """Run a coroutine on the loop and wait for its result in another thread.

        Args:
            stall_s: seconds for which code may block the loop meanwhile.
            ending_s: seconds to wait for the coroutine's end where it is cancelled, by a deadline or because the
                waiting thread is interrupted.

        Raises:
            DeadlineError: it did not end in time, or the loop is blocked.
            concurrent.futures.CancelledError: the loop was closed meanwhile.
            GenerationError: the loop ended meanwhile though nobody closed it.
        """
        ended, given_up = threading.Event(), threading.Event()
        task: asyncio.Task[Any] | None = None
        submitted: concurrent.futures.Future[T] | None = None
        began = time.monotonic()

        async def noted() -> T:
            nonlocal task
            task = asyncio.current_task()
            try:
                if given_up.is_set():
                    work.close()
                    raise asyncio.CancelledError
                return await work
            finally:
                ended.set()

        def cancel() -> None:
            if task is not None:
                task.cancel()

        try:
            # an interrupt may come before this call has returned, while the loop runs the work already
            submitted = future = asyncio.run_coroutine_threadsafe(noted(), self.loop)
            while not future.done():
                # an interrupt that comes just before a wait does not end that wait, only the next one
                left_s = max(0.0, began + timeout_s - time.monotonic())
                concurrent.futures.wait([future], min(_TICK_S, left_s))
                if not future.done() and (function := self.blocked_by(stall_s)):
                    ending_s = 0.0
                    raise DeadlineError(f"{function} blocks the event loop, for {stall_s:.3g} s by now")
                if not future.done() and time.monotonic() >= began + timeout_s:
                    raise DeadlineError(f"work on the event loop did not end within {timeout_s:.3g} s")
            return future.result()
        except concurrent.futures.CancelledError:
            if self.failure is not None:
                raise self.failure from None
            raise
        finally:
            if not (ended.is_set() or (submitted is not None and submitted.done())):
                given_up.set()
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self.loop.call_soon_threadsafe(cancel)
                ended.wait(ending_s)

    def close(self) -> None:
        """Cancel every task and end the thread; what does not end within seconds is left behind, with a warning.

        May be called twice, and by several threads at once.
        """
        self._is_closed = True
        if not self._thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
            self.loop.call_soon_threadsafe(self._stop)
        if self._stop_received.wait(0.0 if self._is_blocked else _STOP_RECEIVED_S):
            self._thread.join(_CLOSING_S)
        if self._thread.is_alive() and not self._is_blocked:
            self._is_blocked = True
            waited_s = _STOP_RECEIVED_S + _CLOSING_S * self._stop_received.is_set()
            if self._guard is not None:
                faulthandler.cancel_dump_traceback_later()
            cause = "is still being closed" if self._stop_received.is_set() else "blocks its loop"
            logger.warning("the generator's thread did not end in %g s: something %s", waited_s, cause)

    def _stop(self) -> None:
        self._stop_received.set()
        # a stop that came while the loop is being ended would leave its connections open
        if self._is_serving:
            self.loop.stop()

    def _serve(self) -> None:
        loop = self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self._ready.set()
        try:
            try:
                self._is_serving = True
                self._tick()
                loop.run_forever()
                self._note_end(None)
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                # the last two, in a task of the environment's own, end the loop
                self._note_end(error)
            finally:
                self._is_serving = False
                self._stop_received.set()
            while tasks := asyncio.all_tasks(loop):
                for task in tasks:
                    task.cancel()
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            if self._close_last is not None:
                loop.run_until_complete(self._close_last())
            loop.run_until_complete(loop.shutdown_asyncgens())
        except Exception as error:
            self.failed(error)
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    def _tick(self) -> None:
        self._ran_at, self._suspected_at = time.monotonic(), math.inf
        self.loop.call_later(_TICK_S, self._tick)

    def _note_end(self, cause: BaseException | None) -> None:
        if not self._is_closed:
            how = repr(cause) if cause is not None else "a stop of its event loop"
            error = GenerationError(f"{how} ended the generator's thread; does code of the environment do that?")
            error.__cause__ = cause
            self.failure = error
            self.failed(error)


_synchronous_calls = threading.Lock()
_synchronous_loop: tuple[int, LoopThread] | None = None


def run_blocking(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the process's one loop of synchronous calls, and wait for it; also inside a running loop.

    Connections that the work leaves open serve the next call, and are closed when the interpreter ends. A call from
    that loop itself, which it would stop, runs on a loop of its own.
    """
    thread = _loop_of_synchronous_calls()
    if thread.is_current:
        with concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="verifiers-sync") as pool:
            return pool.submit(lambda: asyncio.run(work())).result()

    async def outcome() -> tuple[T, None] | tuple[None, BaseException]:
        try:
            return await work(), None
        except (SystemExit, KeyboardInterrupt) as error:
            # raised on the loop, they would end it while the next call is on its way there
            return None, error

    result, error = thread.run(outcome(), math.inf)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _loop_of_synchronous_calls() -> LoopThread:
    global _synchronous_loop
    with _synchronous_calls:
        # a forked child has none of its parent's threads
        if _synchronous_loop is None or _synchronous_loop[0] != os.getpid() or not _synchronous_loop[1].is_alive:
            thread = LoopThread(failed=_log_failure, name="verifiers-sync")
            thread.start()
            atexit.register(thread.close)
            _synchronous_loop = os.getpid(), thread
        return _synchronous_loop[1]


def _log_failure(error: BaseException) -> None:
    logger.debug("the loop of synchronous calls ended: %s", error)


def running_function(thread_id: int | None) -> str:
    """Return name, file and line of the function of the user that a thread is in, such as a reward function.

    Args:
        thread_id: of the thread; None for the main thread.
    """
    innermost = sys._current_frames().get(thread_id or threading.main_thread().ident or 0)
    found, caller_is_ours = "code of the environment", False
    for frame, line in reversed(list(traceback.walk_stack(innermost))):
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] in sys.stdlib_module_names:
            continue
        # a function of the user is to blame, and not the libraries that it calls
        is_ours = code.co_filename.startswith(_PACKAGE)
        if caller_is_ours and not is_ours:
            found = f"{code.co_name} ({code.co_filename}, line {line})"
        caller_is_ours = is_ours
    return found
