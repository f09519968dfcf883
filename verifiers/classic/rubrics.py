"""The scoring methods of verifiers 0.1.x: calls of them on any rubric, and rubrics that override them.

Releases 0.1.0 to 0.1.7 pass what a rollout consists of, `score_rollout(prompt, completion, answer, state, ...)`;
those from 0.1.8 on pass its state, `score_rollout(state, score_sem)`. An override is put under the method of the
present interface that leads to it: `score_states`, `score_group` or `reward_call`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MethodType
from typing import Any

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, GradingError
from verifiers.rubrics.rubric import CLASSIC_METHODS, Rubric
from verifiers.rubrics.scoring import (
    ARGUMENTS,
    RewardCall,
    arguments_of,
    columns_of,
    finite_float,
    is_group_func,
    note_failure,
    one_number,
    reward_name,
    reward_values,
    signature_of,
    store_scores,
    take_failures,
)
from verifiers.types import Info, Messages, RewardFunc, RolloutScore, RolloutScores, State

COLUMNS = ("prompt", "completion", "answer", "task", "info")


# -- calls on any rubric ---------------------------------------------------------------------------------------------


async def score_rollout(rubric: Rubric, *args: Any, **kwargs: Any) -> RolloutScore:
    """Score one rollout by itself.

    `score_rollout(prompt, completion, answer="", state=None, task="default", info=None, **kwargs)` returns the score,
    `score_rollout(state, score_sem=None)` also sets `reward` and `metrics` in the state.

    Raises:
        ConfigError: the rubric has group functions, which one rollout cannot answer; use `score_group`.
    """
    is_state = isinstance(args[0], Mapping) if args else "completion" not in kwargs
    return await (_score_state if is_state else _score_columns)(rubric, *args, **kwargs)


async def _score_state(rubric: Rubric, state: State, score_sem: Any = None) -> RolloutScore:
    started = time.perf_counter()
    scores = await _plain_scores(rubric, [state], score_sem)
    store_scores([state], scores, started)
    return scores[0]


async def _score_columns(
    rubric: Rubric,
    prompt: Messages,
    completion: Messages,
    answer: Any = "",
    state: State | None = None,
    task: str = "default",
    info: Info | None = None,
    **kwargs: Any,
) -> RolloutScore:
    with _filled([(prompt, completion, answer, state, task, info)]) as states:
        return (await _plain_scores(rubric, states, extra=kwargs))[0]


async def score_rollouts(
    rubric: Rubric,
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
    count = len(prompts)
    columns: list[Sequence[Any]] = [prompts, completions, answers, states]
    columns += [tasks or ["default"] * count, infos or [None] * count]
    if count and len({len(column) for column in columns}) > 1:
        lengths = ", ".join(f"{len(column)} {name}s" for name, column in zip(ARGUMENTS, columns, strict=True))
        raise ConfigError(f"The columns to score differ in length: {lengths}.")
    limit = asyncio.Semaphore(max_concurrent) if max_concurrent > 0 else None
    with _filled(list(zip(*columns, strict=False))) as filled:
        if overrides(rubric, "score_rollout"):
            scores = await gather_owned([_by_score_rollout(rubric, state, limit, kwargs) for state in filled])
        else:
            scores = await _plain_scores(rubric, filled, limit, kwargs)
    names = dict.fromkeys(name for score in scores for name in score.metrics)
    if not scores:
        names = dict.fromkeys(rubric.get_reward_func_names())
    metrics = {name: [float(score.metrics.get(name, 0.0)) for score in scores] for name in names}
    return RolloutScores(reward=[score.reward for score in scores], metrics=metrics)


async def call_reward_func(
    rubric: Rubric,
    func: RewardFunc,
    prompt: Messages,
    completion: Messages,
    answer: Any,
    state: State,
    task: str = "default",
    info: Info | None = None,
    **kwargs: Any,
) -> float:
    """Return one function's value for one rollout, by the rubric of a group that has the function.

    Returns:
        0.0 where the function raises or gives no finite number; `state["grading_errors"]` then has the failure.
        nan, and no failure in the state, where the function has weight 0: the rollout has no such metric.
    """
    members: Sequence[Rubric] = getattr(rubric, "rubrics", ())
    if members:
        owners = [member for member in members if func in member.get_reward_funcs()]
        owner = owners[0] if owners else members[0]
        return float(
            await owner.call_reward_func(func, prompt, completion, answer, state, task=task, info=info, **kwargs)
        )
    with _filled([(prompt, completion, answer, state, task, info)]) as states:
        objects = {**rubric.class_objects, **kwargs}
        [[value]] = await reward_values([RewardCall(func)], states, objects)
    if not isinstance(value, BaseException):
        return one_number(value)
    weights = [rubric.reward_weights[place] for place, own in enumerate(rubric.reward_funcs) if own is func]
    is_metric = bool(weights) and not any(weights)
    rubric.record_failure(reward_name(func), [] if is_metric else [state], value)
    return math.nan if is_metric else 0.0


async def bounded_scores(
    rubric: Rubric, states: Sequence[State], score_sem: AbstractAsyncContextManager[Any]
) -> list[RolloutScore]:
    """Return the scores of a group, entering `score_sem` around each rollout, or around a group that is compared."""
    if rubric.has_group_funcs:
        async with score_sem:
            return await rubric.score_states(states)
    return await _each_by_itself(rubric.score_states, states, score_sem)


async def _plain_scores(
    rubric: Rubric,
    states: Sequence[State],
    gate: AbstractAsyncContextManager[Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[RolloutScore]:
    """Score rollouts by what is no override of a classic method; `extra` are further arguments of functions."""
    for task in {arguments_of(state)["task"] for state in states}:
        _refuse_group_funcs(rubric, task)
    score = _without_overrides(_with_class_objects(rubric, extra) if extra else rubric)
    scores = await _each_by_itself(score, states, gate or contextlib.nullcontext())
    for state, of_state in zip(states, scores, strict=True):
        take_failures(state, of_state)
        # of a group of environments, those of all of them
        names = getattr(rubric, "all_reward_names", ())
        of_state["metrics"] = {**dict.fromkeys(names, 0.0), **of_state.metrics}
    return scores


def _without_overrides(rubric: Rubric) -> Callable[[Sequence[State]], Awaitable[list[RolloutScore]]]:
    """Return the method that scores states where no classic method is overridden."""
    methods = (vars(base).get("score_states", score_by_overrides) for base in type(rubric).__mro__)
    return MethodType(next(method for method in methods if method is not score_by_overrides), rubric)


async def _each_by_itself(
    score: Callable[[Sequence[State]], Awaitable[list[RolloutScore]]],
    states: Sequence[State],
    gate: AbstractAsyncContextManager[Any],
) -> list[RolloutScore]:
    async def gated(state: State) -> RolloutScore:
        async with gate:
            [of_state] = await score([state])
        return of_state

    return await gather_owned([gated(state) for state in states])


def _refuse_group_funcs(rubric: Any, task: Any) -> None:
    for func in rubric.get_reward_funcs():
        if is_group_func(func):
            raise ConfigError(
                f"The reward function {reward_name(func)!r} compares the rollouts of a whole group, "
                "so a single rollout cannot be scored; use score_group."
            )
    if hasattr(rubric, "rubric_of") and (member := rubric.rubric_of(task)) is not None:
        _refuse_group_funcs(member, task)


def _with_class_objects(rubric: Any, objects: Mapping[str, Any]) -> Any:
    """Return a copy of a rubric whose functions may name further objects."""
    twin = copy.copy(rubric)
    if hasattr(twin, "rubrics"):
        twin.rubrics = [_with_class_objects(member, objects) for member in twin.rubrics]
    else:
        twin.class_objects = {**twin.class_objects, **objects}
    return twin


@contextlib.contextmanager
def _filled(rows: Sequence[tuple[Any, ...]]) -> Iterator[list[State]]:
    """Give states with the rows' columns, where scoring reads them; what else they get goes to the rows' states."""
    filled = [
        State(state or {}, prompt=prompt, completion=completion, answer=answer, task=task, info=info or {})
        for prompt, completion, answer, state, task, info in rows
    ]
    try:
        yield filled
    finally:
        for (_, completion, _, state, *_), scored in zip(rows, filled, strict=True):
            if state is not None:
                if state.get("completion") in ([], ""):
                    # an earlier release left it empty, and what is written for a later one reads it there
                    state["completion"] = completion
                state.update({name: value for name, value in scored.items() if name not in COLUMNS})


# -- overrides -------------------------------------------------------------------------------------------------------


def adapt(cls: Any) -> None:
    """Put a class's overrides of classic methods under the present interface; those it inherits are there already."""
    for name in CLASSIC_METHODS:
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if owner is cls or not issubclass(owner, Rubric):
            for place, value in _adapted(name, vars(owner)[name]).items():
                if place == name or place not in vars(cls):
                    type.__setattr__(cls, place, value)


