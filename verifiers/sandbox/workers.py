"""A pool of warm Python processes for functions that may hang, crash or be attacked by what they are given."""

from __future__ import annotations

import asyncio
import json
import math
import os
import queue
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from verifiers.errors import ConfigError, WorkerError
from verifiers.sandbox.launching import installed_paths, module_places
from verifiers.sandbox.opening import announce, default_tier
from verifiers.sandbox.spec import SandboxSpec, Tier
from verifiers.sandbox.worker import Worker

__all__ = ["WorkerPool"]

# numerical libraries would start threads when they are imported, and a process with threads cannot be forked
_LISTENS_EVERY_S = 1.0
_ONE_THREAD = {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB", "RAYON")
} | {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}


class WorkerPool:
    """Warm Python processes, each in a sandbox, that answer calls of importable functions. JSON both ways.

    Each call runs in a process of its own, forked from a worker that has the modules imported: what one call does to
    its process cannot reach the next. A call has no network and no files but the system's and Python's, as far as the
    tier goes (docs/concepts/sandbox.md). What it prints is thrown away. Its result is as trustworthy as the function:
    one that evaluates hostile text in its own process can be made to answer anything.

    It may be used from any thread and any event loop, several at once. Processes start at the first call and end with
    `close`, with the interpreter, or with this process, however it dies.

    Args:
        workers: how many calls run at once; None: one for each processor.
        timeout_s: wall time of a call in seconds, unless it says otherwise. It starts when a worker takes the call;
            importing the function's module does not count.
        memory_bytes: address space of a call's process, the imported modules included.
        preload: modules to import when a worker starts.
        tier: "namespaces", "process" or "auto".
        paths: directories of modules that are not installed; they become readable inside.
        name: what errors call the pool.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        timeout_s: float = 10.0,
        memory_bytes: int = 1 << 30,
        preload: Sequence[str] = (),
        tier: Tier = "auto",
        paths: Sequence[str] = (),
        name: str = "workers",
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"A worker pool needs at least one worker, not {workers!r}.")
        if tier not in ("auto", "process", "namespaces"):
            raise ConfigError(f"A worker pool runs in the tiers 'auto', 'namespaces' or 'process', not {tier!r}.")
        self.timeout_s = _checked_timeout(timeout_s)
        self.name = name
        self._plan = _Plan(
            workers or os.cpu_count() or 1,
            memory_bytes,
            tuple(preload),
            tier,
            tuple(map(os.path.abspath, paths)),
            name,
        )
        self._state = _State(self._plan)
        self._finalizer = weakref.finalize(self, _State.close, self._state)

    async def call(self, function: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a function in a worker. Cancelling this kills the call.

        Args:
            function: "module:attribute"; what it takes and returns must be JSON.
            timeout_s: wall time in seconds; None takes the pool's.

        Raises:
            WorkerTimeoutError: it ran past its time, and was killed.
            WorkerError: its process ended without an answer, or no worker could be started.
            WorkerCallError: it raised; `kind` is the name of the exception's class.
            ConfigError: there is no such function, or the arguments are not JSON.
        """
        job = self._submit(function, args, kwargs, timeout_s)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            job.abandon()
            raise

    def call_blocking(self, function: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """As `call`, for code without an event loop."""
        job = self._submit(function, args, kwargs, timeout_s)
        try:
            # an interrupt that comes just before a wait does not end it, only the next one
            while not job.ended.acquire(timeout=_LISTENS_EVERY_S):
                pass
            return job.future.result()
        except BaseException:
            # an interrupt of this thread; a job that has ended has nothing to abandon
            job.abandon()
            raise

    def close(self) -> None:
        """Kill the workers. Calls under way and calls that wait raise WorkerError. A second call does nothing."""
        self._finalizer()
        self._state.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, function: str, args: Sequence[Any], kwargs: dict[str, Any], timeout_s: float | None) -> _Job:
        module, colon, attribute = function.partition(":")
        if not (module and colon and attribute):
            raise ConfigError(f"A worker's function is written 'module:attribute', not {function!r}.")
        try:
            json.dumps([args, kwargs])
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"The arguments of {function} are not JSON: {error}.") from error
        limit_s = self.timeout_s if timeout_s is None else _checked_timeout(timeout_s)
        if self._state.process != os.getpid():
            # a forked child has neither the threads nor the right to the parent's workers
            self._state = _State(self._plan, closed=self._state.closed)
            self._finalizer = weakref.finalize(self, _State.close, self._state)
        job = _Job(function, args, kwargs, limit_s)
        self._state.submit(job)
        return job


