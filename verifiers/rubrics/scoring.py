"""Scoring: one rollout as reward functions see it, their calls, and its score as any rubric gives it.

A rubric takes `ScoringInput`s and gives a `RolloutScore` for each. Reward functions are called by argument names, on
the event loop or in a thread, and give a finite float. `call_score_group` is what the runner calls for each finished
group.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import os
import reprlib
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.concurrency import is_async_function, threads_for
from verifiers.errors import ConfigError, GradingError
from verifiers.keywords import check_parameters
from verifiers.types import FailedGrade, Info, Messages, RolloutScore, State

__all__ = [
    "PreparedCall",
    "ScoringInput",
    "accepted_arguments",
    "call_score_group",
    "checked_reward_funcs",
    "finite_float",
    "is_finite_number",
    "parameters_of",
    "refuse_group_funcs",
    "reward_name",
    "reward_names",
    "score_from",
    "store_scores",
]

QUICK_S = 0.001
SLOW_S = 0.005
QUICK_CALLS = 3
PLURALS = frozenset({"prompts", "completions", "answers", "states", "tasks", "infos"})
NAMES = PLURALS | {name.removesuffix("s") for name in PLURALS}


@dataclass(slots=True)
class ScoringInput:
    """One finished rollout: the arguments that every reward function may name."""

    prompt: Messages
    completion: Messages
    answer: Any
    state: State
    task: str
    info: Info

    def __post_init__(self) -> None:
        # the first generation leaves it empty, and functions of the second read it there
        if isinstance(self.state, MutableMapping) and self.state.get("completion") in ([], ""):
            self.state["completion"] = self.completion

    @classmethod
    def from_state(cls, state: State) -> ScoringInput:
        """Return the rollout that a state holds, at its top (both generations) or under `input` (the second)."""
        task_row = state.get("input")
        given: Mapping[str, Any] = task_row if isinstance(task_row, Mapping) else {}

        def field(name: str, default: Any) -> Any:
            value = state.get(name)
            if value is None:
                value = given.get(name)
            return default if value is None else value

        return cls(
            field("prompt", []),
            field("completion", []),
            field("answer", ""),
            state,
            field("task", "default"),
            field("info", {}),
        )

    @classmethod
    def from_columns(
        cls,
        prompts: Sequence[Messages],
        completions: Sequence[Messages],
        answers: Sequence[Any],
        states: Sequence[State],
        tasks: Sequence[str] | None,
        infos: Sequence[Info] | None,
    ) -> list[ScoringInput]:
        """Return a rollout for each row of the columns; `tasks` and `infos` may be left out.

        Raises:
            ConfigError: columns of differing lengths.
        """
        columns: dict[str, Sequence[Any]] = {
            "prompts": prompts,
            "completions": completions,
            "answers": answers,
            "states": states,
            "tasks": tasks if tasks is not None else ["default"] * len(prompts),
            "infos": infos if infos is not None else [None] * len(prompts),
        }
        if len(prompts) and len({len(column) for column in columns.values()}) > 1:
            raise ConfigError(
                "The columns to score differ in length: "
                + ", ".join(f"{len(column)} {name}" for name, column in columns.items())
                + "."
            )
        return [
            cls(prompt, completion, answer, state, task, info if info is not None else {})
            for prompt, completion, answer, state, task, info in zip(*columns.values(), strict=False)
        ]

    @staticmethod
    def columns(inputs: Sequence[ScoringInput]) -> dict[str, list[Any]]:
        """Return the rollouts as columns, named as group functions name them."""
        return {f"{name}s": [getattr(item, name) for item in inputs] for name in ScoringInput.__slots__}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name."""
        return {
            "prompt": self.prompt,
            "completion": self.completion,
            "answer": self.answer,
            "state": self.state,
            "task": self.task,
            "info": self.info,
        }

    def note_failure(self, func: str, error: BaseException) -> None:
        """Note in `state["grading_errors"]`, where the classic API looks for it, that a function failed."""
        if isinstance(self.state, MutableMapping):
            failed = FailedGrade(func=func, error=f"{type(error).__name__}: {error}")
            self.state.setdefault("grading_errors", []).append(failed)

    def score(self, reward: float, metrics: dict[str, float] | None = None) -> RolloutScore:
        """Return the score of this rollout, with the failures that were noted for it."""
        noted = self.state.get("grading_errors") if isinstance(self.state, Mapping) else None
        return RolloutScore(reward, metrics, list(noted or ()))


