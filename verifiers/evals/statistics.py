"""Honest statistics of evaluations: rollouts of one prompt are no independent evidence about the next prompt.

A prompt counts once, by the mean of its scored rollouts. Standard errors are clustered by prompt and intervals use
Student's t, or are exact where every prompt is all right or all wrong. What is not promised: anything about prompts
unlike those that were drawn, or about the rollouts that failed. docs/concepts/statistics.md says what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from verifiers.errors import ConfigError
from verifiers.evals.intervals import clopper_pearson, t_quantile, without_variation
from verifiers.evals.pass_at_k import best_at_k, pass_at_k, pass_hat_k

__all__ = [
    "Bounds",
    "Estimate",
    "best_at_k",
    "detectable_difference",
    "mean_and_stderr_clustered",
    "paired_difference",
    "pass_at_k",
    "pass_hat_k",
    "t_quantile",
    "unpaired_difference",
]

# Prompt means that differ by less than this are equal: rewards like 0.7 do not average to exactly 0.7.
_SAME = 1e-12

PromptId = TypeVar("PromptId", bound=Hashable)
Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and how well it is known. NaN stands for what the data cannot tell.

    Attributes:
        mean: the estimate, in the units of the rewards.
        stderr: standard error, clustered by prompt; NaN with fewer than two prompts.
        low, high: 95 % interval (or the level asked for); NaN with fewer than two prompts.
        prompts: prompts with at least one rollout; what the interval rests on.
        rollouts: rollouts in all.
    """

    mean: float
    stderr: float
    low: float
    high: float
    prompts: int
    rollouts: int


def mean_and_stderr_clustered(
    rewards_by_prompt: Sequence[Sequence[float]], *, confidence: float = 0.95, bounds: Bounds | None = None
) -> Estimate:
    """Mean reward with a standard error that treats the rollouts of a prompt as one cluster.

    The estimate is the mean over prompts of each prompt's mean reward, so that a prompt some of whose rollouts
    failed counts as much as any other. Its standard error is the standard deviation of those n means over sqrt(n);
    the interval is by Student's t with n - 1 degrees of freedom, cut off at the bounds of the rewards.

    At the edges t has nothing to say, and the interval is exact. Where every prompt's mean is one of the bounds
    (all right or all wrong), it is that of Clopper and Pearson over prompts. Where all prompts have the same mean,
    at most a share 1 - (alpha / 2)^(1/n) of all prompts has another one with probability `confidence`; without
    bounds that says nothing, and the interval is NaN.

    Args:
        rewards_by_prompt: the rewards of each prompt's rollouts, failed ones left out; prompts without any are
            skipped. Feed it one number a prompt, such as `pass_at_k`, to get an interval for that.
        confidence: coverage of the interval, default 0.95.
        bounds: the smallest and largest reward there can be. None, the default, stands for (0, 1) where all
            rewards lie within, and else for none; (-inf, inf) says that there are none.

    Raises:
        ConfigError: `confidence` is not between 0 and 1, or a reward lies outside `bounds`.
    """
    _check_confidence(confidence)
    clusters = [rewards for rewards in rewards_by_prompt if len(rewards)]
    known = _bounds(bounds, clusters)
    return _estimate([_mean(rewards) for rewards in clusters], sum(map(len, clusters)), known, confidence)


def paired_difference(
    before: Mapping[PromptId, Sequence[float]],
    after: Mapping[PromptId, Sequence[float]],
    *,
    confidence: float = 0.95,
    bounds: Bounds | None = None,
) -> Estimate:
    """How much better `after` does than `before` on the same prompts, paired by prompt.

    The mean over prompts of (mean reward after - mean reward before), with the paired t interval. Pairing takes
    the difficulty of prompts out of the error, so it sees differences that two separate intervals hide.

    Args:
        before, after: rewards of each prompt's rollouts by example id; the two may hold different numbers of
            rollouts. Prompts that are missing or without rewards on one side are left out.
        confidence, bounds: as in `mean_and_stderr_clustered`; bounds of the rewards, not of their differences.

    Returns:
        An Estimate whose `rollouts` counts both sides. Where no difference varies, the interval is exact as in
        `mean_and_stderr_clustered`, and NaN without bounds.

    Raises:
        ConfigError: as `mean_and_stderr_clustered`.
    """
    _check_confidence(confidence)
    shared = [key for key in before if len(before[key]) and len(after.get(key, ()))]
    rollouts = sum(len(before[key]) + len(after[key]) for key in shared)
    known = _bounds(bounds, [side[key] for key in shared for side in (before, after)])
    width = None if known is None else (known[0] - known[1], known[1] - known[0])
    return _estimate([_mean(after[key]) - _mean(before[key]) for key in shared], rollouts, width, confidence)


