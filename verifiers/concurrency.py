"""Awaiting several coroutines without leaving any of them behind, and ending what an event loop holds with it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")


def without_partials(func: Any) -> Any:
    """Return the function inside of `functools.partial` objects."""
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


def tick_s(limit_s: float) -> float:
    """Return the seconds between two looks at what may last `limit_s` seconds."""
    return min(1.0, limit_s / 4)


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


class _Job:
    __slots__ = ("abandoned", "context", "deliver", "error", "finished", "result", "started_at", "work")

    def __init__(self, work: Callable[[], Any], deliver: Callable[[], None]) -> None:
        self.work = work
        self.deliver = deliver
        self.context: Context = copy_context()
        self.started_at: float | None = None
        self.finished = False
        self.abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None


class DaemonThreads:
    """Threads for at most `limit` calls at once, each in a thread of its own; more calls wait their turn.

    Calls that ran out of time are not counted, so threads may be more than `limit` while some of them hang.
    """

    def __init__(self, what: str, limit: int) -> None:
        self.what = what
        self.limit = limit
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self._running = 0

    @property
    def is_full(self) -> bool:
        """True where the next call waits for another one's end."""
        return self._running >= self.limit

    async def run(self, work: Callable[[], T], timeout_s: float | None = None) -> T:
        """Return the result of `work()`, or what it raises.

        Cancelling this call returns at once and leaves the thread to itself.

        Args:
            timeout_s: seconds from when the call begins to run, not from when it is queued.

        Raises:
            OverdueError: the call did not end in time.
            Exception: what `work` raises.
        """
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def deliver() -> None:
            try:
                loop.call_soon_threadsafe(done.set)
            except RuntimeError:
                logger.debug("a %s returned after its event loop was closed", self.what)

        job = _Job(work, deliver)
        self._submit(job)
        try:
            await _wait_until(done, job, timeout_s)
        finally:
            self._leave(job)
        if job.error is not None:
            if isinstance(job.error, (Exception, SystemExit)):
                raise job.error
            # a CancelledError out of the function must not look as if this task had been cancelled
            raise RuntimeError(f"{type(job.error).__name__}: {job.error}") from job.error
        result: T = job.result
        return result

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._waiting.append(job)
            self._start_what_may_run()

    def _start_what_may_run(self) -> None:
        while (job := self._next()) is not None:
            if self._idle:
                self._idle.pop().put(job)
            else:
                threading.Thread(target=self._serve, args=(job,), name=f"verifiers-{self.what}", daemon=True).start()

    def _next(self) -> _Job | None:
        """Return the next job, counted as running, or None where there is none or no room."""
        while self._waiting and self._running < self.limit:
            job = self._waiting.popleft()
            if not job.abandoned:
                job.started_at = time.monotonic()
                self._running += 1
                return job
        return None

    def _leave(self, job: _Job) -> None:
        with self._lock:
            if job.finished or job.abandoned:
                return
            job.abandoned = True
            if job.started_at is None:
                return
            self._running -= 1
            self._start_what_may_run()
        logger.warning("A %s still runs after its deadline; abandoning its thread.", self.what)

    def _serve(self, job: _Job | None) -> None:
        inbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        while job is not None:
            job.context.run(_perform, job)
            with self._lock:
                job.finished = True
                if not job.abandoned:
                    self._running -= 1
                following = self._next()
                if following is None:
                    self._idle.append(inbox)
            job.deliver()
            job = following
            del following
            if job is None:
                job = self._next_in(inbox)

    def _next_in(self, inbox: queue.SimpleQueue[_Job]) -> _Job | None:
        """Return the next job given to an idle thread; None after some seconds without one."""
        try:
            return inbox.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    return None
            # it came at the last moment
            return inbox.get()


def _perform(job: _Job) -> None:
    try:
        job.result = job.work()
    except BaseException as error:  # raised again in the caller, on the event loop
        job.error = error
    finally:
        # the thread has its job for a moment longer than the caller, and must not keep a rollout's state alive
        del job.work


async def _wait_until(done: asyncio.Event, job: _Job, timeout_s: float | None) -> None:
    """Wait for the job; its time counts from its start in a thread.

    Raises:
        OverdueError: it is over.
    """
    if timeout_s is None:
        await done.wait()
        return
    left_s = timeout_s
    while left_s > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await done.wait()
        if done.is_set():
            return
        started_at = job.started_at
        left_s = timeout_s if started_at is None else started_at + timeout_s - time.monotonic()
    raise OverdueError


_threads: dict[tuple[int, str], DaemonThreads] = {}


def threads_for(what: str, limit: int) -> DaemonThreads:
    """Return the process's threads for one kind of function, made at the first call; a forked child makes its own."""
    key = (os.getpid(), what)
    threads = _threads.get(key)
    if threads is None:
        threads = _threads[key] = DaemonThreads(what, limit)
    return threads
