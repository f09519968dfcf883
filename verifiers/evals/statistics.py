"""Honest statistics of evaluations: rollouts of one prompt are not independent evidence about the next prompt.

A prompt counts once, by the mean of its scored rollouts. Standard errors are clustered by prompt and intervals use
Student's t, or are exact where every prompt is all right or all wrong. What is not promised: anything about prompts
unlike those that were drawn, or about the rollouts that failed. docs/concepts/statistics.md says what was measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from verifiers.errors import ConfigError

PromptId = TypeVar("PromptId", bound=Hashable)
Bounds = tuple[float, float]
UNBOUNDED: Bounds = (-math.inf, math.inf)

_POWER = 0.8
# Prompt means that differ by less than this are equal: rewards like 0.7 do not average to exactly 0.7.
_SAME = 1e-12


# -- intervals of means --------------------------------------------------------------------------------------------


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
    """Estimate the mean reward, with a standard error that treats the rollouts of a prompt as one cluster.

    The estimate is the mean over prompts of each prompt's mean reward, so that a prompt some of whose rollouts
    failed counts as much as any other. Its standard error is the standard deviation of those n means over sqrt(n);
    the interval is by Student's t with n - 1 degrees of freedom, cut off at the bounds of the rewards.

    At the edges t has nothing to say, and the interval is exact. Where every prompt's mean is one of the bounds
    (all right or all wrong), it is that of Clopper and Pearson over prompts. Where all prompts have the same mean,
    at most a share 1 - (alpha / 2)^(1/n) of all prompts has another one with probability `confidence`; without
    bounds that says nothing, and the interval is NaN.

    Args:
        rewards_by_prompt: the rewards of each prompt's rollouts, failed ones left out; prompts without any are
            skipped.
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


def mean_over_prompts(
    values: Sequence[float], rollouts: int, *, confidence: float = 0.95, bounds: Bounds | None = None
) -> Estimate:
    """Estimate the mean of one number a prompt, such as its `pass_at_k`, that so many rollouts were made into."""
    _check_confidence(confidence)
    return _estimate(values, rollouts, _bounds(bounds, [values]), confidence)


def paired_difference(
    before: Mapping[PromptId, Sequence[float]],
    after: Mapping[PromptId, Sequence[float]],
    *,
    confidence: float = 0.95,
    bounds: Bounds | None = None,
) -> Estimate:
    """Estimate the gain of `after` over `before` on the same prompts, paired by prompt.

    The mean over prompts of (mean reward after - mean reward before), with the paired t interval. Pairing takes
    the difficulty of prompts out of the error, so it sees differences that two separate intervals hide.

    Args:
        before: rewards of each prompt's rollouts by example id. Prompts that are missing or without rewards on one
            side are left out.
        after: the same of the other run; numbers of rollouts may differ.
        confidence: as in `mean_and_stderr_clustered`.
        bounds: as in `mean_and_stderr_clustered`, of the rewards, not of their differences.

    Returns:
        An Estimate whose `rollouts` counts both sides. Where no difference varies, the interval is exact as in
        `mean_and_stderr_clustered`, and NaN without bounds.
    """
    _check_confidence(confidence)
    shared = [key for key in before if len(before[key]) and len(after.get(key, ()))]
    rollouts = sum(len(before[key]) + len(after[key]) for key in shared)
    known = _bounds(bounds, [side[key] for key in shared for side in (before, after)])
    return _estimate(
        [_mean(after[key]) - _mean(before[key]) for key in shared], rollouts, _differences(known), confidence
    )


def unpaired_difference(
    before: Sequence[Sequence[float]],
    after: Sequence[Sequence[float]],
    *,
    confidence: float = 0.95,
    bounds: Bounds | None = None,
) -> Estimate:
    """Estimate the gain of `after` over `before` where the two had different prompts.

    The difference of the means over prompts, with Welch's t interval (Welch 1947) over prompts. Where neither side
    varies, the two exact intervals are combined, each at half the error. `prompts` and `rollouts` count both sides.
    """
    _check_confidence(confidence)
    known = _bounds(bounds, [rewards for side in (before, after) for rewards in side])
    each = 1 - (1 - confidence) / 2
    a, b = (mean_and_stderr_clustered(side, confidence=each, bounds=known or UNBOUNDED) for side in (before, after))
    mean, stderr = b.mean - a.mean, math.hypot(a.stderr, b.stderr)
    if 0 < stderr < math.inf:
        shares = [(e.stderr / stderr, e.prompts - 1) for e in (a, b)]
        degrees = 1 / sum(share**4 / count for share, count in shares)
        half = t_quantile((1 + confidence) / 2, degrees) * stderr
        low, high = mean - half, mean + half
    else:
        low, high = b.low - a.high, b.high - a.low
    low, high = _cut(low, high, _differences(known))
    return Estimate(mean, stderr, low, high, a.prompts + b.prompts, a.rollouts + b.rollouts)


