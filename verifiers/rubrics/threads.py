"""Daemon threads for synchronous reward functions, which may be slow and may never return.

`concurrent.futures` would make the interpreter wait for a hung function when it exits, and each hung function
would keep one of its workers for good. Here a thread whose caller has given up leaves the pool, and a new one may
take its place. A thread cannot be killed, so it still burns CPU until the function returns.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any, TypeVar

__all__ = ["ScoringThreads", "scoring_threads"]

logger = logging.getLogger("verifiers.rubrics")

T = TypeVar("T")


class _Job:
    __slots__ = ("abandoned", "context", "deliver", "started", "work")

    def __init__(self, work: Callable[[], Any], deliver: Callable[[Any], None]) -> None:
        self.work = work
        self.deliver = deliver
        self.context: Context = copy_context()
        self.started = False
        self.abandoned = False


class ScoringThreads:
    """At most `limit` threads, started as they are needed; work beyond that waits in a queue.

    Args:
        limit: threads that run at once, not counting those whose callers gave up.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._workers = 0
        self._pending = 0

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work()`, which must not raise: what it raises is not passed on.

        Cancelling this call returns at once and leaves the thread to itself.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def deliver(result: T) -> None:
            try:
                loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(result))
            except RuntimeError:
                logger.debug("a reward function returned after its event loop was closed")

        job = _Job(work, deliver)
        self._submit(job)
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                self._abandon(job)

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._pending += 1
            self._jobs.put(job)
            self._start_worker_if_needed()

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.abandoned = True
            if not job.started:
                return
            self._workers -= 1
            self._pending -= 1
            self._start_worker_if_needed()
        logger.warning("A reward function still runs after its deadline; its thread is left behind.")

    def _start_worker_if_needed(self) -> None:
        if self._pending > self._workers and self._workers < self.limit:
            self._workers += 1
            threading.Thread(target=self._serve, name="verifiers-scoring", daemon=True).start()

    def _finish(self, job: _Job) -> bool:
        """False where the caller gave up meanwhile: this thread is no longer counted, so it must end."""
        with self._lock:
            if job.abandoned:
                return False
            self._pending -= 1
            # nothing is left to leave behind, should the caller be cancelled before it sees the result
            job.started = False
            return True

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                if job.abandoned:
                    self._pending -= 1
                    continue
                job.started = True
            result = job.context.run(job.work)
            if not self._finish(job):
                return
            job.deliver(result)
            # an idle thread must not keep a rollout's state alive
            del job, result


_threads: dict[int, ScoringThreads] = {}


def scoring_threads() -> ScoringThreads:
    """The process's own threads, made at the first call; a forked child makes its own."""
    process = os.getpid()
    threads = _threads.get(process)
    if threads is None:
        threads = _threads[process] = ScoringThreads(min(32, (os.cpu_count() or 1) + 4))
    return threads
