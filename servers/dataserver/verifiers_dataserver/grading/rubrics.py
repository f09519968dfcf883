"""An environment's own rubric as a grader, in a process of its own.

A rubric may need the network (judges), worker processes of its own (mathematics), or threads, so it runs in a
plain process that has loaded the environment, not in a sandbox. That process is killed when a group takes too
long, for nothing else ends a function that hangs; the next group gets a new one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from verifiers.concurrency import gather_owned
from verifiers.errors import WorkerError, WorkerTimeoutError
from verifiers_dataserver.config import EnvironmentTable
from verifiers_dataserver.grading.graders import Task, failed, score_of
from verifiers_dataserver.grading.rubric_child import RubricChild
from verifiers_dataserver.scores import Score

log = logging.getLogger("verifiers_dataserver")

_GRACE_S = 2.0
_SECOND_CHANCES = 4
"""Processes that groups get for themselves at once, where one of several brought their common one down."""


class RubricGrader:
    """A grader by the rubric of an environment: completions of one prompt in a request are a group.

    Args:
        name: for messages.
        table: which environment, and what it may take.
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
        self._in_line = 0
        self._child: RubricChild | None = None
        # each for one group at a time, which has been in a process that was brought down
        self._apart: list[RubricChild] = []
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
            self._retire(self._child)
            self._child = self._new_child()
        return self._child

    async def _asked(self, child: RubricChild, group: Sequence[Task]) -> list[Any]:
        row = group[0].row.as_json()
        items = [{**asdict(task.completion), "messages": task.completion.as_messages()} for task in group]
        body = {"row": row, "items": items}
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
        """Give a second chance to a group whose process ended, for another group may have ended it."""
        self._in_line += 1
        try:
            await self._second_chances.acquire()
        finally:
            self._in_line -= 1
        try:
            return await self._asked_apart(body)
        finally:
            self._second_chances.release()

    async def _asked_apart(self, body: dict[str, Any]) -> Any:
        while self._apart and not self._apart[-1].usable:
            self._apart.pop()
        child = self._apart.pop() if self._apart else self._new_child()
        try:
            answer = await child.ask(body, self._timeout_s)
        except BaseException:
            if child.loading:
                # the next second chance finds it loaded
                self._apart.append(child)
            else:
                self._retire(child)
            raise
        # one is kept, and one more for each group in line, which takes it in a later turn of the loop
        if child.usable and len(self._apart) <= self._in_line:
            self._apart.append(child)
        else:
            self._retire(child)
        return answer

    def _new_child(self) -> RubricChild:
        if self._closed:
            raise WorkerError("the server is ending")
        self._all = {one for one in self._all if not one.gone}
        child = RubricChild(self._table, self._grace_s)
        self._all.add(child)
        return child

    def _retire(self, child: RubricChild | None) -> None:
        """Give a child no more groups, and kill it once the groups in it have ended."""
        if child is not None:
            child.kill_when_idle()
        if self._child is child:
            self._child = None

    async def close(self) -> None:
        """Kill the processes."""
        self._closed = True
        for child in list(self._all):
            await child.close()


def _score(name: str, result: Any) -> Score:
    if result.get("problem") is not None:
        log.warning("the rubric %r failed: %s", name, result["problem"])
        return Score(problem=f"{name}: the reward function {result['func']!r} failed")
    score = score_of(name, result["reward"])
    return Score(score.value, score.problem, result["metrics"]) if score.value is not None else score