def detectable_difference(stderr: float, degrees: float, *, confidence: float = 0.95) -> float:
    """Return the smallest true difference that an evaluation like this one would find with probability 0.8.

    (t at (1 + confidence) / 2 + t at 0.8) * stderr, the usual approximation to the noncentral t. NaN without a
    standard error above 0, or with fewer than one degree of freedom.
    """
    if not stderr > 0 or not degrees >= 1:
        return math.nan
    return (t_quantile((1 + confidence) / 2, degrees) + t_quantile(_POWER, degrees)) * stderr


def _mean(values: Sequence[float]) -> float:
    try:
        return fmean(values)
    except OverflowError:
        return math.nan


def _estimate(values: Sequence[float], rollouts: int, bounds: Bounds | None, confidence: float) -> Estimate:
    """Return the mean of one independent value a prompt, each within `bounds`."""
    prompts = len(values)
    if not prompts:
        return Estimate(math.nan, math.nan, math.nan, math.nan, 0, 0)
    mean = _mean(values)
    if prompts == 1:
        return Estimate(mean, math.nan, math.nan, math.nan, 1, rollouts)
    if max(values) - min(values) <= _SAME:
        low, high = without_variation(mean, prompts, bounds, confidence) if bounds else (math.nan, math.nan)
        return Estimate(mean, 0.0, low, high, prompts, rollouts)
    try:
        stderr = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (prompts - 1) / prompts)
    except OverflowError:
        stderr = math.inf
    if bounds is not None and _all_at(values, bounds):
        right = sum(value > mean for value in values)
        low, high = (
            bounds[0] + share * (bounds[1] - bounds[0]) for share in clopper_pearson(right, prompts, confidence)
        )
    else:
        half = t_quantile((1 + confidence) / 2, prompts - 1) * stderr
        low, high = _cut(mean - half, mean + half, bounds)
    return Estimate(mean, stderr, low, high, prompts, rollouts)


def keeps(bounds: Bounds, clusters: Iterable[Sequence[float]]) -> bool:
    """Return whether all rewards lie within the bounds, but for a rounding error."""
    return all(bounds[0] - _SAME <= reward <= bounds[1] + _SAME for rewards in clusters for reward in rewards)


def _bounds(given: Bounds | None, clusters: Sequence[Sequence[float]]) -> Bounds | None:
    low, high = given or (0.0, 1.0)
    within = keeps((low, high), clusters)
    if given is not None and not within:
        raise ConfigError(f"bounds is {given!r}, but a reward lies outside; give the bounds of all rewards, or None.")
    return (low, high) if within and math.isfinite(high - low) else None


def _differences(bounds: Bounds | None) -> Bounds | None:
    """Return the bounds of a difference of two values that keep these."""
    return None if bounds is None else (bounds[0] - bounds[1], bounds[1] - bounds[0])


def _all_at(values: Sequence[float], bounds: Bounds) -> bool:
    return all(min(abs(value - bounds[0]), abs(value - bounds[1])) <= _SAME for value in values)


def _cut(low: float, high: float, bounds: Bounds | None) -> Bounds:
    if bounds is None:
        return low, high
    # comparisons in this order let NaN through
    return (bounds[0] if low < bounds[0] else low), (bounds[1] if high > bounds[1] else high)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence is {confidence!r}, but it must lie between 0 and 1, such as 0.95.")


# -- distributions -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t with `degrees` >= 1 degrees of freedom at this probability.

    By inverting the incomplete beta function; relative error below 1e-8 up to 10 million degrees.
    """
    if probability == 0.5:
        return 0.0
    tail = min(probability, 1 - probability)

    def too_small(value: float) -> bool:
        return beta_cdf(degrees / (degrees + value * value), degrees / 2, 0.5) / 2 > tail

    high = 1.0
    while too_small(high):
        high *= 2
    value = _root(too_small, 0.0, high)
    return value if probability > 0.5 else -value


def _root(too_small: Callable[[float], bool], low: float, high: float) -> float:
    """Return by bisection where `too_small` ceases to hold, to 13 digits."""
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return (low + high) / 2


@functools.lru_cache(maxsize=4096)
def clopper_pearson(right: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the exact interval for a probability, given `right` successes in `trials` independent trials.

    It covers the truth with at least `confidence`, whatever the truth is (Clopper and Pearson 1934).
    """
    tail = (1 - confidence) / 2
    low = 0.0 if right == 0 else beta_quantile(tail, right, trials - right + 1)
    high = 1.0 if right == trials else beta_quantile(1 - tail, right + 1, trials - right)
    return low, high


def without_variation(mean: float, draws: int, bounds: Bounds, confidence: float) -> tuple[float, float]:
    """Return an exact interval for the mean of a quantity within `bounds` of which all `draws` gave the same value.

    With probability `confidence` at most a share 1 - (alpha / 2)^(1 / draws) of all there is has another value,
    and that share may lie anywhere within the bounds. At either bound this is the interval of Clopper and Pearson.
    """
    other = 1 - ((1 - confidence) / 2) ** (1 / draws)
    low, high = bounds
    return mean - other * (mean - low), mean + other * (high - mean)


