"""EpisodicSumRubric: the reward of an episode is the sum of its steps' rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verifiers.parsers.messages import message_field
from verifiers.rubrics.rubric import Rubric
from verifiers.types import RewardFunc, State

__all__ = ["EpisodicSumRubric", "sum_step_rewards"]


class EpisodicSumRubric(Rubric):
    """Sums `step["reward"]` over `state["trajectory"]`, for environments that reward each step.

    Args:
        weight: of the sum.
        funcs: further reward functions, after it.
        weights: one for each of `funcs`; 1.0 each when left out.
        **kwargs: as for `Rubric`.
    """

    def __init__(
        self,
        weight: float = 1.0,
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        **kwargs: Any,
    ) -> None:
        further = list(funcs or [])
        of_further = list(weights) if weights is not None else [1.0] * len(further)
        super().__init__(funcs=[sum_step_rewards, *further], weights=[weight, *of_further], **kwargs)


def sum_step_rewards(state: State, **_: Any) -> float:
    """The sum of the steps' rewards; a step without one counts 0."""
    rewards = [message_field(step, "reward") for step in state.get("trajectory") or ()]
    return float(sum(reward for reward in rewards if reward is not None))
