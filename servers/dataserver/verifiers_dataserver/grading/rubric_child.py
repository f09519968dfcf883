"""A process that has loaded an environment and grades groups by its rubric: JSON lines in and out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from verifiers.errors import WorkerError, WorkerTimeoutError
from verifiers_dataserver.config import EnvironmentTable

# long: the server itself loaded the environment at start-up, so loading it succeeds
_LOAD_S = 900.0
_LINE_BYTES = 256 << 20
_COMMAND = (sys.executable, "-m", "verifiers_dataserver.grading.rubric_process")


@dataclass(slots=True)
class _Group:
    """A group in the process.

    Attributes:
        answer: what its request waits for.
        silence: ends the process where no answer comes, also when nobody waits for it any more.
        alone: no other group has been in there beside it.
    """

    answer: asyncio.Future[Any]
    silence: asyncio.TimerHandle
    alone: bool


class RubricChild:
    """A process that starts with the first group, and ends by itself even if nobody waits for it.

    Args:
        table: the environment.
        grace_s: seconds beyond a group's time after which a process that says nothing is killed.
    """

    def __init__(self, table: EnvironmentTable, grace_s: float) -> None:
        self._table, self._grace_s = table, grace_s
        self._numbers = itertools.count()
        self._groups: dict[int, _Group] = {}
        self._inside = 0
        self._leaving = False
        self._process: asyncio.subprocess.Process | None = None
        self._life: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self._why = "the rubric's process ended"
        self.ended = False

    @property
    def usable(self) -> bool:
        """False once it has ended, or something hangs in it."""
        return not (self.ended or self._leaving)

    @property
    def loading(self) -> bool:
        """True while the environment is being loaded."""
        return self._life is not None and not self._begun.is_set()

    @property
    def gone(self) -> bool:
        """True once nothing of it is left, the task that read its answers included."""
        return self.ended and (self._life is None or self._life.done())

    async def ask(self, body: dict[str, Any], timeout_s: float) -> Any:
        """Return the answer to one group. Waiting for the environment to be loaded is not part of its time.

        Raises:
            WorkerTimeoutError: it took too long.
            WorkerError: the process ended, perhaps by the fault of another group, or could not be started.
        """
        if self._life is None and not self.ended:
            # a task of its own: a request that is given up must not break the process for the next one
            self._life = asyncio.create_task(self._live())
        self._inside += 1
        try:
            if self._life is not None:
                await self._begun.wait()
            if self.ended:
                raise WorkerError(self._why)
            found = await self._answered(body, timeout_s)
        finally:
            self._inside -= 1
            if self._leaving and not self._inside:
                self.kill()
        if found.get("timed_out"):
            raise WorkerTimeoutError(f"the rubric did not answer within {timeout_s:g} s")
        return found

    async def _answered(self, body: dict[str, Any], timeout_s: float) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        line = json.dumps({"number": number, "timeout_s": timeout_s, **body}) + "\n"
        answer: asyncio.Future[Any] = loop.create_future()
        silence = loop.call_later(timeout_s + self._grace_s, self._too_silent, number, timeout_s)
        for other in self._groups.values():
            other.alone = False
        self._groups[number] = _Group(answer, silence, alone=not self._groups)
        self._process.stdin.write(line.encode())
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()
        return await answer

    def _too_silent(self, number: int, timeout_s: float) -> None:
        """Kill a process that does not report a timed-out group: its event loop is blocked."""
        group, problem = self._groups[number], f"the rubric did not answer within {timeout_s:g} s"
        if group.alone and not group.answer.done():
            group.answer.set_exception(WorkerTimeoutError(problem))
            group.answer.exception()
        self._why = f"the rubric's process was killed: {problem}"
        self.kill()

    async def _live(self) -> None:
        try:
            await self._started_and_read()
        except Exception as error:
            self._why = f"the rubric's process failed: {type(error).__name__}: {error}"
        finally:
            self.kill()
            self._begun.set()
            for group in self._groups.values():
                group.silence.cancel()
                if not group.answer.done():
                    group.answer.set_exception(WorkerError(self._why))
                    # nobody may be waiting for it any more
                    group.answer.exception()
            if self._process is not None:
                await self._process.wait()

    async def _started_and_read(self) -> None:
        first = json.dumps({"id": self._table.id, "args": self._table.args}) + "\n"
        process = self._process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LINE_BYTES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        if self.ended:
            return
        process.stdin.write(first.encode())
        ready = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOAD_S):
                ready = await process.stdout.readline()
        if not ready:
            if not self.ended:
                self._why = f"the environment {self._table.id!r} could not be loaded in a process of its own"
            return
        self._begun.set()
        while line := await process.stdout.readline():
            self._take(json.loads(line))

    def _take(self, answer: dict[str, Any]) -> None:
        if answer.get("timed_out"):
            # also where nobody waits for that group any more: what hangs in there is still there
            self._leaving = True
        group = self._groups.pop(answer["number"])
        group.silence.cancel()
        if not group.answer.done():
            group.answer.set_result(answer)
        if self._leaving and not self._inside:
            self.kill()

    def kill_when_idle(self) -> None:
        """Kill it once nobody waits for it any more."""
        self._leaving = True
        if not self._inside:
            self.kill()

    def kill(self) -> None:
        """Kill it and what it started."""
        self.ended = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill it and wait until it is gone."""
        self.kill()
        if self._life is not None:
            # not awaited itself: who is cancelled here must not cancel the end of the process
            await asyncio.wait([self._life])
        # its pipes are let go of one turn of the loop later
        await asyncio.sleep(0)
