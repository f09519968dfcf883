"""Warm Python processes, each in a sandbox, that answer calls of functions which may hang or be attacked."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from verifiers.errors import ConfigError, SandboxError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.sandbox.agent import MAX_RESULT_BYTES
from verifiers.sandbox.agent_sandbox import AgentSandbox, installed_paths, module_places, open_agent_sandbox
from verifiers.sandbox.spec import IsolationLevel, SandboxSpec

T = TypeVar("T")

# importing what a call needs is not the call's fault, and sympy takes its time on a busy machine
_IMPORT_S = 120.0
_CLOSE_S = 15.0
# numerical libraries would start threads when they are imported, and a process with threads cannot be forked
_ONE_THREAD = {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB", "RAYON")
} | {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}


class WorkerPool:
    """Warm Python processes, each in a sandbox, that answer calls of importable functions. JSON both ways.

    Each call runs in a process of its own, forked from a worker that has the modules imported: what one call does to
    its process cannot reach the next. A call has no network and no files but the system's and Python's, as far as the
    isolation level goes (docs/concepts/sandbox.md). What it prints is thrown away. Its result is as trustworthy as
    the function: one that evaluates hostile text in its own process can be made to answer anything.

    A pool may be used from any thread and any event loop, several at once. Processes start at the first call and end
    with `close`, with the interpreter, or with this process, however it dies.

    Args:
        workers: how many calls run at once; None: one for each processor.
        timeout_s: wall time of a call in seconds, unless it says otherwise. It starts when a worker takes the call;
            importing the function's module does not count.
        memory_bytes: address space of a call's process, the imported modules included.
        isolation: "bubblewrap", "process" or "auto".
        paths: directories of modules that are not installed; they become readable inside.
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        timeout_s: float = 10.0,
        memory_bytes: int = 1 << 30,
        preload: Sequence[str] = (),
        isolation: IsolationLevel = "auto",
        paths: Sequence[str] = (),
        name: str = "workers",
    ) -> None:
        if workers is not None and workers < 1:
            raise ConfigError(f"A worker pool needs at least one worker, not {workers!r}.")
        if isolation not in ("auto", "process", "bubblewrap"):
            raise ConfigError(
                f"A worker pool runs in the isolation levels 'auto', 'bubblewrap' or 'process', not {isolation!r}."
            )
        self.timeout_s = _checked_timeout(timeout_s)
        self.name = name
        spec = SandboxSpec(
            isolation, memory_bytes=memory_bytes, env=_ONE_THREAD, file_bytes=16 << 20, disk_bytes=64 << 20
        )
        known_paths = tuple(path for path in map(os.path.abspath, paths) if os.path.exists(path))
        self._begin = functools.partial(
            _Workers, workers or os.cpu_count() or 1, spec, tuple(preload), known_paths, name
        )
        self._serve_from(self._begin())

    def _serve_from(self, workers: _Workers) -> None:
        self._workers = workers
        self._finalizer = weakref.finalize(self, _Workers.close, workers)

    async def call(
        self,
        function: str,
        *args: Any,
        timeout_s: float | None = None,
        begun: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ) -> Any:
        """Call a function in a worker. Cancelling this kills the call.

        Args:
            function: "module:attribute"; what it takes and returns must be JSON.
            timeout_s: wall time in seconds, from when it has a worker; None takes the pool's.
            begun: called in another thread when it has one.

        Raises:
            WorkerTimeoutError: it ran past its time, and was killed.
            WorkerError: its process ended without an answer, or no worker could be started.
            WorkerCallError: it raised; `kind` is the name of the exception's class.
            ConfigError: there is no such function, or the arguments are not JSON.
        """
        return await asyncio.wrap_future(self._submit(function, args, kwargs, timeout_s, begun))

    def call_blocking(self, function: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call a function as `call` does, from code without an event loop."""
        future = self._submit(function, args, kwargs, timeout_s, lambda: None)
        try:
            return future.result()
        finally:
            # where this thread was interrupted; a call that has ended is not touched
            future.cancel()

    def close(self) -> None:
        """Kill the workers. Calls under way and calls that wait raise WorkerError. A second call does nothing."""
        self._finalizer()
        self._workers.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(
        self,
        function: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        timeout_s: float | None,
        begun: Callable[[], None],
    ) -> Future[Any]:
        module, colon, attribute = function.partition(":")
        if not (module and colon and attribute):
            raise ConfigError(f"A worker's function is written 'module:attribute', not {function!r}.")
        request = {"function": function, "args": list(args), "kwargs": dict(kwargs)}
        try:
            json.dumps(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"The arguments of {function} are not JSON: {error}.") from error
        limit_s = self.timeout_s if timeout_s is None else _checked_timeout(timeout_s)
        if self._workers.process != os.getpid():
            # a forked child has neither the thread nor the right to the parent's workers
            self._serve_from(self._begin(closed=self._workers.closed))
        return self._workers.submit(self._workers.call(request, limit_s, begun))


def _checked_timeout(timeout_s: float) -> float:
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ConfigError(f"A worker's timeout_s must be a number above 0, but is {timeout_s!r}.")
    return timeout_s


class _Worker:
    """A sandbox whose agent has modules imported and forks a process for each call."""

    def __init__(self, sandbox: AgentSandbox, paths: Sequence[str], name: str) -> None:
        self.sandbox = sandbox
        self._paths = paths
        self._name = name
        self._loaded: set[str] = set()

    async def load(self, module: str) -> str | None:
        """Import a module once, so that the calls find it ready; return None, or why it could not be imported."""
        if module in self._loaded:
            return None
        problem = await self._asked(self.sandbox.import_module(module, self._paths, _IMPORT_S))
        if problem is None:
            self._loaded.add(module)
        return problem

    async def _asked(self, request: Coroutine[Any, Any, T]) -> T:
        try:
            return await request
        except SandboxError as error:
            raise WorkerError(f"A worker of {self._name!r} died: {error}") from error

    async def call(self, request: dict[str, Any], timeout_s: float) -> Any:
        """Call a function; as `WorkerPool.call`. After a WorkerError look whether the sandbox is still alive."""
        function: str = request["function"]
        module = function.partition(":")[0]
        problem = await self.load(module)
        if problem is not None:
            raise ConfigError(
                f"A worker of {self._name!r} cannot import {module!r}: {problem}. Give the pool the directory that "
                "the module is in as one of its paths."
            )
        cpu_time_s = math.ceil(timeout_s) + 1
        status, out, _ = await self._asked(
            self.sandbox.exchange(
                "call",
                stdin=None,
                keep_bytes=MAX_RESULT_BYTES,
                timeout_s=timeout_s,
                cpu_time_s=cpu_time_s,
                **request,
            )
        )
        if status["timed_out"]:
            raise WorkerTimeoutError(f"{function} ran past its {timeout_s:g} s in a worker of {self._name!r}.")
        answer: Any = None
        if status["exit"] == 0 and not out.dropped:
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(out.kept)
        if not isinstance(answer, dict):
            how = f"exit code {status['exit']}" if status["exit"] >= 0 else f"signal {-status['exit']}"
            raise WorkerError(
                f"{function} ended its process in a worker of {self._name!r} without an answer ({how}); "
                "the memory limit, a crash, or what it called did so."
            )
        if "value" in answer:
            return answer["value"]
        if "missing" in answer:
            raise ConfigError(f"A worker of {self._name!r} cannot call {function!r}: {answer['missing']}.")
        kind = str(answer.get("kind"))
        raise WorkerCallError(f"{function} raised {kind}: {answer.get('message')}", kind=kind)


class _Workers:
    """The event loop and the workers of a pool in one process. The loop's thread holds this, not the pool itself."""

    def __init__(
        self,
        workers: int,
        spec: SandboxSpec,
        preload: Sequence[str],
        paths: Sequence[str],
        name: str,
        *,
        closed: bool = False,
    ) -> None:
        self._spec, self._preload, self._paths, self._name = spec, preload, paths, name
        self.process = os.getpid()
        self.closed = closed
        # every worker that is open, and those of them that have no call
        self.all: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._calls: set[asyncio.Task[Any]] = set()
        self._turns = asyncio.Semaphore(workers)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = asyncio.Event()

    def submit(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        with self._lock:
            if self.closed:
                call.close()
                raise self._closed_error()
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                name = f"verifiers-{self._name}"
                self._thread = threading.Thread(target=self._run_loop, args=[self._loop], name=name, daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(call, self._loop)

    def _closed_error(self) -> WorkerError:
        return WorkerError(f"The worker pool {self._name!r} is closed.")

    async def call(self, request: dict[str, Any], timeout_s: float, begun: Callable[[], None]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            async with self._turns:
                worker = await self._take(request["function"])
                begun()
                try:
                    return await worker.call(request, timeout_s)
                finally:
                    # a cancelled call is being killed, which its worker does before it takes the next
                    self._idle.append(worker)
        except asyncio.CancelledError:
            if self.closed:
                raise self._closed_error() from None
            raise
        finally:
            self._calls.discard(task)

    async def _take(self, function: str) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.sandbox.alive:
                return worker
            self.all.discard(worker)
            await worker.sandbox.close()
        worker = await self._open(function)
        self.all.add(worker)
        return worker

    async def _open(self, function: str) -> _Worker:
        roots, readable = module_places([*self._preload, function.partition(":")[0]])
        try:
            sandbox = await open_agent_sandbox(replace(self._spec, readable=(*readable, *self._paths)))
        except SandboxError as error:
            raise WorkerError(f"A worker of {self._name!r} could not be started: {error}") from error
        worker = _Worker(sandbox, [*self._paths, *installed_paths(), *roots], self._name)
        try:
            for module in self._preload:
                problem = await worker.load(module)
                if problem is not None:
                    raise WorkerError(f"A worker of {self._name!r} could not import {module!r}: {problem}.")
        except BaseException:
            await sandbox.close()
            raise
        return worker

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        await self._stopping.wait()
        # not every task of the loop: one that closes a sandbox has to come to its end
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await asyncio.gather(*(worker.sandbox.close() for worker in self.all))

    def close(self) -> None:
        with self._lock:
            if self.closed or self.process != os.getpid():
                return
            self.closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stopping.set)
        # the last reference to a pool can go in any thread, also in the pool's own
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