def set_on(rubric: Rubric, name: str, value: Any) -> None:
    """Put an override of one rubric under the present interface."""
    for place, attribute in _adapted(name, staticmethod(value)).items():
        rubric.__dict__[place] = MethodType(attribute, rubric) if inspect.isfunction(attribute) else attribute


def _adapted(name: str, method: Any) -> dict[str, Any]:
    """Return what is to stand in a class, by name, for a classic method of its own."""
    if name == "call_reward_func":
        return {"reward_call": reward_call, "checks_parameters": False}
    if name != "score_group":
        return {"score_states": score_by_overrides}
    if getattr(method, "is_adapted", False):
        return {}
    return {"score_group": _score_group(method), "scores_groups_itself": True}


def overrides(rubric: Rubric, method: str) -> bool:
    """Return whether a subclass, or this instance, has a classic method of its own."""
    return getattr(getattr(rubric, method), "__func__", None) is not getattr(Rubric, method)


async def score_by_overrides(self: Rubric, states: Sequence[State]) -> list[RolloutScore]:
    """Score rollouts by an override of `score_rollout` or `score_rollouts`; failed grades where it raises."""

    async def by_score_rollout(state: State) -> list[RolloutScore]:
        return [await _by_score_rollout(self, state)]

    if overrides(self, "score_rollout"):
        work = [_noted(self, "score_rollout", [state], by_score_rollout(state)) for state in states]
        return [score for [score] in await gather_owned(work)]
    if overrides(self, "score_rollouts"):
        return await _noted(self, "score_rollouts", states, scores_by_columns(self, states))
    return await _without_overrides(self)(states)


