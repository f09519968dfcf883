"""Scoring: one rollout as reward functions see it, their calls, and its score as any rubric gives it.

A rubric takes `ScoringInput`s and gives a `RolloutScore` for each. Reward functions are called by argument names, on
the event loop or in a thread, and give a finite float. Rubrics written for the classic API override `score_rollout`,
`score_rollouts` or `score_group` with the arguments and results of their generation; the three `call_` functions call
such an override and turn what it gives into `RolloutScore`s.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError, GradingError
from verifiers.keywords import check_parameters
from verifiers.rubrics.reward_call import NAMES, PreparedCall, finite_float, reward_name
from verifiers.types import FailedGrade, Info, Messages, RolloutScore, State

__all__ = [
    "ScoringInput",
    "call_score_group",
    "call_score_rollout",
    "call_score_rollouts",
    "checked_reward_funcs",
    "first_generation_call",
    "is_state_call",
    "refuse_group_funcs",
    "second_generation_call",
    "store_scores",
]


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


# -- checks of reward functions -----------------------------------------------------------------------------------


def checked_reward_funcs(rubric: Any, funcs: Sequence[Callable[..., Any]]) -> Sequence[Callable[..., Any]]:
    """Return a rubric's reward functions as they are.

    Raises:
        ConfigError: what is no function, or a parameter that nearly has the name of an argument.
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


# -- overrides of the classic methods -----------------------------------------------------------------------------


def is_state_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True for `score_rollout(state, ...)` of the second generation; the first always passes a completion."""
    if args:
        return isinstance(args[0], Mapping)
    return "state" in kwargs and "completion" not in kwargs


def first_generation_call(
    prompt: Messages,
    completion: Messages,
    answer: Any = "",
    state: State | None = None,
    task: str = "default",
    info: Info | None = None,
    **kwargs: Any,
) -> tuple[ScoringInput, dict[str, Any]]:
    """Return the rollout and the further arguments of a `score_rollout` call of the first generation."""
    item = ScoringInput(prompt, completion, answer, state if state is not None else State(), task, info or {})
    return item, kwargs


def second_generation_call(state: State, score_sem: Any = None) -> tuple[State, Any]:
    """Return the arguments of a `score_rollout` call of the second generation."""
    return state, score_sem


async def call_score_rollout(
    rubric: Any, item: ScoringInput, score_sem: Any = None, extra: Mapping[str, Any] | None = None
) -> RolloutScore:
    """Score one rollout by `rubric.score_rollout`, in the generation that it is written for.

    `score_sem` is given to a method that takes it, and else entered around the call; `extra` has further arguments.

    Raises:
        GradingError: the method gave no reward, or one that is no finite number.
        Exception: what the method raises.
    """
    gate = score_sem if score_sem is not None else contextlib.nullcontext()
    names, _ = _parameters_of(rubric.score_rollout)
    if "state" in names and "completion" not in names:
        arguments: dict[str, Any] = {"state": item.state}
        if "score_sem" in names:
            arguments["score_sem"], gate = gate, contextlib.nullcontext()
    else:
        arguments = _accepted(rubric.score_rollout, {**item.arguments(), **(extra or {})})
    async with gate:
        return _score_from(await rubric.score_rollout(**arguments), item)


async def call_score_rollouts(
    rubric: Any, inputs: Sequence[ScoringInput], extra: Mapping[str, Any] | None = None
) -> list[RolloutScore]:
    """Score rollouts by `rubric.score_rollouts`.

    Raises:
        GradingError: another number of rewards, or one that is no finite number.
        Exception: what the method raises.
    """
    columns = _accepted(rubric.score_rollouts, {**ScoringInput.columns(inputs), **(extra or {})})
    result = await rubric.score_rollouts(**columns)
    rewards = [finite_float(reward) for reward in result["reward"]]
    metrics = {name: [float(value) for value in column] for name, column in result["metrics"].items()}
    if len(rewards) != len(inputs):
        raise GradingError(f"returned {len(rewards)} rewards for {len(inputs)} rollouts")
    return [
        item.score(reward, {name: column[place] for name, column in metrics.items()})
        for place, (item, reward) in enumerate(zip(inputs, rewards, strict=True))
    ]


async def call_score_group(rubric: Any, states: Sequence[State], score_sem: Any = None) -> list[RolloutScore]:
    """Score the rollouts of one prompt by `rubric.score_group`: what the runner calls for each finished group.

    An override for the second generation returns nothing and sets `reward` and `metrics` in each state. A reward
    that is missing or no finite number is a failed grade of its rollout.

    Raises:
        Exception: what the method raises.
    """
    gate = score_sem if score_sem is not None else contextlib.nullcontext()
    result = await rubric.score_group(states, **_accepted(rubric.score_group, {"score_sem": gate}))
    given: Sequence[Any] = result if isinstance(result, list) and len(result) == len(states) else [None] * len(states)
    return [
        score if isinstance(score, RolloutScore) else _group_member_score(score, ScoringInput.from_state(state))
        for state, score in zip(states, given, strict=True)
    ]


def _group_member_score(result: Any, item: ScoringInput) -> RolloutScore:
    """Return the score that `score_group` gave a rollout; one without a reward is a failed grade."""
    try:
        return _score_from(result, item)
    except (GradingError, TypeError, ValueError) as error:
        item.note_failure("score_group", error)
        return item.score(0.0)


def _accepted(method: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a method takes."""
    names, takes_everything = _parameters_of(method)
    return arguments if takes_everything else {name: value for name, value in arguments.items() if name in names}


def _score_from(result: Any, item: ScoringInput) -> RolloutScore:
    """Return the score that an override gave: as its result, or, where that is None, in the state.

    Raises:
        GradingError: there is no reward, or it is no finite number.
    """
    if isinstance(result, (int, float)):
        return item.score(finite_float(result))
    source: Any = item.state if result is None else result
    if isinstance(source, Mapping):
        reward, metrics = source.get("reward"), source.get("metrics")
    else:
        reward, metrics = getattr(source, "reward", None), getattr(source, "metrics", None)
    return item.score(finite_float(reward), {name: float(value) for name, value in (metrics or {}).items()})


def _parameters_of(method: Any) -> tuple[frozenset[str], bool]:
    # the function under a bound method; what was put on the instance in its place is looked at as it is
    return _parameters_of_function(getattr(method, "__func__", method))


@functools.lru_cache(maxsize=256)
def _parameters_of_function(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Return the names of a function's parameters, and True where it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    takes_everything = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters)
    return frozenset(item.name for item in parameters), takes_everything