def beta_quantile(probability: float, a: float, b: float) -> float:
    """Return the quantile of beta(a, b) at this probability."""
    return _root(lambda x: beta_cdf(x, a, b) < probability, 0.0, 1.0)


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_cdf(1 - x, b, a)
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


# -- permutation tests ---------------------------------------------------------------------------------------------

_MOST_ENUMERATED = 16
_CELLS_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True)
class PermutationTest:
    """A two-sided p value.

    Attributes:
        p: NaN without data.
        exact: True where all arrangements were counted, False where some were drawn at random.
    """

    p: float
    exact: bool


def sign_flip_test(differences: Sequence[float], *, draws: int = 50_000, seed: int = 0) -> PermutationTest:
    """Return how often chance alone gives a sum of paired differences as large as this one, by flipping signs.

    If two runs do not differ, each prompt's difference (after - before) is as likely with the other sign. All 2^m
    arrangements of the m differences that are not 0 are counted for m up to 16; beyond, p is
    (1 + as large) / (1 + draws), which is never 0 (Phipson and Smyth 2010). The same seed gives the same p.
    """
    import numpy as np

    values = np.array([difference for difference in differences if abs(difference) > 1e-12], dtype=np.float64)
    if not len(differences):
        return PermutationTest(math.nan, True)
    if not len(values):
        return PermutationTest(1.0, True)
    # sums of the same numbers in another order differ by rounding
    threshold = abs(values.sum()) - 1e-9 * np.abs(values).sum()
    if len(values) <= _MOST_ENUMERATED:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        return PermutationTest(float(np.mean(np.abs(sums) >= threshold)), True)
    random = np.random.default_rng(seed)
    as_large, at_once = 0, max(1, _CELLS_AT_ONCE // len(values))
    for start in range(0, draws, at_once):
        signs = random.integers(0, 2, size=(min(at_once, draws - start), len(values)), dtype=np.int8)
        as_large += int(np.sum(np.abs(signs @ (2 * values) - values.sum()) >= threshold))
    return PermutationTest((1 + as_large) / (1 + draws), False)


def shuffle_test(
    before: Sequence[float], after: Sequence[float], *, draws: int = 20_000, seed: int = 0
) -> PermutationTest:
    """Return how often chance alone sets two unpaired samples, of one value a prompt, so far apart."""
    import numpy as np

    if not len(before) or not len(after):
        return PermutationTest(math.nan, False)
    values = np.array([*before, *after], dtype=np.float64)
    size = len(before)

    def apart(first: float) -> float:
        return abs((values.sum() - first) / (len(values) - size) - first / size)

    threshold = apart(float(values[:size].sum())) - 1e-9 * float(np.abs(values).max() or 1.0)
    random = np.random.default_rng(seed)
    as_large = sum(apart(float(random.permutation(values)[:size].sum())) >= threshold for _ in range(draws))
    return PermutationTest((1 + as_large) / (1 + draws), False)


# -- k of a prompt's n rollouts ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate without bias the chance that at least one of k rollouts is right, from c right ones among n.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374); NaN for k > n, which n rollouts cannot tell.
    """
    _check_counts(n, c, k)
    return math.nan if k > n else (math.comb(n, k) - math.comb(n - c, k)) / math.comb(n, k)


@functools.lru_cache(maxsize=4096)
def pass_hat_k(n: int, c: int, k: int) -> float:
    """Estimate without bias the chance that all of k rollouts are right, from c right ones among n.

    C(c, k) / C(n, k), pass^k of tau-bench (Yao et al. 2024, arXiv:2406.12045). Returns and raises as `pass_at_k`.
    """
    _check_counts(n, c, k)
    return math.nan if k > n else math.comb(c, k) / math.comb(n, k)


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Estimate the expected best reward of k rollouts without bias from the rewards of a prompt's n.

    The mean of the maximum over all choices of k of the n: the i-th smallest reward is the largest of
    C(i - 1, k - 1) of the C(n, k) choices. For rewards of 0 and 1 this is `pass_at_k`; NaN for k > n.
    """
    if k < 1:
        raise ConfigError(f"best@k needs k >= 1, not {k}.")
    if k > len(rewards):
        return math.nan
    return math.fsum(
        weight * reward for weight, reward in zip(_weights(len(rewards), k), sorted(rewards), strict=True)
    )


def sizes_up_to(n: int) -> list[int]:
    """Return the k that are worth a look with n rollouts a prompt: powers of two up to n, and n itself."""
    powers = [2**power for power in range(n.bit_length())]
    return powers if not powers or powers[-1] == n else [*powers, n]


@functools.lru_cache(maxsize=256)
def _weights(n: int, k: int) -> tuple[float, ...]:
    """Return C(i - 1, k - 1) / C(n, k) for i = 1 .. n, downwards by ratios: the binomials alone would overflow."""
    weights = [0.0] * n
    weights[n - 1] = k / n
    for i in range(n - 1, k - 1, -1):
        weights[i - 1] = weights[i] * (i - k + 1) / i
    return tuple(weights)


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n or k < 1:
        raise ConfigError(f"pass rates need 0 <= c <= n and k >= 1, not n={n}, c={c}, k={k}.")