def unpaired_difference(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    bounds: Bounds | None = None,
) -> Estimate:
    """How much better `after` does than `before` where the two had different prompts.

    The difference of the means over prompts, with Welch's t interval (Welch 1947) over prompts. Where neither side
    varies, the two exact intervals are combined, each at half the error.

    Args:
        before, after: rewards of each prompt's rollouts; prompts without any are skipped.
        confidence, bounds: as in `paired_difference`.

    Returns:
        An Estimate whose `prompts` and `rollouts` count both sides.

    Raises:
        ConfigError: as `mean_and_stderr_clustered`.
    """
    _check_confidence(confidence)
    known = _bounds(bounds, [rewards for side in (before, after) for rewards in side if len(rewards)])
    each = 1 - (1 - confidence) / 2
    unbounded = (-math.inf, math.inf)
    a, b = (mean_and_stderr_clustered(side, confidence=each, bounds=known or unbounded) for side in (before, after))
    mean, stderr = b.mean - a.mean, math.hypot(a.stderr, b.stderr)
    if stderr > 0:
        parts = [(e.stderr**2, e.prompts - 1) for e in (a, b)]
        degrees = sum(square for square, _ in parts) ** 2 / sum(square**2 / count for square, count in parts)
        half = t_quantile((1 + confidence) / 2, degrees) * stderr
        low, high = mean - half, mean + half
    else:
        low, high = b.low - a.high, b.high - a.low
    if known is not None:
        low, high = _cut(low, high, (known[0] - known[1], known[1] - known[0]))
    return Estimate(mean, stderr, low, high, a.prompts + b.prompts, a.rollouts + b.rollouts)


def detectable_difference(stderr: float, degrees: float, *, power: float = 0.8, confidence: float = 0.95) -> float:
    """The smallest true difference that an evaluation like this one would find with probability `power`.

    (t at (1 + confidence) / 2 + t at power) * stderr, the usual approximation to the noncentral t.

    Returns:
        In the units of the rewards; NaN without a standard error above 0, or fewer than one degree of freedom.
    """
    if not stderr > 0 or not degrees >= 1:
        return math.nan
    return (t_quantile((1 + confidence) / 2, degrees) + t_quantile(power, degrees)) * stderr


def _estimate(values: Sequence[float], rollouts: int, bounds: Bounds | None, confidence: float) -> Estimate:
    """The mean of one independent value a prompt, each within `bounds`."""
    prompts = len(values)
    if not prompts:
        return Estimate(math.nan, math.nan, math.nan, math.nan, 0, 0)
    mean = _mean(values)
    if prompts == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, 1, rollouts)
    if max(values) - min(values) <= _SAME:
        low, high = without_variation(mean, prompts, bounds, confidence) if bounds else (math.nan, math.nan)
        return Estimate(mean, 0.0, low, high, prompts, rollouts)
    stderr = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (prompts - 1) / prompts)
    if bounds is not None and _all_at(values, bounds):
        right = sum(value > mean for value in values)
        low, high = (
            bounds[0] + share * (bounds[1] - bounds[0]) for share in clopper_pearson(right, prompts, confidence)
        )
        return Estimate(mean, stderr, low, high, prompts, rollouts)
    half = t_quantile((1 + confidence) / 2, prompts - 1) * stderr
    low, high = mean - half, mean + half
    if bounds is not None:
        low, high = _cut(low, high, bounds)
    return Estimate(mean, stderr, low, high, prompts, rollouts)


def _bounds(given: Bounds | None, clusters: Sequence[Sequence[float]]) -> Bounds | None:
    low, high = given or (0.0, 1.0)
    within = all(low - _SAME <= reward <= high + _SAME for rewards in clusters for reward in rewards)
    if given is not None and not within:
        raise ConfigError(f"bounds is {given!r}, but a reward lies outside; give the bounds of all rewards, or None.")
    return (low, high) if within and math.isfinite(high - low) else None


def _all_at(values: Sequence[float], bounds: Bounds) -> bool:
    return all(min(abs(value - bounds[0]), abs(value - bounds[1])) <= _SAME for value in values)


def _cut(low: float, high: float, bounds: Bounds) -> Bounds:
    # comparisons in this order let NaN through
    return (bounds[0] if low < bounds[0] else low), (bounds[1] if high > bounds[1] else high)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence is {confidence!r}, but it must lie between 0 and 1, such as 0.95.")
