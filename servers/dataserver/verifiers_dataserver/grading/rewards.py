"""The reward of a completion: a weighted mean of its dataset's graders, times its gates."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, WorkerError
from verifiers.sandbox.worker_pool import WorkerPool
from verifiers_dataserver.config import Configuration, DatasetTable, GraderTable, GraderUse, secret_in
from verifiers_dataserver.datasets import TaskRows
from verifiers_dataserver.grading.graders import (
    BuiltinGrader,
    Grader,
    HttpGrader,
    MathGrader,
    PythonGrader,
    Task,
    failed,
)
from verifiers_dataserver.grading.rubrics import RubricGrader
from verifiers_dataserver.scores import BUILTIN, JsonSchema, Score
from verifiers_dataserver.tasks import is_answer_from

log = logging.getLogger("verifiers_dataserver")

_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    grader: Grader
    weight: float
    gate: bool


@dataclass(frozen=True, slots=True)
class DatasetReward:
    """The reward of one dataset's completions; what has no score after `timeout_s` seconds is a failure."""

    parts: Sequence[Part]
    timeout_s: float

    async def grade(self, tasks: Sequence[Task]) -> list[Score]:
        """Return the reward of each task: the mean of the scores by weight, times the product of the gates.

        One failed grader makes it a failure: a reward without it would be another reward.
        """
        columns = await gather_owned([self._column(part, tasks) for part in self.parts])
        return [self._combined([column[place] for column in columns]) for place in range(len(tasks))]

    async def _column(self, part: Part, tasks: Sequence[Task]) -> list[Score]:
        try:
            # graders give each completion its time; this is for one that does not
            async with asyncio.timeout(self.timeout_s + _GRACE_S):
                return await part.grader.grade(tasks)
        except TimeoutError as error:
            failure = failed(part.name, error)
            return [failure for _ in tasks]

    def _combined(self, scores: Sequence[Score]) -> Score:
        metrics: dict[str, float] = {}
        total = weights = 0.0
        gates = 1.0
        problem: str | None = None
        for part, score in zip(self.parts, scores, strict=True):
            metrics.update({name: value for name, value in score.metrics.items() if math.isfinite(value)})
            if score.value is None:
                problem = problem or score.problem
                continue
            metrics[part.name] = score.value
            if part.gate:
                gates *= score.value
            else:
                total += part.weight * score.value
                weights += part.weight
        if problem is not None:
            return Score(problem=problem, metrics=metrics)
        reward = total / weights * gates
        # scores and weights that are finite each may still be too large together
        if not (math.isfinite(reward) and math.isfinite(weights)):
            return Score(problem="reward: the scores together give no finite number", metrics=metrics)
        return Score(reward, metrics=metrics)


