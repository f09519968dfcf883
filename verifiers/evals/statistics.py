"""Honest statistics of evaluations: rollouts of one prompt are no independent evidence about the next prompt.

Standard errors are clustered by prompt and intervals use Student's t, which cover the truth about 95 % of the
time where intervals that count every rollout as independent cover it about 65 % of the time. Pure Python.
What is not promised: anything about prompts unlike those that were drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

from verifiers.errors import ConfigError

__all__ = [
    "Estimate",
    "mean_and_stderr_clustered",
    "paired_difference",
    "pass_at_k",
    "pass_hat_k",
    "t_quantile",
]

# Prompt means that differ by less than this are equal: rewards like 0.7 do not average to exactly 0.7.
_SAME = 1e-12

PromptId = TypeVar("PromptId", bound=Hashable)


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


def mean_and_stderr_clustered(rewards_by_prompt: Sequence[Sequence[float]], *, confidence: float = 0.95) -> Estimate:
    """Mean reward with a standard error that treats the rollouts of a prompt as one cluster.

    With as many rollouts of each prompt this is the mean of the prompts' means, and its standard error the
    standard deviation of those over sqrt(n). In general it is the ratio estimator r = sum of rewards / number of
    rollouts, with variance n / (n - 1) * sum_i (sum_j (x_ij - r))^2 / rollouts^2 (Cochran, Sampling Techniques,
    3rd edition, section 9A; the same as a cluster-robust error with one regressor), and Student's t with n - 1
    degrees of freedom over n prompts.

    Where all prompts have the same mean c, the standard error is 0 and t has nothing to say. For rewards within
    [0, 1] the interval is then exact: with probability `confidence`, at most a share 1 - (alpha / 2)^(1/n) of all
    prompts has another mean. For all right or all wrong this is the interval of Clopper and Pearson over prompts.
    For other rewards it is NaN.

    Args:
        rewards_by_prompt: the rewards of each prompt's rollouts, failed ones left out; prompts without any are
            skipped. Feed it one number a prompt, such as `pass_at_k`, to get an interval for that.
        confidence: coverage of the interval, default 0.95.

    Raises:
        ConfigError: `confidence` is not between 0 and 1.
    """
    _check_confidence(confidence)
    clusters = [list(rewards) for rewards in rewards_by_prompt if len(rewards)]
    prompts, rollouts = len(clusters), sum(map(len, clusters))
    if not prompts:
        return Estimate(math.nan, math.nan, math.nan, math.nan, 0, 0)
    mean = math.fsum(reward for rewards in clusters for reward in rewards) / rollouts
    if prompts == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, prompts, rollouts)
    means = [math.fsum(rewards) / len(rewards) for rewards in clusters]
    if max(means) - min(means) <= _SAME:
        bounded = all(0 <= reward <= 1 for rewards in clusters for reward in rewards)
        low, high = _without_variation(mean, prompts, 0.0, confidence) if bounded else (math.nan, math.nan)
        return Estimate(mean, 0.0, low, high, prompts, rollouts)
    squares = math.fsum(math.fsum(reward - mean for reward in rewards) ** 2 for rewards in clusters)
    stderr = math.sqrt(prompts / (prompts - 1) * squares) / rollouts
    half = t_quantile((1 + confidence) / 2, prompts - 1) * stderr
    return Estimate(mean, stderr, mean - half, mean + half, prompts, rollouts)


def paired_difference(
    before: Mapping[PromptId, Sequence[float]],
    after: Mapping[PromptId, Sequence[float]],
    *,
    confidence: float = 0.95,
) -> Estimate:
    """How much better `after` does than `before` on the same prompts, paired by prompt.

    The mean over prompts of (mean reward after - mean reward before), with the paired t interval. Pairing takes
    the difficulty of prompts out of the error, so it sees differences that two separate intervals hide.

    Args:
        before, after: rewards of each prompt's rollouts by example id; the two may hold different numbers of
            rollouts. Prompts that are missing or without rewards on one side are left out.
        confidence: coverage of the interval, default 0.95.

    Returns:
        An Estimate whose `rollouts` counts both sides. Where no difference varies, the interval is exact as in
        `mean_and_stderr_clustered`, for rewards within [0, 1], and else NaN.

    Raises:
        ConfigError: `confidence` is not between 0 and 1.
    """
    _check_confidence(confidence)
    shared = [key for key in before if len(before[key]) and len(after.get(key, ()))]
    rollouts = sum(len(before[key]) + len(after[key]) for key in shared)
    differences = [_mean(after[key]) - _mean(before[key]) for key in shared]
    prompts = len(shared)
    if not prompts:
        return Estimate(math.nan, math.nan, math.nan, math.nan, 0, 0)
    mean = _mean(differences)
    if prompts == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, 1, rollouts)
    if max(differences) - min(differences) <= _SAME:
        rewards = (reward for key in shared for side in (before, after) for reward in side[key])
        bounded = all(0 <= reward <= 1 for reward in rewards)
        low, high = _without_variation(mean, prompts, -1.0, confidence) if bounded else (math.nan, math.nan)
        return Estimate(mean, 0.0, low, high, prompts, rollouts)
    variance = math.fsum((difference - mean) ** 2 for difference in differences) / (prompts - 1)
    stderr = math.sqrt(variance / prompts)
    half = t_quantile((1 + confidence) / 2, prompts - 1) * stderr
    return Estimate(mean, stderr, mean - half, mean + half, prompts, rollouts)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k rollouts is right, estimated without bias from c right ones among n.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374).

    Returns:
        A float in [0, 1]; NaN for k > n, which n rollouts cannot tell.

    Raises:
        ConfigError: not 0 <= c <= n, or k < 1.
    """
    _check_counts(n, c, k)
    return math.nan if k > n else (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Chance that all of k rollouts are right, estimated without bias from c right ones among n.

    C(c, k) / C(n, k), pass^k of tau-bench (Yao et al. 2024, arXiv:2406.12045). Returns and raises as `pass_at_k`.
    """
    _check_counts(n, c, k)
    return math.nan if k > n else math.comb(c, k) / math.comb(n, k)


@functools.lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """The value below which Student's t with `degrees` >= 1 degrees of freedom lies with this probability.

    Up to 1,000 degrees by inverting the incomplete beta function, beyond by the expansion in 1 / degrees of
    Abramowitz and Stegun 26.7.5; relative error below 1e-8.

    Raises:
        ConfigError: a probability that is not between 0 and 1, or degrees below 1.
    """
    if not 0 < probability < 1 or degrees < 1:
        raise ConfigError(
            f"Student's t needs a probability between 0 and 1 and at least 1 degree of freedom, "
            f"not {probability!r} and {degrees!r}."
        )
    if probability == 0.5:
        return 0.0
    tail = min(probability, 1 - probability)
    value = _t_by_expansion(tail, degrees) if degrees > 1000 else _t_by_inversion(tail, degrees)
    return value if probability > 0.5 else -value


def _without_variation(mean: float, prompts: int, smallest: float, confidence: float) -> tuple[float, float]:
    """Interval for a mean within [smallest, 1] where all of `prompts` draws gave the same value."""
    other = 1 - ((1 - confidence) / 2) ** (1 / prompts)
    return mean - other * (mean - smallest), mean + other * (1 - mean)


def _t_by_inversion(tail: float, degrees: int) -> float:
    def too_small(value: float) -> bool:
        return _beta_cdf(degrees / (degrees + value * value), degrees / 2, 0.5) / 2 > tail

    return _root(too_small)


def _root(too_small: Callable[[float], bool]) -> float:
    high = 1.0
    while too_small(high):
        high *= 2
    low = high / 2 if high > 1 else 0.0
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return (low + high) / 2


def _t_by_expansion(tail: float, degrees: int) -> float:
    z = -NormalDist().inv_cdf(tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def _beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_cdf(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    # Lentz's method, as Thompson and Barnett give it: numerators and denominators never vanish.
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 / ((1 + numerator * d) or tiny)
            c = (1 + numerator / c) or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return front * fraction / a


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence is {confidence!r}, but it must lie between 0 and 1, such as 0.95.")


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n or k < 1:
        raise ConfigError(f"pass rates need 0 <= c <= n and k >= 1, not n={n}, c={c}, k={k}.")