def store_scores(inputs: Iterable[ScoringInput], scores: Iterable[RolloutScore], started: float) -> None:
    """Put scores where the second generation looks for them: `reward`, `metrics` and the timing of the states.

    `started` is the time at which scoring began, by `time.perf_counter`.
    """
    elapsed_ms = (time.perf_counter() - started) * 1000
    for item, score in zip(inputs, scores, strict=True):
        state = item.state
        state["reward"], state["metrics"] = score["reward"], dict(score["metrics"])
        timing = state.get("timing")
        if isinstance(timing, dict):
            # replaced and not added: an override calls methods that have measured a part of this already
            before_ms = timing.get("scoring_ms", 0.0)
            timing["scoring_ms"] = elapsed_ms
            timing["total_ms"] = timing.get("total_ms", 0.0) + elapsed_ms - before_ms


# -- calls of reward functions -----------------------------------------------------------------------------------


class PreparedCall:
    """A reward function with its parameters, read once, and its speed so far.

    A thread hop costs four times as much as the rest of scoring by a typical reward function (a regular expression,
    a comparison), and many times that on a busy machine. A slow function called on the event loop, though, would
    stall every rollout in flight. So a synchronous function starts out in threads, and moves to the loop when three
    calls in a row each took less than 1 ms, measured inside the thread so that the hop does not count. One call on
    the loop of more than 5 ms sends it back for good. Three in a row, not the first three: a first call often pays
    for imports.

    Attributes:
        name: for metrics and messages.
        is_group: the function has a parameter for whole groups (prompts, completions, answers, states, tasks, infos).
        on_loop: the next call stays on the event loop.
    """

    __slots__ = (
        "_is_async",
        "_names",
        "_quick_in_a_row",
        "_stays_in_threads",
        "_takes_everything",
        "func",
        "is_group",
        "name",
        "on_loop",
    )

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.name = reward_name(func)
        try:
            parameters = list(inspect.signature(func).parameters.values())
        except (TypeError, ValueError):
            # some builtins have no signature: the call itself will say what is wrong
            parameters = []
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._names = tuple(item.name for item in parameters if item.kind in by_name)
        self._takes_everything = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)
        self.is_group = not PLURALS.isdisjoint(self._names)
        self._is_async = is_async_function(func)
        self.on_loop = self._is_async
        self._quick_in_a_row = 0
        # without an event loop around it, a synchronous function need not await the judge
        self._stays_in_threads = "judge" in self._names

    @property
    def waits(self) -> bool:
        """Return whether a call lets other work run meanwhile, so that concurrent calls are worth a task each."""
        return self._is_async or not self.on_loop

    async def __call__(self, values: Mapping[str, Any]) -> Any:
        """Call the function with those of `values` that it names, and return what it returns.

        Raises:
            Exception: what the function raises; asyncio.CancelledError passes.
        """
        if self._takes_everything:
            arguments = dict(values)
        else:
            arguments = {name: values[name] for name in self._names if name in values}
        if self._is_async:
            return await self.func(**arguments)
        if self.on_loop:
            started = time.perf_counter()
            try:
                result = self.func(**arguments)
            finally:
                if time.perf_counter() - started > SLOW_S:
                    self.on_loop, self._stays_in_threads = False, True
        else:
            result = await self._in_thread(arguments)
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, arguments: dict[str, Any]) -> Any:
        threads = threads_for("reward function", min(32, (os.cpu_count() or 1) + 4))
        result, error, elapsed_s = await threads.run(functools.partial(_timed, self.func, arguments))
        self._quick_in_a_row = self._quick_in_a_row + 1 if elapsed_s < QUICK_S else 0
        if self._quick_in_a_row >= QUICK_CALLS and not self._stays_in_threads:
            self.on_loop = True
        if error is not None:
            raise error
        return result


def reward_name(func: Callable[..., Any]) -> str:
    """Return a function's name; of a partial that of the function inside, of other callables that of their class."""
    while isinstance(func, functools.partial):
        func = func.func
    return getattr(func, "__name__", None) or type(func).__name__


def reward_names(funcs: Sequence[Callable[..., Any]]) -> list[str]:
    """Return the functions' names, which are their metrics' names; several lambdas are numbered by their order."""
    names = [reward_name(func) for func in funcs]
    if names.count("<lambda>") < 2:
        return names
    numbers = itertools.count(1)
    return [f"lambda_{next(numbers)}" if name == "<lambda>" else name for name in names]


