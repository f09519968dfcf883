"""How much of the spread of rewards is between prompts and how much within, and what more of either would buy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["VarianceSplit", "split_variance"]

Advice = Literal["more prompts", "more rollouts", ""]


@dataclass(frozen=True, slots=True)
class VarianceSplit:
    """Variance of rewards between prompts and within, and what it means. NaN stands for what cannot be told.

    Attributes:
        between: variance of the prompts' true means; 0 where the estimate would be negative.
        within: variance of rewards around their prompt's mean.
        rollouts_per_prompt: the size of a prompt's group; where they differ, that of ANOVA (see `split_variance`).
    """

    between: float
    within: float
    rollouts_per_prompt: float

    @property
    def share_between(self) -> float:
        """Part of the variance of one reward that is the prompt's: the intraclass correlation, 0 to 1."""
        total = self.between + self.within
        return self.between / total if total > 0 else math.nan

    @property
    def design_effect(self) -> float:
        """How many times the variance of the mean is what independent rollouts would give: 1 + (n - 1) * share."""
        return 1 + (self.rollouts_per_prompt - 1) * self.share_between

    @property
    def stderr_with_twice_the_rollouts(self) -> float:
        """What twice the rollouts of each prompt would make of the standard error, as a factor: 0.71 to 1.

        Twice the prompts give 0.71 always.
        """
        per_prompt = self.within / self.rollouts_per_prompt
        now = self.between + per_prompt
        return math.sqrt((self.between + per_prompt / 2) / now) if now > 0 else math.nan

    @property
    def advice(self) -> Advice:
        """What narrows the interval: "more prompts" where most of the error is which prompts were drawn, "more
        rollouts" where most of it is the rollouts' own luck (new prompts would serve as well), "" where nothing
        can be told.
        """
        per_prompt = self.within / self.rollouts_per_prompt
        if math.isnan(self.between) or self.between + per_prompt <= 0:
            return ""
        return "more prompts" if self.between >= per_prompt else "more rollouts"


def split_variance(rewards_by_prompt: Sequence[Sequence[float]]) -> VarianceSplit:
    """Estimate the variance between prompts and within them by one-way analysis of variance.

    between = (MSB - MSW) / n0, where MSB and MSW are the mean squares between and within a prompts with n_i rollouts
    each, N in all, and n0 = (N - sum n_i^2 / N) / (a - 1) (Searle, Casella and McCulloch, Variance Components,
    section 3.6). A negative estimate is set to 0.

    Args:
        rewards_by_prompt: the rewards of each prompt's scored rollouts; prompts without any are skipped.

    Returns:
        NaN in all fields with fewer than two prompts, or where no prompt has two rollouts.
    """
    groups = [rewards for rewards in rewards_by_prompt if len(rewards)]
    prompts, total = len(groups), sum(map(len, groups))
    if prompts < 2 or total == prompts:
        return VarianceSplit(math.nan, math.nan, math.nan)
    size = (total - sum(len(rewards) ** 2 for rewards in groups) / total) / (prompts - 1)
    means = [math.fsum(rewards) / len(rewards) for rewards in groups]
    overall = math.fsum(reward for rewards in groups for reward in rewards) / total
    squares = math.fsum(
        (reward - mean) ** 2 for rewards, mean in zip(groups, means, strict=True) for reward in rewards
    )
    within = squares / (total - prompts)
    spread = math.fsum(len(rewards) * (mean - overall) ** 2 for rewards, mean in zip(groups, means, strict=True))
    return VarianceSplit(max(0.0, (spread / (prompts - 1) - within) / size), within, size)