@dataclass(slots=True)
class Rewards:
    """The rewards of all datasets, with the processes and connections behind them."""

    by_dataset: dict[str, DatasetReward] = field(default_factory=dict)
    _owned: list[Grader] = field(default_factory=list)
    _pools: list[WorkerPool] = field(default_factory=list)

    @classmethod
    def build(cls, configuration: Configuration, datasets: dict[str, TaskRows]) -> Rewards:
        """Return the graders of a configuration; processes start when they are needed. Raises ConfigError."""
        rewards = cls()
        try:
            rewards._add_all(configuration, datasets)
        except BaseException:
            rewards._close_pools()
            raise
        return rewards

    def _add_all(self, configuration: Configuration, datasets: dict[str, TaskRows]) -> None:
        pool = WorkerPool(
            workers=2,
            timeout_s=10.0,
            preload=["verifiers_dataserver.grading.worker_functions"],
            name="built-in graders",
        )
        self._pools.append(pool)
        for name, rows in datasets.items():
            parts = []
            for use in rows.table.uses():
                try:
                    grader = self._grader(use, rows, configuration, pool)
                except ConfigError as error:
                    raise ConfigError(f"datasets.{name}.graders: {use.shown_as!r}: {error}") from None
                self._owned.append(grader)
                parts.append(Part(use.shown_as, grader, use.weight, use.gate))
            self.by_dataset[name] = DatasetReward(parts, configuration.server.grade_timeout_s)

    def _grader(self, use: GraderUse, rows: TaskRows, configuration: Configuration, pool: WorkerPool) -> Grader:
        name, options, wait_s = use.shown_as, use.options, configuration.server.grade_timeout_s
        if use.use == "rubric":
            _no_more(options, use.use)
            assert rows.table.environment is not None
            return RubricGrader(name, rows.table.environment, rows.environment, wait_s)
        if use.use == "math":
            place = _answer_from(options, rows.table)
            timeout_s = options.pop("timeout_s", 5.0)
            if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
                raise ConfigError(f"timeout_s is {timeout_s!r}; give a number of seconds above 0.")
            _no_more(options, "math", "answer_from", "timeout_s")
            return MathGrader(name, place, timeout_s, wait_s)
        if use.use in BUILTIN:
            return BuiltinGrader(name, use.use, _scorer(use.use, options, rows.table), pool, wait_s)
        table = configuration.graders[use.use]
        if table.http is not None:
            _no_more(options, use.use)
            return HttpGrader(name, table.http, table.timeout_s, secret_in(table.token_var))
        return self._python(name, use.use, table, options, rows, configuration)

    def _python(
        self,
        name: str,
        key: str,
        table: GraderTable,
        options: dict[str, Any],
        rows: TaskRows,
        configuration: Configuration,
    ) -> Grader:
        assert table.python is not None
        paths = [] if table.path is None else [str(configuration.resolve(table.path))]
        for path in paths:
            if not Path(path).is_dir():
                raise ConfigError(f"graders.{key}.path is {path!r}, which is not a directory; give the module's.")
        module = table.python.partition(":")[0]
        pool = WorkerPool(
            workers=table.workers,
            timeout_s=table.timeout_s,
            preload=["verifiers_dataserver.grading.worker_functions", module],
            paths=paths,
            name=name,
        )
        self._pools.append(pool)
        place = _answer_from(options, rows.table)
        try:
            json.dumps(options)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"its options {options!r:.80} are not JSON ({error}); give texts and numbers."
            ) from None
        self._check(key, table.python, pool)
        return PythonGrader(name, table.python, options, place, pool, configuration.server.grade_timeout_s)

    @staticmethod
    def _check(key: str, target: str, pool: WorkerPool) -> None:
        """Look the function up where it will run: a wrong name is found out at the start."""
        remedy = "give graders its module's directory as path, or install it"
        try:
            problem = pool.call_blocking(
                "verifiers_dataserver.grading.worker_functions:check_grader", target, timeout_s=30.0
            )
        except WorkerError as error:
            raise ConfigError(f"graders.{key}.python is {target!r}: {error} {remedy.capitalize()}.") from error
        if problem is not None:
            raise ConfigError(f"graders.{key}.python is {target!r}: {problem}; {remedy}.")

    async def close(self) -> None:
        for grader in self._owned:
            await grader.close()
        await asyncio.to_thread(self._close_pools)

    def _close_pools(self) -> None:
        for pool in self._pools:
            pool.close()


def _scorer(key: str, options: dict[str, Any], table: DatasetTable) -> Any:
    kind = BUILTIN[key]
    names = list(kind.__dataclass_fields__)
    if "answer_from" in names:
        options["answer_from"] = _answer_from(options, table)
    _no_more(options, key, *names)
    try:
        # the options as the types that the grader declares, which it does not check itself
        checked = TypeAdapter(kind).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or key
        raise ConfigError(f"{where} is {first['input']!r:.80}: {first['msg'].lower()}.") from None
    if isinstance(checked, JsonSchema):
        checked.check()
    return checked


def _answer_from(options: dict[str, Any], table: DatasetTable) -> str:
    how = options.pop("answer_from", table.answer_from)
    if not isinstance(how, str) or not is_answer_from(how):
        raise ConfigError(f"answer_from is {how!r}; give 'text', 'after_think', 'boxed' or 'xml:TAG'.")
    return how


def _no_more(options: dict[str, Any], key: str, *known: str) -> None:
    for name in options:
        if name not in known:
            raise ConfigError(f"{key!r} has no option {name!r}; it takes {', '.join(sorted(known)) or 'none'}.")