def _checked_timeout(timeout_s: float) -> float:
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ConfigError(f"A worker's timeout_s must be a number above 0, but is {timeout_s!r}.")
    return timeout_s


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a pool's workers are like."""

    workers: int
    memory_bytes: int
    preload: tuple[str, ...]
    tier: Tier
    paths: tuple[str, ...]
    name: str

    def open(self, function: str) -> Worker:
        tier = default_tier() if self.tier == "auto" else self.tier
        roots, readable = module_places(["verifiers", *self.preload, function.partition(":")[0]])
        readable += [path for path in self.paths if os.path.exists(path)]
        spec = SandboxSpec(
            memory_bytes=self.memory_bytes, env=_ONE_THREAD, readable=tuple(readable), file_bytes=16 << 20,
            disk_bytes=64 << 20,
        )  # fmt: skip
        worker = Worker(spec, tier, self.preload, [*self.paths, *installed_paths(), *roots], self.name)
        announce(tier, worker.note)
        return worker


@dataclass(eq=False, slots=True)
class _Job:
    """A call on its way.

    Attributes:
        ended: held until `future` is done. Whoever may be interrupted waits here: an interrupt inside the future's
            own wait can leave its lock taken, and the thread that has the result would stand still.
    """

    function: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    timeout_s: float
    future: Future[Any] = field(default_factory=Future)
    worker: Worker | None = None
    abandoned: bool = False
    ended: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        ended = self.ended
        ended.acquire()
        # not `self`: a call's arguments would live until the next garbage collection
        self.future.add_done_callback(lambda _: ended.release())

    def abandon(self) -> None:
        """Nobody waits for it any more: it is not started, or killed."""
        self.abandoned = True
        self.future.cancel()
        worker = self.worker
        if worker is not None:
            worker.abandon(self)


class _State:
    """The threads and processes of a pool in one process. Threads hold this, so the pool itself can be collected."""

    def __init__(self, plan: _Plan, *, closed: bool = False) -> None:
        self.plan = plan
        self.process = os.getpid()
        self.closed = closed
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pending = 0
        self._workers: set[Worker] = set()

    def submit(self, job: _Job) -> None:
        with self._lock:
            if self.closed:
                raise WorkerError(f"The worker pool {self.plan.name!r} is closed.")
            self._pending += 1
            self._jobs.put(job)
            if self._pending > len(self._threads) and len(self._threads) < self.plan.workers:
                thread = threading.Thread(target=self._serve, name=f"verifiers-{self.plan.name}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self) -> None:
        worker: Worker | None = None
        while (job := self._jobs.get()) is not None:
            try:
                if job.future.set_running_or_notify_cancel():
                    worker = self._do(job, worker)
            finally:
                with self._lock:
                    self._pending -= 1
            # an idle thread must not keep a caller's arguments alive
            del job
        if worker is not None:
            self._discard(worker)

    def _do(self, job: _Job, worker: Worker | None) -> Worker | None:
        """Run a job; returns the worker for the next one."""
        try:
            if worker is not None and not worker.alive():
                self._discard(worker)
                worker = None
            if worker is None:
                worker = self._open(job.function)
            job.worker = worker
            value = worker.call(job.function, job.args, job.kwargs, job.timeout_s, job)
        except BaseException as error:
            job.worker = None
            if isinstance(error, WorkerError) and self.closed:
                error = WorkerError(f"The worker pool {self.plan.name!r} was closed during a call.")
            job.future.set_exception(error)
            # the exception's traceback must not tie this frame to it
            del error
        else:
            job.worker = None
            job.future.set_result(value)
        return worker

    def _open(self, function: str) -> Worker:
        worker = self.plan.open(function)
        with self._lock:
            if not self.closed:
                self._workers.add(worker)
                return worker
        worker.close()
        raise WorkerError(f"The worker pool {self.plan.name!r} is closed.")

    def _discard(self, worker: Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.close()

    def close(self) -> None:
        if self.process != os.getpid():
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
            threads, workers = list(self._threads), list(self._workers)
            try:
                while True:
                    job = self._jobs.get_nowait()
                    if job is not None and job.future.set_running_or_notify_cancel():
                        job.future.set_exception(WorkerError(f"The worker pool {self.plan.name!r} is closed."))
            except queue.Empty:
                pass
            for _ in threads:
                self._jobs.put(None)
        for worker in workers:
            # the thread that owns it sees the end of the socket, and cleans up
            worker.hang_up()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(10)
