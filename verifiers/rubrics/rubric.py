"""Rubric: reward functions and their weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, GradingError
from verifiers.parsers.parser import Parser
from verifiers.rubrics.calling import PreparedCall, function_of, in_turn, parameters_of, reward_name
from verifiers.rubrics.rows import (
    Row,
    add_scoring_time,
    columns_of_rows,
    finite,
    gives_state_only,
    row_of_state,
    rows_of_columns,
    score_from,
    scores_from,
    set_score,
)
from verifiers.types import Info, Messages, RewardFunc, RolloutScore, RolloutScores, State

__all__ = ["Rubric"]

MAX_PREPARED_CALLS = 1024


class Rubric:
    """Scores rollouts by reward functions: the reward is their weighted sum, the metrics are their plain values.

    A reward function is sync or async, and names what it wants among prompt, completion, answer, state, task, info,
    parser and the class objects; `**kwargs` receives all of it. One that names prompts, completions, answers,
    states, tasks or infos is a group function: it sees all rollouts of a prompt and returns a float for each.

    A function that raises or gives no finite number counts 0.0 in the sum, as it always did, but the failure is
    noted in `state["grading_errors"]`, a list of {"func", "error"}, so that no failed grade passes for a reward of
    zero. Metrics of functions with the same name add up.

    Args:
        funcs: reward functions.
        weights: one for each function; 1.0 each when left out.
        parser: given to functions that ask for it; a plain `Parser` when left out.
        parallelize_scoring: functions of one rollout run side by side; False: one after the other, in order.
        **kwargs: every further keyword becomes an attribute.

    Raises:
        ConfigError (a ValueError): not as many weights as functions.
    """

    def __init__(
        self,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Parser | None = None,
        parallelize_scoring: bool = True,
        **kwargs: Any,
    ) -> None:
        self.logger = logging.getLogger(f"verifiers.rubrics.{type(self).__name__}")
        self.reward_funcs: list[RewardFunc] = list(funcs or [])
        self.reward_weights: list[float] = list(weights if weights is not None else [])
        if not self.reward_weights:
            self.reward_weights = [1.0] * len(self.reward_funcs)
        self.parser = parser if parser is not None else Parser()
        self.parallelize_scoring = parallelize_scoring
        self.class_objects: dict[str, Any] = {"parser": self.parser}
        self._prepared_calls: dict[int, PreparedCall] = {}
        self._seen_failing: set[str] = set()
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._check_weights()

    # -- functions ------------------------------------------------------------------------------------------

    @property
    def funcs(self) -> list[RewardFunc]:
        """Second generation's name of `reward_funcs`."""
        return self.reward_funcs

    @funcs.setter
    def funcs(self, funcs: list[RewardFunc]) -> None:
        self.reward_funcs = funcs

    @property
    def weights(self) -> list[float]:
        """Second generation's name of `reward_weights`."""
        return self.reward_weights

    @weights.setter
    def weights(self, weights: list[float]) -> None:
        self.reward_weights = weights

    def get_reward_func_names(self) -> list[str]:
        """The functions' names, which are the metrics' names."""
        return [reward_name(func) for func in self.get_reward_funcs()]

    def get_reward_funcs(self) -> list[RewardFunc]:
        """The reward functions."""
        return self.reward_funcs

    def get_reward_weights(self) -> list[float]:
        """The weights, one a function."""
        return self.reward_weights

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a function to the weighted sum."""
        self.reward_funcs.append(func)
        self.reward_weights.append(weight)

    def add_metric(self, func: RewardFunc, weight: float = 0.0) -> None:
        """Add a function that is shown among the metrics and, unless given a weight, does not change the reward."""
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        """Make an object available to every function that has a parameter of this name."""
        self.class_objects[name] = value

    @property
    def has_group_funcs(self) -> bool:
        """True where some function needs a prompt's whole group: `score_group` can score it, nothing else."""
        return any(self._prepared(func).is_group for func in self.reward_funcs)

    # -- scoring --------------------------------------------------------------------------------------------

    async def call_reward_func(
        self,
        func: RewardFunc,
        prompt: Messages,
        completion: Messages,
        answer: Any,
        state: State,
        task: str = "default",
        info: Info | None = None,
        **kwargs: Any,
    ) -> float:
        """One function's value for one rollout.

        Returns:
            0.0 where the function raises or gives no finite number; `state["grading_errors"]` then says so.
        """
        row = Row(prompt, completion, answer, state, task, info if info is not None else {})
        call = self._prepared(func)
        try:
            return finite(await call({**row.values(), **self.class_objects, **kwargs}))
        except (Exception, SystemExit) as error:
            self._record_failure(call.name, [state], error)
            return 0.0

    async def score_rollout(self, *args: Any, **kwargs: Any) -> RolloutScore:
        """Score one rollout, called in either generation's way.

        First: `score_rollout(prompt, completion, answer, state, task="default", info=None, **kwargs)` returns the
        score. Second: `score_rollout(state, score_sem=None)` also sets `state["reward"]` and `state["metrics"]`.

        Raises:
            ConfigError: the rubric has group functions, which one rollout cannot answer; use `score_group`.
        """
        if not gives_state_only(args, kwargs):
            return await self._score_columns(*args, **kwargs)
        return await self._score_state(*args, **kwargs)

    async def score_rollouts(
        self,
        prompts: Sequence[Messages],
        completions: Sequence[Messages],
        answers: Sequence[Any],
        states: Sequence[State],
        tasks: Sequence[str] | None = None,
        infos: Sequence[Info] | None = None,
        max_concurrent: int = -1,
        **kwargs: Any,
    ) -> RolloutScores:
        """Score many rollouts, each by itself, through `score_rollout`.

        Args:
            max_concurrent: rollouts scored at once; -1 for no bound.

        Raises:
            ConfigError: columns of differing lengths, or group functions, which need `score_group`.
        """
        rows = rows_of_columns(prompts, completions, answers, states, tasks, infos)
        scores = await self._row_scores(rows, max_concurrent, kwargs)
        names = dict.fromkeys(name for score in scores for name in score.metrics)
        if not scores:
            names = dict.fromkeys(self.get_reward_func_names())
        metrics = {name: [float(score.metrics.get(name, 0.0)) for score in scores] for name in names}
        return RolloutScores(reward=[score.reward for score in scores], metrics=metrics)

    async def score_group(self, states: Sequence[State], score_sem: Any = None) -> None:
        """Score the rollouts of one prompt together; sets `reward` and `metrics` in each state.

        A subclass that overrides `score_rollout` or `score_rollouts` alone is asked for each rollout, or for all;
        an override that raises is a failed grade of the rollouts it was asked for.

        Args:
            score_sem: an async context manager, entered around each rollout's functions and each group function.
        """
        started = time.perf_counter()
        rows = [row_of_state(state) for state in states]
        scores = await self._group_scores(rows, score_sem)
        for row, score in zip(rows, scores, strict=True):
            set_score(row.state, score)
        if not self._is_overridden():
            add_scoring_time(states, started)

    # -- parts of scoring -----------------------------------------------------------------------------------

    async def _score_columns(
        self,
        prompt: Messages,
        completion: Messages,
        answer: Any = "",
        state: State | None = None,
        task: str = "default",
        info: Info | None = None,
        **kwargs: Any,
    ) -> RolloutScore:
        self._refuse_group_funcs()
        row = Row(prompt, completion, answer, state if state is not None else State(), task, info or {})
        return await self._single_score(row, None, kwargs)

    async def _score_state(self, state: State, score_sem: Any = None) -> RolloutScore:
        self._refuse_group_funcs()
        started = time.perf_counter()
        score = await self._single_score(row_of_state(state), score_sem, {})
        set_score(state, score)
        add_scoring_time([state], started)
        return score

    async def _values(self, rows: Sequence[Row], score_sem: Any, extra: Mapping[str, Any]) -> list[list[float]]:
        """Each function's value for each row, in the order of the functions; group functions run last."""
        self._check_weights()
        calls = [self._prepared(func) for func in self.reward_funcs]
        values = [[0.0] * len(calls) for _ in rows]
        gate = score_sem if score_sem is not None else contextlib.nullcontext()
        single = {index: call for index, call in enumerate(calls) if not call.is_group}
        # an override of call_reward_func may wait for anything, whatever the function is like
        overridden = function_of(self.call_reward_func) is not Rubric.call_reward_func

        async def score(row: Row, into: list[float]) -> None:
            async def one(index: int) -> None:
                into[index] = await self.call_reward_func(single[index].func, **row.values(), **extra)

            waiting = [index for index, call in single.items() if overridden or call.waits]
            side_by_side = self.parallelize_scoring and len(waiting) > 1
            async with gate:
                for index in single:
                    if not side_by_side or index not in waiting:
                        await one(index)
                if side_by_side:
                    await gather_owned([one(index) for index in waiting])

        if any(overridden or call.waits for call in single.values()) and len(rows) > 1:
            await gather_owned([score(row, into) for row, into in zip(rows, values, strict=True)])
        elif single:
            await in_turn(score, rows, values)
        for index, call in enumerate(calls):
            if call.is_group and rows:
                async with gate:
                    column = await self._call_group_func(call, rows, extra)
                for into, value in zip(values, column, strict=True):
                    into[index] = value
        return values

    async def _call_group_func(
        self, call: PreparedCall, rows: Sequence[Row], extra: Mapping[str, Any]
    ) -> list[float]:
        states = [row.state for row in rows]
        try:
            results = list(await call({**columns_of_rows(rows), **self.class_objects, **extra}))
            if len(results) != len(rows):
                raise GradingError(f"returned {len(results)} rewards for {len(rows)} rollouts")
        except (Exception, SystemExit) as error:
            self._record_failure(call.name, states, error)
            return [0.0] * len(rows)
        values = []
        for state, result in zip(states, results, strict=True):
            try:
                values.append(finite(result))
            except GradingError as error:
                self._record_failure(call.name, [state], error)
                values.append(0.0)
        return values

    async def _score_row(self, row: Row, score_sem: Any, extra: Mapping[str, Any]) -> RolloutScore:
        """A row's score by `score_rollout`, whichever generation a subclass has written it for."""
        if function_of(self.score_rollout) is Rubric.score_rollout:
            return await self._score_columns(**row.values(), **extra)
        names, takes_everything = parameters_of(function_of(self.score_rollout))
        arguments = {**row.values(), **extra}
        if "state" in names and "completion" not in names:
            arguments = {"state": row.state}
            if "score_sem" in names:
                arguments["score_sem"] = score_sem if score_sem is not None else contextlib.nullcontext()
        elif not takes_everything:
            arguments = {name: value for name, value in arguments.items() if name in names}
        return score_from(await self.score_rollout(**arguments), row.state)

    def _is_overridden(self) -> bool:
        """True where a subclass scores rollouts, or columns of them, in its own way."""
        return (
            function_of(self.score_rollout) is not Rubric.score_rollout
            or function_of(self.score_rollouts) is not Rubric.score_rollouts
        )

    async def _group_scores(self, rows: Sequence[Row], score_sem: Any) -> list[RolloutScore]:
        """The scores of a group's rows, in order; what fails is noted in the row's state."""
        if function_of(self.score_rollout) is not Rubric.score_rollout:
            return await gather_owned([self._row_score(row, score_sem) for row in rows])
        if function_of(self.score_rollouts) is not Rubric.score_rollouts:
            return await self._column_scores(rows)
        return await self._function_scores(rows, score_sem)

    async def _function_scores(self, rows: Sequence[Row], score_sem: Any) -> list[RolloutScore]:
        """A group's scores by the reward functions, whatever a subclass makes of rollouts."""
        return [self._combine(of_row) for of_row in await self._values(rows, score_sem, {})]

    async def _single_score(self, row: Row, score_sem: Any, extra: Mapping[str, Any]) -> RolloutScore:
        """The score by the reward functions of a row that has no group."""
        return self._combine((await self._values([row], score_sem, extra))[0])

    async def _row_scores(
        self, rows: Sequence[Row], max_concurrent: int, extra: Mapping[str, Any]
    ) -> list[RolloutScore]:
        """The scores of rows that are no group, through `score_rollout`."""
        limit = asyncio.Semaphore(max_concurrent) if max_concurrent > 0 else contextlib.nullcontext()

        async def one(row: Row) -> RolloutScore:
            async with limit:
                return await self._score_row(row, None, extra)

        return await gather_owned([one(row) for row in rows])

    async def _row_score(self, row: Row, score_sem: Any) -> RolloutScore:
        try:
            return await self._score_row(row, score_sem, {})
        except (Exception, SystemExit) as error:
            self._record_failure("score_rollout", [row.state], error)
            return RolloutScore(0.0)

    async def _column_scores(self, rows: Sequence[Row]) -> list[RolloutScore]:
        columns: dict[str, Any] = columns_of_rows(rows)
        names, takes_everything = parameters_of(function_of(self.score_rollouts))
        if not takes_everything:
            columns = {name: column for name, column in columns.items() if name in names}
        try:
            return scores_from(await self.score_rollouts(**columns), len(rows))
        except (Exception, SystemExit) as error:
            self._record_failure("score_rollouts", [row.state for row in rows], error)
            return [RolloutScore(0.0) for _ in rows]

    def _combine(self, values: Sequence[float]) -> RolloutScore:
        reward = 0.0
        metrics: dict[str, float] = {}
        for func, weight, value in zip(self.reward_funcs, self.reward_weights, values, strict=True):
            name = self._prepared(func).name
            reward += weight * value
            metrics[name] = metrics.get(name, 0.0) + value
        return RolloutScore(reward, metrics)

    def _prepared(self, func: Callable[..., Any]) -> PreparedCall:
        call = self._prepared_calls.get(id(func))
        # an id is only as good as the object that holds it: copies and freed functions reuse numbers
        if call is None or call.func is not func:
            if len(self._prepared_calls) >= MAX_PREPARED_CALLS:
                self._prepared_calls.clear()
            call = self._prepared_calls[id(func)] = PreparedCall(func)
        return call

    def _check_weights(self) -> None:
        if len(self.reward_funcs) != len(self.reward_weights):
            raise ConfigError(
                f"The rubric has {len(self.reward_funcs)} reward functions but {len(self.reward_weights)} weights; "
                "give each function one weight."
            )

    def _refuse_group_funcs(self) -> None:
        for func in self.reward_funcs:
            if self._prepared(func).is_group:
                raise ConfigError(
                    f"The reward function {self._prepared(func).name!r} compares the rollouts of a whole group, "
                    "so a single rollout cannot be scored; use score_group."
                )

    def _record_failure(self, name: str, states: Sequence[Any], error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        # a function that fails once tends to fail always: one traceback is enough
        first = None if name in self._seen_failing else error
        self._seen_failing.add(name)
        self.logger.error("The reward function %s failed: %s", name, text, exc_info=first)
        for state in states:
            if isinstance(state, MutableMapping):
                state.setdefault("grading_errors", []).append({"func": name, "error": text})
