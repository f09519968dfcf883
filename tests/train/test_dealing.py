"""Rows are dealt once each, within the limit, evenly, and with little padding, whatever their lengths."""

from __future__ import annotations

import math
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.train.dealing import PADDING, Dealt, PassLimit, deal_in_order, deal_longest_first, pass_sizes

LENGTHS = st.lists(st.one_of(st.integers(2, 40), st.integers(2, 2000)), max_size=70)
MICRO_BATCHES = st.integers(1, 5)
RANKS = st.sampled_from([1, 2, 3, 4])
LIMITS = st.one_of(
    st.builds(PassLimit, rows=st.integers(1, 9)),
    st.builds(PassLimit, tokens=st.integers(1, 6000)),
    st.just(PassLimit()),
)


def length(row: int, lengths: list[int]) -> int:
    return 2 if row == PADDING else lengths[row]


def padded(rows: list[int], lengths: list[int]) -> int:
    return len(rows) * max(length(row, lengths) for row in rows)


def padding(rows: list[int], lengths: list[int]) -> int:
    return padded(rows, lengths) - sum(length(row, lengths) for row in rows)


def rank_passes(dealt: Dealt, rank: int) -> list[list[int]]:
    return [rows for by_rank in dealt for rows in by_rank[rank]]


def check_places(dealt: Dealt, lengths: list[int], micro_batches: int, ranks: int, limit: PassLimit) -> None:
    """Each row once; equal shapes on all ranks; the limit kept by every pass but those of one row."""
    assert [len(by_rank) for by_rank in dealt] == [ranks] * micro_batches
    rows = [row for rank in range(ranks) for row in chain.from_iterable(rank_passes(dealt, rank))]
    assert sorted(row for row in rows if row != PADDING) == list(range(len(lengths)))
    for by_rank in dealt:
        shapes = {tuple(map(len, passes)) for passes in by_rank}
        assert len(shapes) == 1
        assert min(shapes.pop()) > 0
    for held in [held for rank in range(ranks) for held in rank_passes(dealt, rank)]:
        assert limit.rows is None or padded(held, lengths) <= limit.rows * max([2, *lengths])
        assert limit.tokens is None or len(held) == 1 or padded(held, lengths) <= limit.tokens


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, micro_batches=MICRO_BATCHES, ranks=RANKS, limit=LIMITS, in_order=st.booleans())
def test_every_row_is_dealt_once_within_the_limit_and_ranks_run_the_same_passes(
    lengths: list[int], micro_batches: int, ranks: int, limit: PassLimit, in_order: bool
) -> None:
    deal = deal_in_order if in_order else deal_longest_first
    dealt = deal(lengths, micro_batches, ranks, limit)
    check_places(dealt, lengths, micro_batches, ranks, limit)
    assert dealt == deal(list(lengths), micro_batches, ranks, limit)


def bound(lengths: list[int], dealt: Dealt, tokens: int) -> float:
    """What padding is at most, of rows dealt together: a padding row counts as one of two tokens."""
    rows = [row for by_rank in dealt for passes in by_rank for held in passes for row in held]
    held = [length(row, lengths) for row in rows]
    return tokens * math.log(max(held) / min(held)) + 1e-6


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS.filter(bool), micro_batches=MICRO_BATCHES, ranks=RANKS, tokens=st.integers(1, 6000))
def test_padding_of_a_rank_is_at_most_the_budget_times_the_log_of_longest_over_shortest(
    lengths: list[int], micro_batches: int, ranks: int, tokens: int
) -> None:
    dealt = deal_longest_first(lengths, micro_batches, ranks, PassLimit(tokens=tokens))
    for rank in range(ranks):
        passes = rank_passes(dealt, rank)
        assert sum(padding(rows, lengths) for rows in passes) <= bound(lengths, dealt, tokens)
    # where micro-batches are dealt one by one it is that of each
    for by_rank in deal_in_order(lengths, micro_batches, ranks, PassLimit(tokens=tokens)):
        for passes in by_rank:
            assert sum(padding(rows, lengths) for rows in passes) <= bound(lengths, [by_rank], tokens)


