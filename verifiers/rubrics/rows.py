"""One rollout as reward functions see it, and scores as rubrics of either generation give them."""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.errors import ConfigError, GradingError
from verifiers.types import Info, Messages, RolloutScore, State

__all__ = [
    "Row",
    "add_scoring_time",
    "columns_of_rows",
    "finite",
    "gives_state_only",
    "row_of_state",
    "rows_of_columns",
    "score_from",
    "scores_from",
    "set_score",
]


@dataclass(slots=True)
class Row:
    """The arguments that every reward function may name."""

    prompt: Messages
    completion: Messages
    answer: Any
    state: State
    task: str
    info: Info

    def values(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "completion": self.completion,
            "answer": self.answer,
            "state": self.state,
            "task": self.task,
            "info": self.info,
        }


def row_of_state(state: State) -> Row:
    """The row that a state holds, at its top (both generations) or under `input` (the second)."""
    task_row = state.get("input")
    given: Mapping[str, Any] = task_row if isinstance(task_row, Mapping) else {}

    def field(name: str, default: Any) -> Any:
        value = state.get(name)
        if value is None:
            value = given.get(name)
        return default if value is None else value

    return Row(
        field("prompt", []),
        field("completion", []),
        field("answer", ""),
        state,
        field("task", "default"),
        field("info", {}),
    )


def rows_of_columns(
    prompts: Sequence[Messages],
    completions: Sequence[Messages],
    answers: Sequence[Any],
    states: Sequence[State],
    tasks: Sequence[str] | None,
    infos: Sequence[Info] | None,
) -> list[Row]:
    """Rows out of columns; `tasks` and `infos` may be left out.

    Raises:
        ConfigError: columns of differing lengths.
    """
    count = len(prompts)
    columns: list[Sequence[Any]] = [
        prompts,
        completions,
        answers,
        states,
        tasks if tasks is not None else ["default"] * count,
        infos if infos is not None else [{} for _ in range(count)],
    ]
    lengths = [len(column) for column in columns]
    if set(lengths) != {count}:
        named = zip(("prompts", "completions", "answers", "states", "tasks", "infos"), lengths, strict=True)
        raise ConfigError(
            "The columns to score differ in length: " + ", ".join(f"{length} {name}" for name, length in named) + "."
        )
    return [
        Row(prompt, completion, answer, state, task, info if info is not None else {})
        for prompt, completion, answer, state, task, info in zip(*columns, strict=True)
    ]


def columns_of_rows(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """The rows as columns, named as group functions name them."""
    return {f"{name}s": [getattr(row, name) for row in rows] for name in Row.__slots__}


def gives_state_only(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True for `score_rollout(state, ...)` of the second generation; the first always passes a completion."""
    if args:
        return isinstance(args[0], Mapping)
    return "state" in kwargs and "completion" not in kwargs


def finite(value: Any) -> float:
    """The value as a float.

    Raises:
        GradingError: it is no finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise GradingError(f"returned {reprlib.repr(value)}, not a finite number")
    return number


def score_from(result: Any, state: State) -> RolloutScore:
    """The score that a subclass's `score_rollout` gave: as its result, or, where that is None, in the state.

    Raises:
        GradingError: there is no reward, or it is no finite number.
    """
    if isinstance(result, (int, float)):
        return RolloutScore(finite(result))
    source: Any = state if result is None else result
    if isinstance(source, Mapping):
        reward, metrics = source.get("reward"), source.get("metrics")
    else:
        reward, metrics = getattr(source, "reward", None), getattr(source, "metrics", None)
    return RolloutScore(finite(reward), {name: float(value) for name, value in (metrics or {}).items()})


def scores_from(result: Any, count: int) -> list[RolloutScore]:
    """The scores that a subclass's `score_rollouts` gave for `count` rollouts.

    Raises:
        GradingError: another number of rewards, or one that is no finite number.
    """
    rewards = [finite(reward) for reward in result["reward"]]
    metrics = {name: [float(value) for value in column] for name, column in result["metrics"].items()}
    if len(rewards) != count:
        raise GradingError(f"returned {len(rewards)} rewards for {count} rollouts")
    return [
        RolloutScore(reward, {name: column[place] for name, column in metrics.items()})
        for place, reward in enumerate(rewards)
    ]


def set_score(state: State, score: RolloutScore) -> None:
    """Put a score where the second generation looks for it."""
    state["reward"] = score.reward
    state["metrics"] = dict(score.metrics)


def add_scoring_time(states: Sequence[State], started: float) -> None:
    """Add the milliseconds since `started` (of `time.perf_counter`) to the states' classic timing."""
    elapsed_ms = (time.perf_counter() - started) * 1000
    for state in states:
        timing = state.get("timing")
        if isinstance(timing, dict):
            timing["scoring_ms"] = timing.get("scoring_ms", 0.0) + elapsed_ms
            timing["total_ms"] = timing.get("total_ms", 0.0) + elapsed_ms
