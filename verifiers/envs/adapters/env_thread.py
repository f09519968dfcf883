"""One thread for one environment instance, whose calls may block and may not come from different threads."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from verifiers.errors import InfraError

__all__ = ["EnvThread"]

logger = logging.getLogger("verifiers.envs.adapters")

T = TypeVar("T")

_Job = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]


class EnvThread:
    """Runs calls one after the other on a daemon thread, which starts with the first call.

    A thread cannot be killed: after a call that never returns it stays behind until the process ends.

    Args:
        name: shown in thread dumps.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0

    @property
    def is_idle(self) -> bool:
        """True where no call runs or waits."""
        return self._waiting == 0

    async def call(self, work: Callable[[], T], *, timeout_s: float, what: str) -> T:
        """The result of `work()`.

        Args:
            timeout_s: seconds to wait, calls before this one included.
            what: names the call in the error.

        Raises:
            InfraError: it did not return in time.
            Exception: what `work` raises.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            try:
                loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result((result, error)))
            except RuntimeError:
                logger.debug("%s returned after its event loop was closed", what)

        self._submit((work, deliver))
        try:
            async with asyncio.timeout(timeout_s):
                result, error = await done
        except TimeoutError as late:
            raise InfraError(f"{what} did not return within {timeout_s:g} s.") from late
        if error is not None:
            raise error
        return result

    def end(self, work: Callable[[], None] | None = None) -> None:
        """Let the thread end after the calls that are waiting, and after `work`. Does not wait for it."""
        if self._thread is None:
            return
        if work is not None:
            self._submit((work, self._log_failure))
        self._jobs.put(None)

    def _log_failure(self, _: Any, error: BaseException | None) -> None:
        if error is not None:
            logger.warning("%s: closing the environment raised %r", self.name, error)

    def _submit(self, job: _Job) -> None:
        self._waiting += 1
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, deliver = job
            try:
                result, error = work(), None
            except BaseException as caught:  # carried over to the caller, and raised there
                result, error = None, caught
            self._waiting -= 1
            deliver(result, error)
            # an idle thread must not keep what it worked on alive
            del job, work, deliver, result, error
