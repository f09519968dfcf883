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
from verifiers_dataserver.grading.graders import Grader, Task, failed, score_of
from verifiers_dataserver.scores import Score

log = logging.getLogger("verifiers_dataserver")

_GRACE_S = 2.0
_SECOND_CHANCES = 4
"""Processes that groups get for themselves at once, where one of several brought their common one down."""

# long: the server itself loaded the environment at start-up, so loading it succeeds
_LOAD_S = 900.0
_LINE_BYTES = 256 << 20
_COMMAND = (sys.executable, "-m", "verifiers_dataserver.grading.rubric_process")


class RubricGrader(Grader):
    """A grader by the rubric of an environment: completions of one prompt in a request are a group.

    Args:
        environment: the same environment in this process; only asked whether its rubric compares a whole
            group.
        wait_s: seconds that one group may take, waiting for room and for the environment included.
    """

    def __init__(self, name: str, table: EnvironmentTable, environment: Any, wait_s: float) -> None:
        self._name, self._table, self._wait_s = name, table, wait_s
        self._grace_s = min(_GRACE_S, wait_s / 10)
        # so that there is time for a second chance after it
        self._timeout_s = min(table.timeout_s, wait_s / 2 - self._grace_s)
        if "timeout_s" in table.model_fields_set and self._timeout_s < table.timeout_s:
            log.warning(
                "the rubric %r gets %g s for a group instead of its timeout_s of %g, "
                "because server.grade_timeout_s=%g must cover a retry; raise it.",
                name,
                self._timeout_s,
                table.timeout_s,
                wait_s,
            )
        self._in_groups = getattr(environment.rubric, "has_group_funcs", True) is not False
        self._room = asyncio.Semaphore(table.concurrency)
        self._second_chances = asyncio.Semaphore(_SECOND_CHANCES)
        self._child: RubricChild | None = None
        self._all: set[RubricChild] = set()
        self._closed = False

    async def grade(self, tasks: Sequence[Task]) -> list[Score]:
        groups: dict[Any, list[Task]] = {}
        for task in tasks:
            groups.setdefault(task.row.sample_id if self._in_groups else task.index, []).append(task)
        graded = await gather_owned([self._group(group) for group in groups.values()])
        by_index = dict(itertools.chain.from_iterable(graded))
        return [by_index[task.index] for task in tasks]

    async def _group(self, group: Sequence[Task]) -> list[tuple[int, Score]]:
        child: RubricChild | None = None
        try:
            async with asyncio.timeout(self._wait_s), self._room:
                child = self._shared_child()
                results = await self._asked(child, group)
            scores = [_score(self._name, result) for result in results]
        except Exception as error:
            failure = failed(self._name, error)
            # a group without a process was waiting for the shared one
            waited_for = child or self._child
            if isinstance(error, TimeoutError) and waited_for is not None and waited_for.loading:
                failure = Score(problem=f"{self._name}: its environment is still being loaded; ask again later")
            scores = [failure for _ in group]
        return [(task.index, score) for task, score in zip(group, scores, strict=True)]

    def _shared_child(self) -> RubricChild:
        if self._child is None or not self._child.usable:
            self._child = self._new_child()
        return self._child

    async def _asked(self, child: RubricChild, group: Sequence[Task]) -> list[Any]:
        items = [{**asdict(task.completion), "messages": task.completion.as_messages()} for task in group]
        body = {"row": asdict(group[0].row), "items": items}
        try:
            answer = await child.ask(body, self._timeout_s)
        except WorkerTimeoutError:
            # whatever hangs in there would hold up the next groups too
            child.retire()
            raise
        except WorkerError:
            # another group may have ended the process
            async with self._second_chances:
                own = self._new_child()
                try:
                    answer = await own.ask(body, self._timeout_s)
                finally:
                    own.retire()
        results: list[Any] = answer["results"]
        return results

    def _new_child(self) -> RubricChild:
        if self._closed:
            raise WorkerError("the server is ending")
        self._all = {one for one in self._all if not one.gone}
        child = RubricChild(self._table, self._grace_s)
        self._all.add(child)
        return child

    async def close(self) -> None:
        self._closed = True
        for child in list(self._all):
            await child.close()


def _score(name: str, result: Any) -> Score:
    if result.get("problem") is not None:
        log.warning("the rubric %r failed: %s", name, result["problem"])
        return Score(problem=f"{name}: the reward function {result['func']!r} failed")
    score = score_of(name, result["reward"])
    return Score(score.value, score.problem, result["metrics"]) if score.value is not None else score


class RubricChild:
    """A process that starts with the first group, and ends by itself even if nobody waits for it.

    It has loaded an environment and grades groups by its rubric: JSON lines in and out.

    Args:
        grace_s: seconds beyond a group's time after which a process that says nothing is killed.
    """

    def __init__(self, table: EnvironmentTable, grace_s: float) -> None:
        self._table, self._grace_s = table, grace_s
        self._numbers = itertools.count()
        # what requests wait for, and what ends the process where no answer comes, also when nobody waits any more
        self._groups: dict[int, tuple[asyncio.Future[Any], asyncio.TimerHandle]] = {}
        self._asking = 0
        self._retired = False
        self._process: asyncio.subprocess.Process | None = None
        self._life: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self._why = "the rubric's process ended"
        self.ended = False

    @property
    def usable(self) -> bool:
        """False once it has ended, or something hangs in it."""
        return not (self.ended or self._retired)

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
        self._asking += 1
        try:
            if self._life is not None:
                await self._begun.wait()
            if self.ended:
                raise WorkerError(self._why)
            found = await self._answered(body, timeout_s)
        finally:
            self._asking -= 1
            self._kill_where_idle()
        if found.get("timed_out"):
            raise WorkerTimeoutError(f"the rubric did not answer within {timeout_s:g} s")
        return found

    async def _answered(self, body: dict[str, Any], timeout_s: float) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer: asyncio.Future[Any] = loop.create_future()
        self._groups[number] = answer, loop.call_later(timeout_s + self._grace_s, self._too_silent, answer, timeout_s)
        line = json.dumps({"number": number, "timeout_s": timeout_s, **body}) + "\n"
        self._process.stdin.write(line.encode())
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.drain()
        return await answer

    def _too_silent(self, answer: asyncio.Future[Any], timeout_s: float) -> None:
        """Kill a process that does not report a timed-out group: its event loop is blocked."""
        problem = f"the rubric did not answer within {timeout_s:g} s"
        _fail(answer, WorkerTimeoutError(problem))
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
            for answer, silence in self._groups.values():
                silence.cancel()
                _fail(answer, WorkerError(self._why))
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

    def _take(self, found: dict[str, Any]) -> None:
        # also where nobody waits for that group any more: what hangs in there is still there
        self._retired = self._retired or bool(found.get("timed_out"))
        answer, silence = self._groups.pop(found["number"])
        silence.cancel()
        if not answer.done():
            answer.set_result(found)
        self._kill_where_idle()

    def retire(self) -> None:
        """Take no more groups, and end once nobody waits for one."""
        self._retired = True
        self._kill_where_idle()

    def _kill_where_idle(self) -> None:
        if self._retired and not self._asking:
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


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        # nobody may be waiting for it any more
        answer.exception()