async def scores_by_columns(rubric: Any, states: Sequence[State], **extra: Any) -> list[RolloutScore]:
    """Score rollouts by one call of `rubric.score_rollouts`; a GradingError without a finite reward for each."""
    columns = {**columns_of([arguments_of(state) for state in states]), **extra}
    result = await rubric.score_rollouts(**_accepted(rubric.score_rollouts, columns))
    rewards = [finite_float(reward) for reward in result["reward"]]
    if len(rewards) != len(states):
        raise GradingError(f"returned {len(rewards)} rewards for {len(states)} rollouts")
    metrics = {name: [float(value) for value in column] for name, column in result["metrics"].items()}
    return [
        take_failures(state, RolloutScore(reward, {name: column[place] for name, column in metrics.items()}))
        for place, (state, reward) in enumerate(zip(states, rewards, strict=True))
    ]


async def _by_score_rollout(
    rubric: Rubric, state: State, score_sem: Any = None, extra: Mapping[str, Any] | None = None
) -> RolloutScore:
    """Score one rollout by an override of `score_rollout`, with the arguments that it takes.

    `score_sem` is given to a method that takes it, and else entered around the call.
    """
    gate = score_sem if score_sem is not None else contextlib.nullcontext()
    names = signature_of(rubric.score_rollout).names
    if "state" in names and "completion" not in names:
        arguments: dict[str, Any] = {"state": state}
        if "score_sem" in names:
            arguments["score_sem"], gate = gate, contextlib.nullcontext()
    else:
        arguments = _accepted(rubric.score_rollout, {**arguments_of(state), **(extra or {})})
    async with gate:
        return _score_from(await rubric.score_rollout(**arguments), state)


def _score_group(method: Any) -> Any:
    """Return an override of `score_group` that returns scores, whatever it was written to return."""

    @functools.wraps(method)
    async def score_group(self: Rubric, states: Sequence[State], score_sem: Any = None) -> list[RolloutScore]:
        started = time.perf_counter()
        bound = method.__get__(self, type(self)) if hasattr(method, "__get__") else method
        gate = score_sem if score_sem is not None else contextlib.nullcontext()
        result = await bound(states, **_accepted(bound, {"score_sem": gate}))
        given = result if isinstance(result, list) and len(result) == len(states) else [None] * len(states)
        scores = [_score_or_failure(score, state) for state, score in zip(states, given, strict=True)]
        store_scores(states, scores, started)
        return scores

    score_group.__dict__["is_adapted"] = True
    return score_group


def reward_call(self: Rubric, func: RewardFunc) -> RewardCall:
    """Return the call of a function by an override of `call_reward_func`."""
    call = RewardCall(func)
    if call.is_group or not overrides(self, "call_reward_func"):
        return call

    async def through_override(prompt: Any, completion: Any, answer: Any, state: Any, task: Any, info: Any) -> float:
        row = {"prompt": prompt, "completion": completion, "answer": answer, "state": state, "task": task}
        return await self.call_reward_func(func, **row, info=info)

    through_override.__name__ = reward_name(func)
    return RewardCall(through_override)


async def _noted(
    rubric: Rubric, method: str, states: Sequence[State], scoring: Awaitable[list[RolloutScore]]
) -> list[RolloutScore]:
    """Await scores; what a method raises becomes a failed grade of the rollouts it was called with."""
    try:
        return await scoring
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        rubric.record_failure(method, states, error)
        return [RolloutScore(0.0) for _ in states]


def _score_from(result: Any, state: State) -> RolloutScore:
    """Return the score that an override gave: as its result, or, where that is None, in the state."""
    if isinstance(result, (int, float)):
        result = {"reward": result}
    source: Any = state if result is None else result
    if isinstance(source, Mapping):
        reward, metrics = source.get("reward"), source.get("metrics")
    else:
        reward, metrics = getattr(source, "reward", None), getattr(source, "metrics", None)
    values = {name: float(value) for name, value in (metrics or {}).items()}
    return take_failures(state, RolloutScore(finite_float(reward), values))


def _score_or_failure(result: Any, state: State) -> RolloutScore:
    if isinstance(result, RolloutScore):
        return result
    try:
        return _score_from(result, state)
    except (GradingError, TypeError, ValueError) as error:
        note_failure(state, "score_group", error)
        return RolloutScore(0.0)


def _accepted(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a method takes."""
    signature = signature_of(method)
    if signature.takes_everything:
        return arguments
    return {name: value for name, value in arguments.items() if name in signature.names}
