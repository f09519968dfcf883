"""Weighted sampling of datasets, and of rows without replacement, as functions of a seed and a place in the run.

How many draws a dataset gets follows its weight as closely as whole numbers can; only the order of each dataset's
rows is random.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
from array import array
from collections.abc import Sequence
from fractions import Fraction

__all__ = ["interleave", "row_without_replacement", "rows_at_random", "shares", "whole_weights"]


@functools.lru_cache(maxsize=1024)
def whole_weights(weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return whole numbers in the proportions of `weights`, which are read as they are written: 0.1 is a tenth."""
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * scale) for fraction in fractions)


def shares(weights: Sequence[int], total: int) -> list[int]:
    """Return how many of the first `total` draws go to each dataset.

    Webster's method (Sainte-Laguë), because its shares never shrink as `total` grows, so that they are prefix counts
    of one sequence; after each sum(weights) draws they stand exactly in the proportions of the weights.

    Args:
        weights: whole numbers of at least 0, of which one is above 0.
        total: draws, at least 0.
    """
    whole = sum(weights)
    counts = [(2 * total * weight + whole) // (2 * whole) for weight in weights]
    surplus = sum(counts) - total
    for _ in range(surplus):
        # the place given last: the lowest priority, and of equal ones the last dataset's
        held = [index for index, count in enumerate(counts) if count]
        counts[min(held, key=lambda i: (Fraction(weights[i], 2 * counts[i] - 1), -i))] -= 1
    for _ in range(-surplus):
        counts[max(range(len(counts)), key=lambda i: (Fraction(weights[i], 2 * counts[i] + 1), -i))] += 1
    return counts


def interleave(weights: Sequence[int], start: int, stop: int) -> list[int]:
    """Return the index of the dataset that each of the draws `start` .. `stop` - 1 goes to; see `shares`."""
    counts = shares(weights, start)
    waiting = [(-Fraction(weight, 2 * counts[i] + 1), i) for i, weight in enumerate(weights) if weight]
    heapq.heapify(waiting)
    drawn = []
    for _ in range(start, stop):
        _, index = waiting[0]
        counts[index] += 1
        drawn.append(index)
        heapq.heapreplace(waiting, (-Fraction(weights[index], 2 * counts[index] + 1), index))
    return drawn


def row_without_replacement(size: int, key: str, place: int, window: int) -> int:
    """Return the row that draw number `place` of a dataset gets, without replacement.

    Draws 0 .. size - 1 are the first epoch and get every row once, and so on. Any `window` draws in succession get
    different rows, also across the border of two epochs. A dataset of fewer than three windows keeps the order of its
    first epoch; a larger one has another order in each.

    Args:
        key: of the random order, such as seed and name.
        place: number of the draw, from 0.
        window: draws that must differ, at most `size`.
    """
    epoch, index = divmod(place, size)
    if size < 3 * window:
        return _shuffled(size, f"{key}:0")[index]
    if epoch and index < 2 * window:
        return _head(size, key, epoch, window)[index]
    return _shuffled(size, f"{key}:{epoch}")[index]


def rows_at_random(size: int, key: str, count: int) -> list[int]:
    """Return `count` different rows, each drawn at random from the others; fewer are the beginning of more.

    Args:
        size: rows of the dataset, at least `count`.
        key: of the draws, such as seed, block and name.
        count: rows to draw.
    """
    chance, drawn = random.Random(key), dict[int, None]()
    while len(drawn) < count:
        drawn[chance.randrange(size)] = None
    return list(drawn)


@functools.lru_cache(maxsize=64)
def _shuffled(size: int, key: str) -> array[int]:
    order = array("I", range(size))
    # a text key is hashed with SHA-512, so neighbouring keys give unrelated permutations
    random.Random(key).shuffle(order)
    return order


@functools.lru_cache(maxsize=256)
def _head(size: int, key: str, epoch: int, window: int) -> list[int]:
    """Return the first two windows of an epoch; rows that ended the epoch before come in the second window."""
    # of `size` >= 3 windows the last is never moved by this, so no epoch depends on more than its predecessor
    recent = set(_shuffled(size, f"{key}:{epoch - 1}")[size - window :])
    first = list(_shuffled(size, f"{key}:{epoch}")[: 2 * window])
    return [row for row in first if row not in recent] + [row for row in first if row in recent]
