"""An environment's own rubric as a grader, in a process of its own.

A rubric may need the network (judges), worker processes of its own (mathematics), or threads, so it runs in a
plain process that has loaded the environment, not in a sandbox. That process is killed when a group takes too
long, for nothing else ends a function that hangs; the next group gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from verifiers.concurrency import gather_owned
from verifiers.errors import WorkerError, WorkerTimeoutError

from verifiers_dataserver.config import EnvironmentTable
from verifiers_dataserver.graders import Task, failed, score_of
from verifiers_dataserver.scores import Score

__all__ = ["RubricGrader"]

log = logging.getLogger(__name__)

_START_S = 120.0
_GRACE_S = 2.0
_LINE_BYTES = 256 << 20


class RubricGrader:
    """Grades by the rubric of an environment: completions of one prompt in a request are a group.

    Args:
        name: for messages.
        table: which environment, and what it may take.
        environment: the same environment in this process; only asked whether its rubric compares a whole
            group.
        wait_s: seconds that one group may take, waiting for room included.
    """

    def __init__(self, name: str, table: EnvironmentTable, environment: Any, wait_s: float) -> None:
        self._name, self._table, self._wait_s = name, table, wait_s
        # so that it is this process that says what took too long, and replaces it
        self._timeout_s = max(0.1, min(table.timeout_s, wait_s - 2 * _GRACE_S))
        self._in_groups = getattr(environment.rubric, "has_group_funcs", True) is not False
        self._room = asyncio.Semaphore(table.concurrency)
        self._child: _Child | None = None
        self._leaving: set[_Child] = set()
        self._alone = asyncio.Lock()
        self._apart: _Child | None = None
        self._closed = False

    async def grade(self, tasks: Sequence[Task]) -> list[Score]:
        groups: dict[Any, list[Task]] = {}
        for task in tasks:
            groups.setdefault(task.row.sample_id if self._in_groups else task.index, []).append(task)
        graded = await gather_owned([self._group(group) for group in groups.values()])
        by_index = dict(itertools.chain.from_iterable(graded))
        return [by_index[task.index] for task in tasks]

    async def _group(self, group: Sequence[Task]) -> list[tuple[int, Score]]:
        try:
            async with asyncio.timeout(self._wait_s), self._room:
                results = await self._asked(group)
            scores = [_score(self._name, result) for result in results]
        except Exception as error:
            scores = [failed(self._name, error) for _ in group]
        return [(task.index, score) for task, score in zip(group, scores, strict=True)]

    async def _asked(self, group: Sequence[Task]) -> list[Any]:
        row = group[0].row.as_json()
        items = [{**asdict(task.completion), "messages": task.completion.as_messages()} for task in group]
        body = {"row": row, "items": items}
        child = self._current()
        try:
            answer = await child.ask(body, self._timeout_s)
        except WorkerTimeoutError:
            # whatever hangs in there would hold up the next groups too
            self._retire(child)
            raise
        except WorkerError:
            self._retire(child)
            answer = await self._asked_alone(body)
        results: list[Any] = answer["results"]
        return results

    async def _asked_alone(self, body: dict[str, Any]) -> Any:
        """A second chance for a group whose process ended, for another one may have brought it down."""
        async with self._alone:
            if self._closed:
                raise WorkerError("the server is ending")
            if self._apart is not None and not self._apart.usable:
                self._retire(self._apart)
                self._apart = None
            if self._apart is None:
                self._apart = _Child(self._table)
            try:
                return await self._apart.ask(body, self._timeout_s)
            except WorkerError:
                self._retire(self._apart)
                self._apart = None
                raise

    def _current(self) -> _Child:
        if self._closed:
            raise WorkerError("the server is ending")
        if self._child is not None and not self._child.usable:
            self._retire(self._child)
        if self._child is None:
            self._child = _Child(self._table)
        return self._child

    def _retire(self, child: _Child) -> None:
        """Let nobody else in; it is killed when the groups in it have ended, each in its own time."""
        if self._child is child:
            self._child = None
        self._leaving.add(child)
        child.kill_when_idle()
        self._leaving -= {one for one in self._leaving if one.gone}

    async def close(self) -> None:
        """Kill the process."""
        self._closed = True
        children = [*self._leaving, *(child for child in (self._child, self._apart) if child is not None)]
        self._child = self._apart = None
        for child in children:
            await child.close()


def _score(name: str, result: Any) -> Score:
    if result.get("problem") is not None:
        log.warning("the rubric %r failed: %s", name, result["problem"])
        return Score(problem=f"{name}: the reward function {result['func']!r} failed")
    score = score_of(name, result["reward"])
    return Score(score.value, score.problem, result["metrics"]) if score.value is not None else score


class _Child:
    """A process that grades groups: JSON lines on its standard input and output."""

    def __init__(self, table: EnvironmentTable) -> None:
        self._table = table
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._leaving = False
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self.ended = False

    @property
    def usable(self) -> bool:
        """False once it has ended, or something hangs in it."""
        return not (self.ended or self._leaving)

    @property
    def gone(self) -> bool:
        """True once nothing of it is left, the task that read its answers included."""
        return self.ended and (self._reading is None or self._reading.done())

    async def ask(self, body: dict[str, Any], timeout_s: float) -> Any:
        """The answer to one group.

        Raises:
            WorkerTimeoutError: it did not come in time.
            WorkerError: the process ended first, or could not be started.
        """
        await self._started()
        process = self._process
        if self.ended or process is None or process.stdin is None:
            raise WorkerError("the rubric's process has ended")
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                line = json.dumps({"number": number, "timeout_s": timeout_s, **body}) + "\n"
                process.stdin.write(line.encode())
                with contextlib.suppress(ConnectionError):
                    await process.stdin.drain()
                found = await answer
        except TimeoutError:
            self.kill()
            raise WorkerTimeoutError(f"the rubric did not answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(number, None)
            if self._leaving and not self._waiting:
                self.kill()
        if found.get("timed_out"):
            raise WorkerTimeoutError(f"the rubric did not answer within {timeout_s:g} s")
        return found

    async def _started(self) -> None:
        async with self._starting:
            if self._process is not None or self.ended:
                return
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "verifiers_dataserver.rubric_process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=_LINE_BYTES,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(_START_S):
                    first = {"id": self._table.id, "args": self._table.args}
                    process.stdin.write((json.dumps(first) + "\n").encode())
                    ready = await process.stdout.readline()
            except TimeoutError:
                ready = b""
            if not ready:
                await self.close()
                raise WorkerError(
                    f"the environment {self._table.id!r} could not be loaded in a process of its own"
                )
            self._reading = asyncio.create_task(self._read(process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                answer = json.loads(line)
                if answer.get("timed_out"):
                    # also where nobody waits for that group any more: what hangs in there is still there
                    self._leaving = True
                future = self._waiting.get(answer["number"])
                if future is not None and not future.done():
                    future.set_result(answer)
        finally:
            self.kill()
            await process.wait()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(WorkerError("the rubric's process ended"))

    def kill_when_idle(self) -> None:
        """Kill it once nobody waits for it any more."""
        self._leaving = True
        if not self._waiting:
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
        if self._reading is not None:
            await self._reading
        elif self._process is not None:
            await self._process.wait()
        # its pipes are let go of one turn of the loop later
        await asyncio.sleep(0)
