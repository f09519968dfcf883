"""RubricGroup: several rubrics whose rewards are summed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, Self

from verifiers.errors import ConfigError
from verifiers.keywords import set_extra_keywords
from verifiers.rubrics.rubric import Rubric
from verifiers.types import RewardFunc, RolloutScore, State

__all__ = ["RubricGroup"]


class RubricGroup(Rubric):
    """Several rubrics as one, each with its own functions, weights, parser and class objects.

    The reward is the sum of the rubrics' rewards; metrics of one name add up. Rubrics score one after the
    other, so a later one can read what an earlier one has left in the state. A rubric that raises is a failed grade
    of its rollouts. Groups may hold groups.

    `reward_funcs`, `reward_weights` and `class_objects` show the union of the rubrics'; to change them, use
    `add_reward_func`, `add_metric` and `add_class_object`, which go to the first rubric, or the rubric itself.

    Args:
        rubrics: one or more.
        **kwargs: every further keyword becomes an attribute, with a warning; `parser` is the first rubric's when left
            out.

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
        self._seen_failing = set()
        set_extra_keywords(self, kwargs)

    def with_rubric(self, rubric: Rubric) -> Self:
        """Return a group of the same kind with one more rubric."""
        group = copy.copy(self)
        group.rubrics = [*self.rubrics, rubric]
        return group

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
        """Return the functions' names, which are the metrics' names."""
        return [name for rubric in self.rubrics for name in rubric.get_reward_func_names()]

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        """Add a function to the first rubric's weighted sum."""
        assert self.rubrics, "RubricGroup must have at least one rubric, whose function it becomes."
        self.rubrics[0].add_reward_func(func, weight)

    def add_class_object(self, name: str, value: Any) -> None:
        """Make an object available to every function of the first rubric that has a parameter of this name."""
        self.rubrics[0].add_class_object(name, value)

    @property
    def has_group_funcs(self) -> bool:
        """Return whether a reward of some rubric may depend on the other rollouts of its prompt."""
        return self.scores_groups_itself or any(rubric.has_group_funcs for rubric in self.rubrics)

    @property
    def is_empty(self) -> bool:
        """Return whether none of the rubrics has anything to score by."""
        return all(rubric.is_empty for rubric in self.rubrics)

    async def score_states(self, states: Sequence[State]) -> list[RolloutScore]:
        """Score rollouts by each rubric, one after the other; as `Rubric.score_states`."""
        totals = [RolloutScore(0.0) for _ in states]
        # an environment without a rubric has an empty one, to which add_rubric adds
        for rubric in [rubric for rubric in self.rubrics if not rubric.is_empty] or self.rubrics:
            for total, score in zip(totals, await self.member_scores(rubric, states), strict=True):
                total["reward"] += score.reward
                for name, value in score.metrics.items():
                    total["metrics"][name] = total["metrics"].get(name, 0.0) + value
        return totals
