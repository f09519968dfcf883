"""Which rows share a forward and backward pass: rows of an update, dealt so that little of a pass is padding.

A pass costs its rows times its longest row. With lengths falling along the passes, each pass is padded no further
than to its own longest row, and no row of it is shorter than the next pass's longest. So if no pass holds more than
B tokens, padding included, the padding of the rows that a rank is dealt together is at most

    sum_k n_k (longest_k - longest_k+1)  <=  B sum_k ln(longest_k / longest_k+1)  =  B ln(longest / shortest)

whatever their number. Rows that are dealt together are those of an update, or of a micro-batch where these are dealt
one by one. Ranks hold equally many: one that has a row less than others gets a padding row, of two tokens, and the
shortest counts as that then. A micro-batch that stays whole, whatever its rows are, is no such pass and has no bound.

Every rank runs the same passes, each with as many rows as the others' at the same time, so that collectives meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PADDING", "PassLimit", "deal_in_order", "deal_longest_first", "pass_sizes"]

PADDING = -1
"""Stands for a padding row where a rank has no row of its own."""

PADDING_LENGTH = 2
"""Tokens of a padding row."""

Dealt = list[list[list[list[int]]]]
"""Numbers of rows by [micro-batch][rank][pass]."""


@dataclass(frozen=True, slots=True)
class PassLimit:
    """What bounds passes: tokens, or rows, or nothing.

    Attributes:
        tokens: rows times the longest of them, prompt and completion, are at most this; a row that is longer has a
            pass of its own. None for no such budget.
        rows: without a budget, as many passes as if each held at most so many rows; their sizes go by tokens, and
            none has more than this many of the longest row would have. None for a single pass.
    """

    tokens: int | None = None
    rows: int | None = None


def pass_sizes(lengths: Sequence[int], at_least: int, limit: PassLimit) -> list[int]:
    """How many rows each pass takes, of rows that come longest first.

    There are as few passes as the limit allows, but at least `at_least` where there are rows enough; of the ways to
    have that many, one whose largest pass is small, so that passes are of like size.

    Args:
        lengths: tokens of each row, never rising.
        at_least: passes that there must be.
        limit: of each pass.
    """
    if not lengths:
        return []
    most = limit.tokens or lengths[0] * (limit.rows or len(lengths))
    needed = len(_filled(lengths, most)) if limit.rows is None else -(-len(lengths) // limit.rows)
    number = max(at_least, needed)
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if len(_filled(lengths, middle)) <= number:
            high = middle
        else:
            low = middle + 1
    return _split(lengths, _filled(lengths, low), at_least)


def _filled(lengths: Sequence[int], tokens: int) -> list[int]:
    """Passes filled one after another, each as far as the tokens go."""
    sizes: list[int] = []
    start = 0
    while start < len(lengths):
        size = min(len(lengths) - start, max(1, tokens // lengths[start]))
        sizes.append(size)
        start += size
    return sizes


def _split(lengths: Sequence[int], sizes: list[int], at_least: int) -> list[int]:
    """Halve the largest passes until there are `at_least`, or each holds one row."""
    while len(sizes) < at_least and max(sizes) > 1:
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        # among passes of several rows the one that costs most, the first of equals
        largest = max(
            (index for index, size in enumerate(sizes) if size > 1),
            key=lambda index: (sizes[index] * lengths[starts[index]], -index),
        )
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [sizes[largest] - half, half]
    return sizes


def deal_longest_first(lengths: Sequence[int], micro_batches: int, ranks: int, limit: PassLimit) -> Dealt:
    """Deal rows anywhere: by length alone, so that passes and ranks are alike and padding is bounded.

    Passes go to the micro-batch that has least to do so far, the largest first: what memory has to bear is met by the
    first pass of an update.

    Args:
        lengths: tokens of each row.
        micro_batches, ranks: among which the rows are dealt; each micro-batch gets a pass at least.
        limit: of each pass.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    lanes = _even_lanes([order[rank::ranks] for rank in range(ranks)])
    calls = _calls(lanes, lengths, micro_batches, limit)
    dealt: Dealt = [[[] for _ in range(ranks)] for _ in range(micro_batches)]
    load = [0] * micro_batches
    cost = [_cost(call, lengths) for call in calls]
    for index in sorted(range(len(calls)), key=lambda index: (-cost[index], index)):
        lightest = load.index(min(load))
        load[lightest] += cost[index]
        for rank, rows in enumerate(calls[index]):
            dealt[lightest][rank].append(rows)
    return dealt


def deal_in_order(lengths: Sequence[int], micro_batches: int, ranks: int, limit: PassLimit) -> Dealt:
    """Deal rows like cards in the order they come in; lengths only decide who shares a pass of a micro-batch.

    For what depends on the rows that share a micro-batch, which must then be a matter of chance. Which these are does
    not depend on the number of ranks.

    Args: as `deal_longest_first`.
    """
    cells = micro_batches * ranks
    dealt: Dealt = []
    for micro_batch in range(micro_batches):
        held = [range(cell, len(lengths), cells) for cell in range(micro_batch, cells, micro_batches)]
        lanes = _even_lanes([sorted(rows, key=lambda row: (-lengths[row], row)) for rows in held])
        calls = _calls(lanes, lengths, 1, limit)
        dealt.append([[call[rank] for call in calls] for rank in range(ranks)])
    return dealt


def _even_lanes(lanes: list[list[int]]) -> list[list[int]]:
    depth = max(map(len, lanes))
    return [lane + [PADDING] * (depth - len(lane)) for lane in lanes]


def _calls(lanes: list[list[int]], lengths: Sequence[int], at_least: int, limit: PassLimit) -> list[list[list[int]]]:
    """Rows by [pass][rank], from each rank's rows, longest first; passes of padding alone fill up."""
    longest = [max(_length(lane[place], lengths) for lane in lanes) for place in range(len(lanes[0]))]
    calls: list[list[list[int]]] = []
    start = 0
    for size in pass_sizes(longest, at_least, limit):
        calls.append([lane[start : start + size] for lane in lanes])
        start += size
    return calls + [[[PADDING] for _ in lanes] for _ in range(at_least - len(calls))]


def _cost(call: list[list[int]], lengths: Sequence[int]) -> int:
    return len(call[0]) * max(_length(rows[0], lengths) for rows in call)


def _length(row: int, lengths: Sequence[int]) -> int:
    return PADDING_LENGTH if row == PADDING else lengths[row]
