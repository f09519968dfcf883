"""p values that assume no distribution: what a difference would be if the two runs were one and the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PermutationTest", "shuffle_test", "sign_flip_test"]

_MOST_ENUMERATED = 16
_CELLS_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True)
class PermutationTest:
    """A two-sided p value.

    Attributes:
        p: NaN without data.
        exact: True where all arrangements were counted, False where `draws` were drawn at random.
        draws: arrangements looked at.
    """

    p: float
    exact: bool
    draws: int


def sign_flip_test(differences: Sequence[float], *, draws: int = 50_000, seed: int = 0) -> PermutationTest:
    """How often chance alone would give a sum of paired differences as large as this one, by flipping signs.

    If two runs do not differ, each prompt's difference is as likely with the other sign. All 2^m arrangements of
    the m differences that are not 0 are counted for m up to 16; beyond, p is (1 + as large) / (1 + draws), which
    is never 0 (Phipson and Smyth 2010).

    Args:
        differences: one a prompt, after - before.
        draws: random arrangements where there are too many to count.
        seed: of those draws: the same seed gives the same p.
    """
    import numpy as np

    values = np.array([difference for difference in differences if abs(difference) > 1e-12], dtype=np.float64)
    if not len(differences):
        return PermutationTest(math.nan, True, 0)
    if not len(values):
        return PermutationTest(1.0, True, 1)
    # sums of the same numbers in another order differ by rounding
    threshold = abs(values.sum()) - 1e-9 * np.abs(values).sum()
    if len(values) <= _MOST_ENUMERATED:
        sums = np.zeros(1)
        for value in values:
            sums = np.concatenate([sums + value, sums - value])
        return PermutationTest(float(np.mean(np.abs(sums) >= threshold)), True, len(sums))
    random = np.random.default_rng(seed)
    as_large, at_once = 0, max(1, _CELLS_AT_ONCE // len(values))
    for start in range(0, draws, at_once):
        signs = random.integers(0, 2, size=(min(at_once, draws - start), len(values)), dtype=np.int8)
        as_large += int(np.sum(np.abs(signs @ (2 * values) - values.sum()) >= threshold))
    return PermutationTest((1 + as_large) / (1 + draws), False, draws)


def shuffle_test(
    before: Sequence[float], after: Sequence[float], *, draws: int = 20_000, seed: int = 0
) -> PermutationTest:
    """How often chance alone would set two unpaired samples so far apart, by dealing their values out anew.

    Args:
        before, after: one value a prompt.
        draws: random deals.
        seed: of those deals: the same seed gives the same p.
    """
    import numpy as np

    if not len(before) or not len(after):
        return PermutationTest(math.nan, False, 0)
    values = np.array([*before, *after], dtype=np.float64)
    size = len(before)

    def apart(first: float) -> float:
        return abs((values.sum() - first) / (len(values) - size) - first / size)

    threshold = apart(float(values[:size].sum())) - 1e-9 * float(np.abs(values).max() or 1.0)
    random = np.random.default_rng(seed)
    as_large = sum(apart(float(random.permutation(values)[:size].sum())) >= threshold for _ in range(draws))
    return PermutationTest((1 + as_large) / (1 + draws), False, draws)
