"""Quantiles and exact intervals that the statistics need: Student's t, the beta distribution, Clopper and Pearson.

Pure Python, so that an evaluation needs no library of statistics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from statistics import NormalDist

from verifiers.errors import ConfigError

__all__ = ["beta_cdf", "beta_quantile", "clopper_pearson", "t_quantile", "without_variation"]


@functools.lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: float) -> float:
    """The value below which Student's t with `degrees` >= 1 degrees of freedom lies with this probability.

    Up to 1,000 degrees by inverting the incomplete beta function, beyond by the expansion in 1 / degrees of
    Abramowitz and Stegun 26.7.5; relative error below 1e-8.

    Raises:
        ConfigError: a probability that is not between 0 and 1, or degrees below 1.
    """
    if not 0 < probability < 1 or not degrees >= 1:
        raise ConfigError(
            f"Student's t needs a probability between 0 and 1 and at least 1 degree of freedom, "
            f"not {probability!r} and {degrees!r}."
        )
    if probability == 0.5:
        return 0.0
    tail = min(probability, 1 - probability)
    value = _t_by_expansion(tail, degrees) if degrees > 1000 else _t_by_inversion(tail, degrees)
    return value if probability > 0.5 else -value


@functools.lru_cache(maxsize=4096)
def clopper_pearson(right: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact interval for a probability that showed itself `right` times in `trials` independent trials.

    It covers the truth with at least `confidence`, whatever the truth is (Clopper and Pearson 1934).

    Raises:
        ConfigError: not 0 <= right <= trials, or no trial at all.
    """
    if not 0 <= right <= trials or trials < 1:
        raise ConfigError(f"an exact interval needs 0 <= right <= trials and a trial, not {right} of {trials}.")
    tail = (1 - confidence) / 2
    low = 0.0 if right == 0 else beta_quantile(tail, right, trials - right + 1)
    high = 1.0 if right == trials else beta_quantile(1 - tail, right + 1, trials - right)
    return low, high


def without_variation(mean: float, draws: int, bounds: tuple[float, float], confidence: float) -> tuple[float, float]:
    """An exact interval for the mean of a quantity within `bounds` of which all `draws` gave the same value.

    With probability `confidence` at most a share 1 - (alpha / 2)^(1 / draws) of all there is has another value,
    and that share may lie anywhere within the bounds. At either bound this is the interval of Clopper and Pearson.
    """
    other = 1 - ((1 - confidence) / 2) ** (1 / draws)
    low, high = bounds
    return mean - other * (mean - low), mean + other * (high - mean)


def beta_quantile(probability: float, a: float, b: float) -> float:
    """The value below which a beta(a, b) variable lies with this probability, by bisection; error below 1e-12."""
    low, high = 0.0, 1.0
    while high - low > 1e-14:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if beta_cdf(middle, a, b) < probability else (low, middle)
    return (low + high) / 2


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
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


def _t_by_inversion(tail: float, degrees: float) -> float:
    def too_small(value: float) -> bool:
        return beta_cdf(degrees / (degrees + value * value), degrees / 2, 0.5) / 2 > tail

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


def _t_by_expansion(tail: float, degrees: float) -> float:
    z = -NormalDist().inv_cdf(tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))
