"""Unbiased estimates for k of a prompt's n rollouts: any right, all right, the best reward."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from verifiers.errors import ConfigError

__all__ = ["best_at_k", "pass_at_k", "pass_hat_k", "sizes_up_to"]


@functools.lru_cache(maxsize=4096)
def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate without bias the chance that at least one of k rollouts is right, from c right ones among n.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374).

    Returns:
        A float in [0, 1]; NaN for k > n, which n rollouts cannot tell.

    Raises:
        ConfigError: not 0 <= c <= n, or k < 1.
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
    """Estimate the expected best reward of k rollouts without bias from the rewards of n.

    The mean of the maximum over all choices of k of the n: the i-th smallest reward is the largest of
    C(i - 1, k - 1) of the C(n, k) choices. For rewards of 0 and 1 this is `pass_at_k`.

    Args:
        rewards: of one prompt's rollouts, in any order.
        k: how many of them one would draw.

    Returns:
        In the units of the rewards; NaN for k > n.

    Raises:
        ConfigError: k < 1.
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
    powers = [2**power for power in range(n.bit_length()) if 2**power <= n]
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