def finite_float(value: Any) -> float:
    """Return the value as a float.

    Raises:
        GradingError: the value is not a finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise GradingError(f"returned {reprlib.repr(value)}, not a finite number")
    return number


def is_finite_number(value: Any) -> bool:
    """Return whether a value is an int or a float that is finite as a float."""
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:
        # a whole number that no float holds
        return False


def _timed(func: Callable[..., Any], arguments: dict[str, Any]) -> tuple[Any, BaseException | None, float]:
    started = time.perf_counter()
    try:
        return func(**arguments), None, time.perf_counter() - started
    except BaseException as error:  # raised by the caller, on the event loop
        return None, error, time.perf_counter() - started


# -- checks of reward functions -----------------------------------------------------------------------------------


def checked_reward_funcs(rubric: Any, funcs: Sequence[Callable[..., Any]]) -> Sequence[Callable[..., Any]]:
    """Return a rubric's reward functions as they are.

    Raises:
        ConfigError: what is not a function, or a parameter that nearly has the name of an argument.
    """
    for func in [funcs] if callable(funcs) else funcs:
        if func is funcs or not callable(func):
            raise ConfigError(
                f"funcs is {funcs!r}; give a list of functions, such as def correct(completion, answer)."
            )
        # an override of call_reward_func may supply arguments of its own
        if not rubric.overrides("call_reward_func"):
            check_parameters(f"The reward function {reward_name(func)!r}", func, {*NAMES, *rubric.class_objects})
    return funcs


def refuse_group_funcs(calls: Iterable[PreparedCall]) -> None:
    """Raise ConfigError where a function needs a whole group."""
    for call in calls:
        if call.is_group:
            raise ConfigError(
                f"The reward function {call.name!r} compares the rollouts of a whole group, "
                "so a single rollout cannot be scored; use score_group."
            )


# -- one group ---------------------------------------------------------------------------------------------------


async def call_score_group(rubric: Any, states: Sequence[State], score_sem: Any = None) -> list[RolloutScore]:
    """Score the rollouts of one prompt by `rubric.score_group`: what the runner calls for each finished group.

    An override for the second generation returns nothing and sets `reward` and `metrics` in each state. A reward
    that is missing or not a finite number is a failed grade of its rollout.

    Raises:
        Exception: what the method raises.
    """
    gate = score_sem if score_sem is not None else contextlib.nullcontext()
    result = await rubric.score_group(states, **accepted_arguments(rubric.score_group, {"score_sem": gate}))
    given: Sequence[Any] = result if isinstance(result, list) and len(result) == len(states) else [None] * len(states)
    return [
        score if isinstance(score, RolloutScore) else _group_member_score(score, ScoringInput.from_state(state))
        for state, score in zip(states, given, strict=True)
    ]


def _group_member_score(result: Any, item: ScoringInput) -> RolloutScore:
    """Return the score that `score_group` gave a rollout; one without a reward is a failed grade."""
    try:
        return score_from(result, item)
    except (GradingError, TypeError, ValueError) as error:
        item.note_failure("score_group", error)
        return item.score(0.0)


def accepted_arguments(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a method takes."""
    names, takes_everything = parameters_of(method)
    return arguments if takes_everything else {name: value for name, value in arguments.items() if name in names}


def score_from(result: Any, item: ScoringInput) -> RolloutScore:
    """Return the score that an override gave: as its result, or, where that is None, in the state.

    Raises:
        GradingError: there is no reward, or it is not a finite number.
    """
    if isinstance(result, (int, float)):
        return item.score(finite_float(result))
    source: Any = item.state if result is None else result
    if isinstance(source, Mapping):
        reward, metrics = source.get("reward"), source.get("metrics")
    else:
        reward, metrics = getattr(source, "reward", None), getattr(source, "metrics", None)
    return item.score(finite_float(reward), {name: float(value) for name, value in (metrics or {}).items()})


def parameters_of(method: Any) -> tuple[frozenset[str], bool]:
    # the function under a bound method; what was put on the instance in its place is looked at as it is
    return _parameters_of_function(getattr(method, "__func__", method))


@functools.lru_cache(maxsize=256)
def _parameters_of_function(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the names of a function's parameters, and True where it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    takes_everything = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)
    return frozenset(item.name for item in parameters), takes_everything
