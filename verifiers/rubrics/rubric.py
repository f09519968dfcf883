"""Rubric: reward functions and their weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, GradingError
from verifiers.keywords import set_extra_keywords, warn_once
from verifiers.parsers.parser import Parser
from verifiers.rubrics.overrides import (
    call_score_rollout,
    first_generation_call,
    is_state_call,
    override_scores,
    second_generation_call,
    with_failures_noted,
)
from verifiers.rubrics.scoring import (
    PreparedCall,
    ScoringInput,
    call_score_group,
    checked_reward_funcs,
    finite_float,
    refuse_group_funcs,
    reward_names,
    store_scores,
)
from verifiers.types import Info, Messages, RewardFunc, RolloutScore, RolloutScores, State

__all__ = ["Rubric"]

MAX_PREPARED_CALLS = 1024
YIELD_AFTER_S = 0.005


class Rubric:
    """Reward functions and their weights: the reward is the weighted sum, the metrics are the plain values.

    A reward function is sync or async, and names what it needs among prompt, completion, answer, state, task, info,
    parser and the class objects; `**kwargs` receives all of it. One that names prompts, completions, answers,
    states, tasks or infos is a group function: it gets all rollouts of a prompt and returns a float for each.

    A function that raises or gives no finite number counts 0.0 in the sum, as it always did, but the failure is in
    the score's `errors` (and in `state["grading_errors"]`), so that no failed grade passes for a reward of zero.
    Metrics of functions with the same name add up; lambdas have none, and are lambda_1, lambda_2, ...

    A subclass scores in its own way by overriding `score_inputs`, to which every scoring method leads. Overrides of
    the classic methods (`score_rollout`, `score_rollouts`, `score_group`, `call_reward_func`) take effect too.

    Args:
        funcs: reward functions.
        weights: one for each function; 1.0 each when left out. Surplus ones are dropped, with a warning.
        parser: given to functions that name it; a plain `Parser` when left out.
        parallelize_scoring: functions of one rollout run side by side; False: one after the other, in order.
        **kwargs: every further keyword becomes an attribute, with a warning.

    Raises:
        ConfigError (a ValueError): fewer weights than functions; a misspelled keyword or parameter of a function.
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
        set_extra_keywords(self, kwargs)
        self.parser = parser if parser is not None else Parser()
        self.parallelize_scoring = parallelize_scoring
        self.class_objects: dict[str, Any] = {"parser": self.parser}
        self._prepared_calls: dict[int, PreparedCall] = {}
        self._seen_failing: set[str] = set()
        self.reward_funcs: list[RewardFunc] = list(checked_reward_funcs(self, funcs or []))
        self.reward_weights: list[float] = list(() if weights is None else weights) or [1.0] * len(self.reward_funcs)
        self._check_weights()

    # -- functions ------------------------------------------------------------------------------------------

    @property
    def funcs(self) -> list[RewardFunc]:
        """The second generation's name of `reward_funcs`."""
        return self.reward_funcs

    @funcs.setter
    def funcs(self, funcs: list[RewardFunc]) -> None:
        self.reward_funcs = funcs

    @property
    def weights(self) -> list[float]:
        """The second generation's name of `reward_weights`."""
        return self.reward_weights

    @weights.setter
    def weights(self, weights: list[float]) -> None:
        self.reward_weights = weights

    def get_reward_func_names(self) -> list[str]:
        """Return the functions' names, which are the metrics' names."""
        return reward_names(self.get_reward_funcs())

    def get_reward_funcs(self) -> list[RewardFunc]:
        """Return the reward functions."""
        return self.reward_funcs

    def get_reward_weights(self) -> list[float]:
        """Return the weights, one a function."""
        return self.reward_weights

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a function to the weighted sum."""
        self.reward_funcs += checked_reward_funcs(self, [func])
        self.reward_weights.append(weight)

    def add_metric(self, func: RewardFunc, weight: float = 0.0) -> None:
        """Add a function that is shown among the metrics and, unless given a weight, does not change the reward."""
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        """Make an object available to every function that has a parameter of this name."""
        self.class_objects[name] = value

    @property
    def has_group_funcs(self) -> bool:
        """Return whether `score_group` alone can score: for a group function, or a subclass's own `score_group`."""
        return self.overrides("score_group") or any(self._prepared(func).is_group for func in self.reward_funcs)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to score by: no function, and no scoring of a subclass's own."""
        return not (self.get_reward_funcs() or self.overrides_scoring or self.overrides("score_inputs"))

    @property
    def is_overridden(self) -> bool:
        """Return whether a subclass scores rollouts by a `score_rollout` or `score_rollouts` of its own."""
        return self.overrides("score_rollout") or self.overrides("score_rollouts")

    @property
    def overrides_scoring(self) -> bool:
        """Return whether a subclass scores rollouts by classic methods of its own."""
        return self.is_overridden or self.overrides("score_group")

    # -- scoring --------------------------------------------------------------------------------------------

    async def score_group(self, states: Sequence[State], score_sem: Any = None) -> list[RolloutScore]:
        """Score the rollouts of one prompt together; also sets `reward` and `metrics` in each state.

        Where a subclass overrides `score_rollout` or `score_rollouts`, that method scores each rollout, or all; an
        override that raises is a failed grade of its rollouts.

        Args:
            states: of the finished rollouts.
            score_sem: an async context manager, entered around each rollout's functions and each group function.

        Returns:
            A score for each state. A score with `errors` is a failed grade.
        """
        started = time.perf_counter()
        inputs = [ScoringInput.from_state(state) for state in states]
        if self.is_overridden:
            scores = await override_scores(self, inputs, score_sem)
        else:
            scores = await self.score_inputs(inputs, score_sem)
        store_scores(inputs, scores, started)
        return scores

    async def score_rollout(self, *args: Any, **kwargs: Any) -> RolloutScore:
        """Score one rollout, called in either generation's way.

        First: `score_rollout(prompt, completion, answer, state, task="default", info=None, **kwargs)` returns the
        score. Second: `score_rollout(state, score_sem=None)` also sets `state["reward"]` and `state["metrics"]`.

        Raises:
            ConfigError: the rubric has group functions, which one rollout cannot answer; use `score_group`.
        """
        started = time.perf_counter()
        if not is_state_call(args, kwargs):
            item, extra = first_generation_call(*args, **kwargs)
            return (await self.score_inputs([item], as_group=False, extra=extra))[0]
        state, score_sem = second_generation_call(*args, **kwargs)
        item = ScoringInput.from_state(state)
        scores = await self.score_inputs([item], score_sem, as_group=False)
        store_scores([item], scores, started)
        return scores[0]

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
        """Score many rollouts, each by itself, by a subclass's `score_rollout` where there is one.

        Columns have a row for each rollout; `max_concurrent` bounds the rollouts scored at once, -1 for no bound.

        Raises:
            ConfigError: columns of differing lengths, or group functions, which need `score_group`.
        """
        inputs = ScoringInput.from_columns(prompts, completions, answers, states, tasks, infos)
        limit = asyncio.Semaphore(max_concurrent) if max_concurrent > 0 else None
        if self.overrides("score_rollout"):
            scores = await gather_owned([call_score_rollout(self, item, limit, kwargs) for item in inputs])
        else:
            scores = await self.score_inputs(inputs, limit, as_group=False, extra=kwargs)
        names = dict.fromkeys(name for score in scores for name in score.metrics)
        if not scores:
            names = dict.fromkeys(self.get_reward_func_names())
        metrics = {name: [float(score.metrics.get(name, 0.0)) for score in scores] for name in names}
        return RolloutScores(reward=[score.reward for score in scores], metrics=metrics)

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
        """Return one function's value for one rollout.

        Returns:
            0.0 where the function raises or gives no finite number; `state["grading_errors"]` then has the failure.
            nan, and no failure in the state, where the function has weight 0: the rollout has no such metric.
        """
        item = ScoringInput(prompt, completion, answer, state, task, info if info is not None else {})
        return await self._function_value(self._prepared(func), item, kwargs)

    async def score_inputs(
        self,
        inputs: Sequence[ScoringInput],
        score_sem: Any = None,
        *,
        as_group: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> list[RolloutScore]:
        """Score rollouts by the reward functions; the method that rubrics of another kind override.

        All other scoring methods lead here. Failures of reward functions are noted, not raised.

        Args:
            inputs: the finished rollouts.
            score_sem: as for `score_group`.
            as_group: the rollouts are a prompt's whole group; False: each is scored by itself.
            extra: further arguments that functions may name.

        Raises:
            ConfigError: group functions where `as_group` is False, or fewer weights than functions.
        """
        self._check_weights()
        if self.is_empty:
            warn_once(self.logger.name, "A rubric has no reward function: every reward is 0.0; give it funcs=[...].")
        calls = [self._prepared(func) for func in self.reward_funcs]
        if not as_group:
            refuse_group_funcs(calls)
        gate = score_sem if score_sem is not None else contextlib.nullcontext()
        rollouts = (self._rollout_values(item, calls, gate, extra or {}) for item in inputs)
        if len(inputs) > 1 and any(self._waits(call) for call in calls if not call.is_group):
            values = await gather_owned(rollouts)
        else:
            values = await _one_by_one(rollouts)
        for index, call in enumerate(calls):
            if call.is_group and inputs:
                async with gate:
                    column = await self._group_values(call, inputs, extra or {})
                for of_rollout, value in zip(values, column, strict=True):
                    of_rollout[index] = value
        names = reward_names(self.reward_funcs)
        return [self._weighted_sum(item, names, row) for item, row in zip(inputs, values, strict=True)]

    async def score_as_member(
        self,
        inputs: Sequence[ScoringInput],
        score_sem: Any = None,
        *,
        as_group: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> list[RolloutScore]:
        """Score rollouts for a rubric that holds this one: by the classic methods that a subclass overrides, if any.

        Arguments and errors are those of `score_inputs`; an override that raises is a failed grade.
        """
        if as_group and self.overrides("score_group"):
            states = [item.state for item in inputs]
            return await with_failures_noted(self, "score_group", inputs, call_score_group(self, states, score_sem))
        if self.is_overridden:
            return await override_scores(self, inputs, score_sem, extra)
        return await self.score_inputs(inputs, score_sem, as_group=as_group, extra=extra)

    # -- parts of scoring -----------------------------------------------------------------------------------

    async def _rollout_values(
        self,
        item: ScoringInput,
        calls: Sequence[PreparedCall],
        gate: contextlib.AbstractAsyncContextManager[Any],
        extra: Mapping[str, Any],
    ) -> list[float]:
        """Return each function's value for one rollout; those of group functions are left at 0."""
        values = [0.0] * len(calls)
        is_overridden = self.overrides("call_reward_func")

        async def call(index: int) -> None:
            if is_overridden:
                values[index] = await self._override_value(calls[index], item, extra)
            else:
                values[index] = await self._function_value(calls[index], item, extra)

        single = [index for index, prepared in enumerate(calls) if not prepared.is_group]
        many = self.parallelize_scoring and len(single) > 1
        concurrent = [index for index in single if self._waits(calls[index])] if many else []
        if len(concurrent) < 2:
            concurrent = []
        async with gate:
            for index in single:
                if index not in concurrent:
                    await call(index)
            if concurrent:
                await gather_owned([call(index) for index in concurrent])
        return values

    async def _function_value(self, call: PreparedCall, item: ScoringInput, extra: Mapping[str, Any]) -> float:
        """Return one function's value for one rollout; 0.0, with the failure noted, where it gives none."""
        try:
            return finite_float(await call({**item.arguments(), **self.class_objects, **extra}))
        except (Exception, SystemExit) as error:
            return self._failed_value(call, [item], error)

    async def _override_value(self, call: PreparedCall, item: ScoringInput, extra: Mapping[str, Any]) -> float:
        """Return what a subclass's `call_reward_func` gives for one rollout, as `_function_value` does."""
        try:
            return await self.call_reward_func(call.func, **item.arguments(), **extra)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            return self._failed_value(call, [item], error)

    async def _group_values(
        self, call: PreparedCall, inputs: Sequence[ScoringInput], extra: Mapping[str, Any]
    ) -> list[float]:
        """Return a group function's value for each rollout."""
        try:
            results = list(await call({**ScoringInput.columns(inputs), **self.class_objects, **extra}))
            if len(results) != len(inputs):
                raise GradingError(f"returned {len(results)} rewards for {len(inputs)} rollouts")
        except (Exception, SystemExit) as error:
            return [self._failed_value(call, inputs, error)] * len(inputs)
        values = []
        for item, result in zip(inputs, results, strict=True):
            try:
                values.append(finite_float(result))
            except GradingError as error:
                values.append(self._failed_value(call, [item], error))
        return values

    def _weighted_sum(self, item: ScoringInput, names: Sequence[str], values: Sequence[float]) -> RolloutScore:
        reward = 0.0
        metrics: dict[str, float] = {}
        for name, weight, value in zip(names, self.reward_weights, values, strict=True):
            if not weight and math.isnan(value):
                continue
            reward += weight * value
            metrics[name] = metrics.get(name, 0.0) + value
        return item.score(reward, metrics)

    def overrides(self, method: str) -> bool:
        """Return whether a subclass, or this instance, has a method of this name of its own."""
        return getattr(getattr(self, method), "__func__", None) is not getattr(Rubric, method)

    def _waits(self, call: PreparedCall) -> bool:
        # an override of call_reward_func may wait for anything, whatever the function is like
        return call.waits or self.overrides("call_reward_func")

    def _prepared(self, func: Callable[..., Any]) -> PreparedCall:
        call = self._prepared_calls.get(id(func))
        # an id is only as good as the object that holds it: copies and freed functions reuse numbers
        if call is None or call.func is not func:
            if len(self._prepared_calls) >= MAX_PREPARED_CALLS:
                self._prepared_calls.clear()
            call = self._prepared_calls[id(func)] = PreparedCall(func)
        return call

    def _check_weights(self) -> None:
        count = len(self.reward_funcs)
        if len(self.reward_weights) < count:
            raise ConfigError(
                f"The rubric has {count} reward functions but {len(self.reward_weights)} weights; give each function "
                "one weight."
            )
        if surplus := self.reward_weights[count:]:
            text = f"A rubric has {count} reward functions: the weights {surplus} beyond them have no effect."
            warn_once(self.logger.name, text)
            self.reward_weights = self.reward_weights[:count]

    def _failed_value(self, call: PreparedCall, inputs: Iterable[ScoringInput], error: BaseException) -> float:
        """Return the value of a function that gave none: nan where it has no weight, so that the grade stands."""
        pairs = zip(self.reward_funcs, self.reward_weights, strict=True)
        weights = [weight for func, weight in pairs if func is call.func]
        is_metric = bool(weights) and not any(weights)
        self.record_failure(call.name, () if is_metric else inputs, error)
        return math.nan if is_metric else 0.0

    def record_failure(self, name: str, inputs: Iterable[ScoringInput], error: BaseException) -> None:
        """Log a failure, and note it for each rollout."""
        # a function that fails once tends to fail always: one traceback is enough, and none for our own sentences
        is_sentence = isinstance(error, (GradingError, ConfigError))
        text = f"The reward function {name} failed: {type(error).__name__}: {error}"
        key = text if is_sentence else name
        if not (is_sentence and key in self._seen_failing):
            self.logger.error("%s", text, exc_info=None if is_sentence or key in self._seen_failing else error)
        self._seen_failing.add(key)
        for item in inputs:
            item.note_failure(name, error)


async def _one_by_one(rollouts: Iterable[Awaitable[list[float]]]) -> list[list[float]]:
    """Await rollouts' values one after the other, and let others have the event loop now and then."""
    since = time.perf_counter()
    values = []
    for rollout in rollouts:
        values.append(await rollout)
        # quick functions add up over a large group, and other rollouts share the loop
        if time.perf_counter() - since > YIELD_AFTER_S:
            await asyncio.sleep(0)
            since = time.perf_counter()
    return values
