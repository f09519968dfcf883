"""Awaiting several coroutines without leaving any of them behind, and ending what an event loop holds with it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


def without_partials(func: Any) -> Any:
    while isinstance(func, functools.partial):
        func = func.func
    return func


def is_async_function(func: Any) -> bool:
    """Return whether calling a function, a partial of one, or a callable object gives a coroutine."""
    func = without_partials(func)
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(func, "__call__", None))  # noqa: B004


async def gather_owned(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all coroutines as tasks that cannot outlive this call; the first error cancels the rest and is raised.

    Unlike a bare TaskGroup it raises that error itself, so that callers can catch its class.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as group:
        first = group.exceptions[0]
    else:
        return [task.result() for task in running]
    # out here, where raising it leaves its own cause and context alone
    raise first


_pending_ends: set[Callable[[], Awaitable[None]]] = set()


def at_loop_end(end: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    """Register `end` to be awaited when the running event loop ends, or earlier by what this returns.

    A loop's end is that of `asyncio.run`, or its `shutdown_asyncgens`. Keep what is returned: when it is forgotten,
    `end` runs soon after.
    """

    async def wait() -> AsyncGenerator[None]:
        try:
            yield
        finally:
            _pending_ends.discard(end)
            await end()

    # a loop closes only started async generators by itself
    generator = wait()
    # kept until it runs: of objects that are forgotten together, the garbage collector ends some before others
    _pending_ends.add(end)
    with contextlib.suppress(StopIteration):
        generator.__anext__().__await__().send(None)
    return generator.aclose


logger = logging.getLogger("verifiers")

IDLE_S = 10.0


class OverdueError(TimeoutError):
    """A call did not end in its time. Its own class: a tool may raise TimeoutError itself."""


@contextlib.contextmanager
def own_cancels_fail() -> Iterator[None]:
    """Raise a RuntimeError for a CancelledError that nobody asked of this task.

    Code that waits for a cancelled task of its own lets one pass, which would end this task without a word.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("CancelledError: it waited for a task that was cancelled, and was not itself") from error


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any] | None
    context: Context = field(default_factory=copy_context)
    result: concurrent.futures.Future[Any] = field(default_factory=concurrent.futures.Future)
    started_at: float | None = None
    is_abandoned: bool = False

    def perform(self) -> tuple[Any, BaseException | None]:
        """Return the result of the work, or the error to raise in its caller."""
        assert self.work is not None
        try:
            return self.context.run(self.work), None
        except StopIteration as error:
            failure: BaseException = error
        except (Exception, SystemExit) as error:
            return None, error
        except BaseException as error:
            # a CancelledError out of the function must not look as if its caller had been cancelled
            failure = error
        finally:
            # the thread has its job for a moment longer than the caller, and must not keep a rollout's state alive
            self.work = None
        raised = RuntimeError(f"{type(failure).__name__}: {failure}")
        raised.__cause__ = failure
        return None, raised


class DaemonThreads:
    """Threads for at most `limit` calls at once, one call in each; more calls wait their turn.

    Calls that ran out of time are not counted, so threads may be more than `limit` while some of them hang.
    """

    def __init__(self, what: str, limit: int) -> None:
        self.what = what
        self.limit = limit
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        # calls that run, and threads that wait for one
        self._running = self._idle = 0

    @property
    def is_full(self) -> bool:
        return self._running >= self.limit

    async def run(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Return the result of `work()`, or what it raises.

        Cancelling this call returns at once and leaves the thread to itself.

        Args:
            timeout_s: seconds from when the call begins to run, not from when it is queued.

        Raises:
            OverdueError: the call did not end in time.
        """
        job = _Job(work)
        ended: asyncio.Future[T] = asyncio.wrap_future(job.result)
        with self._changed:
            self._waiting.append(job)
            self._begin()
        try:
            if timeout_s is not None:
                await _wait_for_end(job, ended, timeout_s)
            return await ended
        finally:
            self._leave(job, ended)

    @property
    def _can_begin(self) -> bool:
        return bool(self._waiting) and not self.is_full

    def _begin(self) -> None:
        while self._idle < min(len(self._waiting), self.limit - self._running):
            self._idle += 1
            threading.Thread(target=self._serve, name=f"verifiers-{self.what}", daemon=True).start()
        self._changed.notify()

    def _next(self) -> _Job | None:
        """Return the next job, counted as running; None after some seconds without one."""
        with self._changed:
            try:
                while self._changed.wait_for(lambda: self._can_begin, IDLE_S):
                    job = self._waiting.popleft()
                    if job.result.set_running_or_notify_cancel():
                        job.started_at = time.monotonic()
                        self._running += 1
                        return job
                return None
            finally:
                self._idle -= 1

    def _leave(self, job: _Job, ended: asyncio.Future[Any]) -> None:
        # of a job that has not begun, this is the end
        ended.cancel()
        with self._changed:
            if job.result.done() or job.result.cancel():
                return
            job.is_abandoned = True
            self._running -= 1
            self._begin()
        logger.warning("A %s still runs after its deadline; abandoning its thread.", self.what)

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            value, error = job.perform()
            with self._changed:
                if not job.is_abandoned:
                    self._running -= 1
                self._idle += 1
                if error is not None:
                    job.result.set_exception(error)
                else:
                    job.result.set_result(value)
            # nothing of a rollout is held while this thread waits
            del job, value, error


async def _wait_for_end(job: _Job, ended: asyncio.Future[Any], timeout_s: float) -> None:
    left_s = timeout_s
    while left_s > 0:
        done, _ = await asyncio.wait([ended], timeout=left_s)
        if done:
            return
        began = job.started_at
        left_s = timeout_s if began is None else began + timeout_s - time.monotonic()
    raise OverdueError


_threads: dict[tuple[int, str], DaemonThreads] = {}


def threads_for(what: str, limit: int) -> DaemonThreads:
    """Return the process's threads for one kind of function, made at the first call; a forked child makes its own."""
    key = (os.getpid(), what)
    threads = _threads.get(key)
    if threads is None:
        threads = _threads[key] = DaemonThreads(what, limit)
    return threads