def test_rows_that_ranks_can_share_evenly_are_padded_by_nothing_where_all_are_equal() -> None:
    limit = PassLimit(tokens=400)
    for count, padded_by in ((4, 0), (3, 98)):
        lengths = [100] * count
        dealt = deal_longest_first(lengths, 1, 2, limit)
        assert [sum(padding(rows, lengths) for rows in rank_passes(dealt, rank)) for rank in (0, 1)] == [0, padded_by]


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, micro_batches=MICRO_BATCHES, limit=LIMITS)
def test_rows_dealt_in_order_share_a_micro_batch_however_many_ranks_there_are(
    lengths: list[int], micro_batches: int, limit: PassLimit
) -> None:
    held = []
    for ranks in (1, 2, 3):
        dealt = deal_in_order(lengths, micro_batches, ranks, limit)
        held.append([{row for row in chain(*chain(*by_rank)) if row != PADDING} for by_rank in dealt])
    assert held == [[set(range(first, len(lengths), micro_batches)) for first in range(micro_batches)]] * 3


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS.filter(bool), micro_batches=MICRO_BATCHES, ranks=RANKS, rows=st.integers(1, 9))
def test_without_a_budget_there_are_the_passes_that_rows_need_and_none_is_larger_than_rows_of_the_longest(
    lengths: list[int], micro_batches: int, ranks: int, rows: int
) -> None:
    dealt = deal_longest_first(lengths, micro_batches, ranks, PassLimit(rows=rows))
    depth = -(-len(lengths) // ranks)
    for rank in range(ranks):
        passes = rank_passes(dealt, rank)
        assert len(passes) <= max(micro_batches, -(-depth // rows))
        assert max(padded(held, lengths) for held in passes) <= rows * max(lengths)
        assert sum(padding(held, lengths) for held in passes) <= bound(lengths, dealt, rows * max(lengths))


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS.filter(bool), micro_batches=MICRO_BATCHES, ranks=RANKS, limit=LIMITS)
def test_micro_batches_and_ranks_have_like_work(
    lengths: list[int], micro_batches: int, ranks: int, limit: PassLimit
) -> None:
    dealt = deal_longest_first(lengths, micro_batches, ranks, limit)
    loads = [[sum(padded(rows, lengths) for rows in passes) for passes in by_rank] for by_rank in dealt]
    largest = max(padded(rows, lengths) for rank in range(ranks) for rows in rank_passes(dealt, rank))
    # the last pass that the heaviest micro-batch got went to what was lightest then
    assert max(map(max, loads)) <= min(map(max, loads)) + largest
    by_rank = [sum(load[rank] for load in loads) for rank in range(ranks)]
    rows = max(len(held) for held in rank_passes(dealt, 0))
    assert max(by_rank) - min(by_rank) <= rows * (max(lengths) - min([*lengths, 2]))


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS.filter(bool), limit=LIMITS, at_least=st.integers(1, 6))
def test_there_are_as_few_passes_as_the_limit_allows(lengths: list[int], limit: PassLimit, at_least: int) -> None:
    lengths = sorted(lengths, reverse=True)
    sizes = pass_sizes(lengths, at_least, limit)
    fewest, start = 0, 0
    while start < len(lengths):
        size = limit.rows or max(1, (limit.tokens or 10**9) // lengths[start])
        start, fewest = start + size, fewest + 1
    assert sum(sizes) == len(lengths)
    assert min(at_least, len(lengths)) <= len(sizes) <= max(at_least, fewest)


def test_the_largest_pass_is_as_small_as_the_number_of_passes_allows() -> None:
    assert pass_sizes([100, 50, 50, 10, 10, 10, 10, 10], 1, PassLimit(tokens=150)) == [1, 2, 5]
    # three passes are needed; 100 tokens each are enough for them
    assert pass_sizes([100, 50, 50, 10, 10, 10, 10, 10], 1, PassLimit(tokens=199)) == [1, 2, 5]
    # a pass of two rows would be as large by the rows, and larger by the tokens
    assert pass_sizes([100, 50, 50, 10, 10, 10, 10, 10], 1, PassLimit(rows=3)) == [1, 2, 5]
    assert pass_sizes([8, 8, 8, 8], 4, PassLimit(rows=4)) == [1, 1, 1, 1]
    assert pass_sizes([8, 8, 8, 8, 8], 4, PassLimit(rows=4)) == [1, 1, 2, 1]


@pytest.mark.parametrize("deal", [deal_in_order, deal_longest_first])
def test_an_update_without_rows_still_has_a_pass_for_every_micro_batch_and_rank(deal: object) -> None:
    assert callable(deal)
    assert deal([], 2, 3, PassLimit(rows=4)) == [[[[PADDING]]] * 3] * 2


def test_the_first_pass_of_an_update_is_its_largest() -> None:
    dealt = deal_longest_first([3, 90, 8, 80, 70, 4, 5, 60], 2, 1, PassLimit(tokens=180))
    passes = rank_passes(dealt, 0)
    assert passes[0] == [1, 3]
    assert dealt[0][0][0] == passes[0]
