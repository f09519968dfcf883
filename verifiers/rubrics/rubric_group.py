"""RubricGroup: several rubrics whose rewards are summed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, GradingError
from verifiers.rubrics.calling import function_of, parameters_of
from verifiers.rubrics.rows import Row, columns_of_rows, score_from, scores_from
from verifiers.rubrics.rubric import Rubric
from verifiers.types import Info, Messages, RewardFunc, RolloutScore, State

__all__ = ["RubricGroup"]


class RubricGroup(Rubric):
    """Scores rollouts by several rubrics, each with its own functions, weights, parser and class objects.

    The reward is the sum of the rubrics' rewards; metrics of one name add up. Rubrics are asked one after the
    other, so a later one can read what an earlier one has left in the state. A rubric that scores in its own way
    (it overrides score_rollout, score_rollouts or score_group) and raises is a failed grade of the rollouts it was
    asked for. Groups may stand in groups.

    `reward_funcs`, `reward_weights` and `class_objects` show the union of the rubrics'; to change them, use
    `add_reward_func`, `add_metric` and `add_class_object`, which go to the first rubric, or the rubric itself.

    Args:
        rubrics: one or more.
        **kwargs: every further keyword becomes an attribute; `parser` is the first rubric's when left out.

    Raises:
        ConfigError (a ValueError): no rubrics.
    """

    def __init__(self, rubrics: Sequence[Rubric], **kwargs: Any) -> None:
        # the base class would keep functions of its own, which a group does not have
        if not rubrics:
            raise ConfigError("A RubricGroup must have at least one rubric, but rubrics is empty.")
        self.logger = logging.getLogger(f"verifiers.rubrics.{type(self).__name__}")
        self.rubrics: list[Rubric] = list(rubrics)
        self.parser = kwargs.pop("parser", None) or self.rubrics[0].parser
        self.parallelize_scoring = True
        self._prepared_calls = {}
        self._seen_failing = set()
        for name, value in kwargs.items():
            setattr(self, name, value)

    # -- the union of the rubrics -----------------------------------------------------------------------------

    @property
    def reward_funcs(self) -> list[RewardFunc]:
        """The functions of all rubrics, in order."""
        return [func for rubric in self.rubrics for func in rubric.get_reward_funcs()]

    @reward_funcs.setter
    def reward_funcs(self, funcs: list[RewardFunc]) -> None:
        raise ConfigError("A RubricGroup has no functions of its own; give them to one of its rubrics.")

    @property
    def reward_weights(self) -> list[float]:
        """The weights of all rubrics, one a function."""
        return [weight for rubric in self.rubrics for weight in rubric.get_reward_weights()]

    @reward_weights.setter
    def reward_weights(self, weights: list[float]) -> None:
        raise ConfigError("A RubricGroup has no weights of its own; give them to one of its rubrics.")

    @property
    def class_objects(self) -> dict[str, Any]:  # type: ignore[override]
        """The class objects of all rubrics; of two with one name the first rubric's is shown."""
        merged: dict[str, Any] = {}
        for rubric in reversed(self.rubrics):
            merged.update(rubric.class_objects)
        return merged

    def get_reward_func_names(self) -> list[str]:
        """The functions' names, which are the metrics' names."""
        return [name for rubric in self.rubrics for name in rubric.get_reward_func_names()]

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a function to the first rubric's weighted sum."""
        self.rubrics[0].add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        """Make an object available to every function of the first rubric that has a parameter of this name."""
        self.rubrics[0].add_class_object(name, value)

    @property
    def has_group_funcs(self) -> bool:
        """True where some rubric needs a prompt's whole group: `score_group` can score it, nothing else."""
        return any(rubric.has_group_funcs for rubric in self.rubrics)

    def _refuse_group_funcs(self) -> None:
        for rubric in self.rubrics:
            rubric._refuse_group_funcs()

    # -- scoring ----------------------------------------------------------------------------------------------

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
        """One function's value for one rollout, as the rubric that has the function gives it.

        A function of none of them is called by the first.
        """
        owners = [rubric for rubric in self.rubrics if func in rubric.get_reward_funcs()]
        owner = owners[0] if owners else self.rubrics[0]
        return await owner.call_reward_func(func, prompt, completion, answer, state, task, info, **kwargs)

    async def _single_score(self, row: Row, score_sem: Any, extra: Mapping[str, Any]) -> RolloutScore:
        total = RolloutScore(0.0)
        for rubric in self.rubrics:
            _add(total, await self._score_by(rubric, row, score_sem, extra))
        return total

    async def _row_scores(
        self, rows: Sequence[Row], max_concurrent: int, extra: Mapping[str, Any]
    ) -> list[RolloutScore]:
        self._refuse_group_funcs()
        totals = [RolloutScore(0.0) for _ in rows]
        limit = asyncio.Semaphore(max_concurrent) if max_concurrent > 0 else contextlib.nullcontext()

        async def one(rubric: Rubric, row: Row) -> RolloutScore:
            async with limit:
                return await self._score_by(rubric, row, None, extra)

        for rubric in self.rubrics:
            if function_of(rubric.score_rollouts) is Rubric.score_rollouts:
                scores = await gather_owned([one(rubric, row) for row in rows])
            else:
                scores = await self._score_columns_by(rubric, rows, {"max_concurrent": max_concurrent, **extra})
            for total, score in zip(totals, scores, strict=True):
                _add(total, score)
        return totals

    async def _function_scores(self, rows: Sequence[Row], score_sem: Any) -> list[RolloutScore]:
        totals = [RolloutScore(0.0) for _ in rows]
        for rubric in self.rubrics:
            for row in rows:
                _forget_score(row)
            if function_of(rubric.score_group) is Rubric.score_group:
                scores = await rubric._group_scores(rows, score_sem)
            else:
                scores = await self._score_group_by(rubric, rows, score_sem)
            for total, score in zip(totals, scores, strict=True):
                _add(total, score)
        return totals

    async def _score_by(self, rubric: Rubric, row: Row, score_sem: Any, extra: Mapping[str, Any]) -> RolloutScore:
        if function_of(rubric.score_rollout) is not Rubric.score_rollout:
            _forget_score(row)
        try:
            return await rubric._score_row(row, score_sem, extra)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            self._record_failure("score_rollout", [row.state], error)
            return RolloutScore(0.0)

    async def _score_columns_by(
        self, rubric: Rubric, rows: Sequence[Row], extra: Mapping[str, Any]
    ) -> list[RolloutScore]:
        columns = {**columns_of_rows(rows), **extra}
        names, takes_everything = parameters_of(function_of(rubric.score_rollouts))
        if not takes_everything:
            columns = {name: column for name, column in columns.items() if name in names}
        try:
            return scores_from(await rubric.score_rollouts(**columns), len(rows))
        except (Exception, SystemExit) as error:
            self._record_failure("score_rollouts", [row.state for row in rows], error)
            return [RolloutScore(0.0) for _ in rows]

    async def _score_group_by(self, rubric: Rubric, rows: Sequence[Row], score_sem: Any) -> list[RolloutScore]:
        """The scores of a rubric that overrides `score_group`, which sets them in the states."""
        names, takes_everything = parameters_of(function_of(rubric.score_group))
        semaphore = {"score_sem": score_sem} if takes_everything or "score_sem" in names else {}
        try:
            await rubric.score_group([row.state for row in rows], **semaphore)
        except (Exception, SystemExit) as error:
            self._record_failure("score_group", [row.state for row in rows], error)
            return [RolloutScore(0.0) for _ in rows]
        scores = []
        for row in rows:
            try:
                scores.append(score_from(None, row.state))
            except GradingError as error:
                self._record_failure("score_group", [row.state], error)
                scores.append(RolloutScore(0.0))
        return scores


def _forget_score(row: Row) -> None:
    # a rubric that forgets to set its score must not be credited with that of the one before it
    for name in ("reward", "metrics"):
        row.state.pop(name, None)


def _add(total: RolloutScore, score: RolloutScore) -> None:
    total.reward += score.reward
    for name, value in score.metrics.items():
        total.metrics[name] = total.metrics.get(name, 0.0) + value
