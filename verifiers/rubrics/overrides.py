"""Overrides of the classic scoring methods: `score_rollout` and `score_rollouts`, of either generation.

A subclass of `Rubric` that overrides one of them is called with the arguments of its generation, and what it gives
becomes `RolloutScore`s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.concurrency import gather_owned
from verifiers.errors import ConfigError, GradingError
from verifiers.rubrics.scoring import ScoringInput, accepted_arguments, finite_float, parameters_of, score_from
from verifiers.types import Info, Messages, RolloutScore, State

if TYPE_CHECKING:
    from verifiers.rubrics.rubric import Rubric

__all__ = [
    "call_score_rollout",
    "call_score_rollouts",
    "first_generation_call",
    "is_state_call",
    "override_scores",
    "second_generation_call",
    "with_failures_noted",
]


def is_state_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is the second generation's `score_rollout(state, ...)`; the first passes a completion."""
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
        GradingError: the method gave no reward, or one that is not a finite number.
        Exception: what the method raises.
    """
    gate = score_sem if score_sem is not None else contextlib.nullcontext()
    names, _ = parameters_of(rubric.score_rollout)
    if "state" in names and "completion" not in names:
        arguments: dict[str, Any] = {"state": item.state}
        if "score_sem" in names:
            arguments["score_sem"], gate = gate, contextlib.nullcontext()
    else:
        arguments = accepted_arguments(rubric.score_rollout, {**item.arguments(), **(extra or {})})
    async with gate:
        return score_from(await rubric.score_rollout(**arguments), item)


async def call_score_rollouts(
    rubric: Any, inputs: Sequence[ScoringInput], extra: Mapping[str, Any] | None = None
) -> list[RolloutScore]:
    """Score rollouts by `rubric.score_rollouts`.

    Raises:
        GradingError: another number of rewards, or one that is not a finite number.
        Exception: what the method raises.
    """
    columns = accepted_arguments(rubric.score_rollouts, {**ScoringInput.columns(inputs), **(extra or {})})
    result = await rubric.score_rollouts(**columns)
    rewards = [finite_float(reward) for reward in result["reward"]]
    metrics = {name: [float(value) for value in column] for name, column in result["metrics"].items()}
    if len(rewards) != len(inputs):
        raise GradingError(f"returned {len(rewards)} rewards for {len(inputs)} rollouts")
    return [
        item.score(reward, {name: column[place] for name, column in metrics.items()})
        for place, (item, reward) in enumerate(zip(inputs, rewards, strict=True))
    ]


async def override_scores(
    rubric: Rubric, inputs: Sequence[ScoringInput], score_sem: Any = None, extra: Mapping[str, Any] | None = None
) -> list[RolloutScore]:
    """Score rollouts by a subclass's `score_rollout`, or else its `score_rollouts`; see `Rubric.is_overridden`."""

    async def by_score_rollout(item: ScoringInput) -> list[RolloutScore]:
        return [await call_score_rollout(rubric, item, score_sem, extra)]

    if rubric.overrides("score_rollout"):
        work = [with_failures_noted(rubric, "score_rollout", [item], by_score_rollout(item)) for item in inputs]
        return [score for [score] in await gather_owned(work)]
    return await with_failures_noted(rubric, "score_rollouts", inputs, call_score_rollouts(rubric, inputs, extra))


async def with_failures_noted(
    rubric: Rubric, method: str, inputs: Sequence[ScoringInput], scoring: Awaitable[list[RolloutScore]]
) -> list[RolloutScore]:
    """Await scores; what a method raises becomes a failed grade of the rollouts it was called with."""
    try:
        return await scoring
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        rubric.record_failure(method, inputs, error)
        return [item.score(0.0) for item in inputs]
