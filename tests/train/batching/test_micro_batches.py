"""Rows are packed once each, evenly, with little padding, and keep together through shuffles and splits."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.errors import ConfigError
from verifiers.train.batching.micro_batches import (
    MicroBatchLimit,
    Packing,
    TensorDict,
    balance_by_length,
    balance_by_prefix,
    keep_micro_steps,
    micro_batch_sizes,
    shuffle_tensor_dict,
    split_tensor_dict,
)

LENGTHS = st.lists(st.one_of(st.integers(2, 40), st.integers(2, 2000)), max_size=70)
MICRO_STEPS = st.integers(1, 5)
RANKS = st.sampled_from([1, 2, 3, 4])
LIMITS = st.one_of(
    st.builds(MicroBatchLimit, rows=st.integers(1, 9)),
    st.builds(MicroBatchLimit, tokens=st.integers(1, 6000)),
    st.just(MicroBatchLimit()),
)


def length(row: int, lengths: list[int]) -> int:
    return 2 if row >= len(lengths) else lengths[row]


def padded(rows: list[int], lengths: list[int]) -> int:
    return len(rows) * max(length(row, lengths) for row in rows)


def padding(rows: list[int], lengths: list[int]) -> int:
    return padded(rows, lengths) - sum(length(row, lengths) for row in rows)


def of_rank(packing: Packing, rank: int) -> list[list[int]]:
    return [rows for by_rank in packing for rows in by_rank[rank]]


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, micro_steps=MICRO_STEPS, ranks=RANKS, limit=LIMITS, in_order=st.booleans())
def test_every_row_is_packed_once_within_the_limit_and_ranks_run_micro_batches_of_the_same_shape(
    lengths: list[int], micro_steps: int, ranks: int, limit: MicroBatchLimit, in_order: bool
) -> None:
    pack = keep_micro_steps if in_order else balance_by_length
    packing = pack(lengths, micro_steps, ranks, limit)
    placed = sorted(chain.from_iterable(chain.from_iterable(of_rank(packing, rank) for rank in range(ranks))))
    assert placed == list(range(len(placed)))
    assert len(placed) >= len(lengths)
    assert [len(by_rank) for by_rank in packing] == [ranks] * micro_steps
    for by_rank in packing:
        shapes = {tuple(map(len, held)) for held in by_rank}
        assert len(shapes) == 1
        assert min(shapes.pop()) > 0
    for rows in chain.from_iterable(of_rank(packing, rank) for rank in range(ranks)):
        assert limit.rows is None or padded(rows, lengths) <= limit.rows * max([2, *lengths])
        assert limit.tokens is None or len(rows) == 1 or padded(rows, lengths) <= limit.tokens
    assert packing == pack(list(lengths), micro_steps, ranks, limit)


def bound(lengths: list[int], packed: Packing, tokens: int) -> float:
    """Return the most padding of rows packed together: a padding row counts as one of two tokens."""
    rows = [row for by_rank in packed for micro_batches in by_rank for held in micro_batches for row in held]
    held = [length(row, lengths) for row in rows]
    return tokens * math.log(max(held) / min(held)) + 1e-6


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS.filter(bool), micro_steps=MICRO_STEPS, ranks=RANKS, tokens=st.integers(1, 6000))
def test_padding_of_a_rank_is_at_most_the_budget_times_the_log_of_longest_over_shortest(
    lengths: list[int], micro_steps: int, ranks: int, tokens: int
) -> None:
    packing = balance_by_length(lengths, micro_steps, ranks, MicroBatchLimit(tokens=tokens))
    for rank in range(ranks):
        micro_batches = of_rank(packing, rank)
        assert sum(padding(rows, lengths) for rows in micro_batches) <= bound(lengths, packing, tokens)
    # where micro-steps are packed one by one it is that of each
    for by_rank in keep_micro_steps(lengths, micro_steps, ranks, MicroBatchLimit(tokens=tokens)):
        for micro_batches in by_rank:
            assert sum(padding(rows, lengths) for rows in micro_batches) <= bound(lengths, [by_rank], tokens)


GROUPS = st.lists(st.tuples(st.integers(1, 600), st.lists(st.integers(1, 300), min_size=1, max_size=9)), max_size=9)


@settings(max_examples=150, deadline=None)
@given(groups=GROUPS, micro_steps=MICRO_STEPS, ranks=RANKS, limit=LIMITS)
def test_rows_of_a_prompt_share_a_micro_batch_as_far_as_the_limit_goes(
    groups: list[tuple[int, list[int]]], micro_steps: int, ranks: int, limit: MicroBatchLimit
) -> None:
    prompts = [(number,) * prompt for number, (prompt, rests) in enumerate(groups) for _ in rests]
    lengths = [prompt + rest for prompt, rests in groups for rest in rests]
    packing = balance_by_prefix(lengths, prompts, micro_steps, ranks, limit)
    held = [[row for row in rows if row < len(lengths)] for rank in range(ranks) for rows in of_rank(packing, rank)]
    assert sorted(chain(*held)) == list(range(len(lengths)))
    assert [len(by_rank) for by_rank in packing] == [ranks] * micro_steps
    assert all(len(set(map(len, by_rank))) == 1 and min(map(len, by_rank)) > 0 for by_rank in packing)

    def cost(rows: list[int]) -> int:
        return sum(map(len, {prompts[row] for row in rows})) + sum(lengths[row] - len(prompts[row]) for row in rows)

    most = limit.tokens or max(lengths, default=0) * (limit.rows or len(lengths))
    assert all(len(rows) <= 1 or cost(rows) <= most for rows in held)
    if ranks == 1:
        for number in range(len(groups)):
            rows = [row for row, prompt in enumerate(prompts) if prompt[0] == number]
            of_prompt = [held_rows for held_rows in held if {*held_rows} & {*rows}]
            # as many micro-batches as its rows need, but for what does not divide
            assert len(of_prompt) == 1 or cost(rows) > most


def test_a_single_prompt_is_divided_over_the_ranks() -> None:
    packing = balance_by_prefix([30] * 8, [(1,) * 20] * 8, 1, 2, MicroBatchLimit())
    assert [sorted(chain(*held)) for held in packing[0]] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_rows_that_ranks_can_share_evenly_are_padded_by_nothing_where_all_are_equal() -> None:
    limit = MicroBatchLimit(tokens=400)
    for count, padded_by in ((4, 0), (3, 98)):
        lengths = [100] * count
        packing = balance_by_length(lengths, 1, 2, limit)
        assert [sum(padding(rows, lengths) for rows in of_rank(packing, rank)) for rank in (0, 1)] == [0, padded_by]


@settings(max_examples=50, deadline=None)
@given(lengths=LENGTHS, micro_steps=MICRO_STEPS, limit=LIMITS)
def test_rows_kept_in_order_share_a_micro_step_however_many_ranks_there_are(
    lengths: list[int], micro_steps: int, limit: MicroBatchLimit
) -> None:
    held = []
    for ranks in (1, 2, 3):
        packing = keep_micro_steps(lengths, micro_steps, ranks, limit)
        held.append([{row for row in chain(*chain(*by_rank)) if row < len(lengths)} for by_rank in packing])
    assert held == [[set(range(first, len(lengths), micro_steps)) for first in range(micro_steps)]] * 3


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS.filter(bool), micro_steps=MICRO_STEPS, ranks=RANKS, rows=st.integers(1, 9))
def test_without_a_budget_there_are_the_micro_batches_that_rows_need_and_none_is_larger_than_rows_of_the_longest(
    lengths: list[int], micro_steps: int, ranks: int, rows: int
) -> None:
    packing = balance_by_length(lengths, micro_steps, ranks, MicroBatchLimit(rows=rows))
    depth = -(-len(lengths) // ranks)
    for rank in range(ranks):
        micro_batches = of_rank(packing, rank)
        assert len(micro_batches) <= max(micro_steps, -(-depth // rows))
        assert max(padded(held, lengths) for held in micro_batches) <= rows * max(lengths)
        assert sum(padding(held, lengths) for held in micro_batches) <= bound(lengths, packing, rows * max(lengths))


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS.filter(bool), micro_steps=MICRO_STEPS, ranks=RANKS, limit=LIMITS)
def test_micro_steps_and_ranks_have_like_work(
    lengths: list[int], micro_steps: int, ranks: int, limit: MicroBatchLimit
) -> None:
    packing = balance_by_length(lengths, micro_steps, ranks, limit)
    loads = [[sum(padded(rows, lengths) for rows in held) for held in by_rank] for by_rank in packing]
    largest = max(padded(rows, lengths) for rank in range(ranks) for rows in of_rank(packing, rank))
    # the last micro-batch that the heaviest micro-step got went to what was lightest then
    assert max(map(max, loads)) <= min(map(max, loads)) + largest
    by_rank = [sum(load[rank] for load in loads) for rank in range(ranks)]
    rows = max(len(held) for held in of_rank(packing, 0))
    assert max(by_rank) - min(by_rank) <= rows * (max(lengths) - min([*lengths, 2]))


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS.filter(bool), limit=LIMITS, at_least=st.integers(1, 6))
def test_there_are_as_few_micro_batches_as_the_limit_allows(
    lengths: list[int], limit: MicroBatchLimit, at_least: int
) -> None:
    lengths = sorted(lengths, reverse=True)
    sizes = micro_batch_sizes(lengths, at_least, limit)
    fewest, start = 0, 0
    while start < len(lengths):
        size = limit.rows or max(1, (limit.tokens or 10**9) // lengths[start])
        start, fewest = start + size, fewest + 1
    assert sum(sizes) == len(lengths)
    assert len(sizes) <= max(at_least, fewest)


def test_the_largest_micro_batch_is_as_small_as_their_number_allows() -> None:
    assert micro_batch_sizes([100, 50, 50, 10, 10, 10, 10, 10], 1, MicroBatchLimit(tokens=150)) == [1, 2, 5]
    # three micro-batches are needed; 100 tokens each are enough for them
    assert micro_batch_sizes([100, 50, 50, 10, 10, 10, 10, 10], 1, MicroBatchLimit(tokens=199)) == [1, 2, 5]
    # one of two rows would be as large by the rows, and larger by the tokens
    assert micro_batch_sizes([100, 50, 50, 10, 10, 10, 10, 10], 1, MicroBatchLimit(rows=3)) == [1, 2, 5]
    assert micro_batch_sizes([8, 8, 8, 8], 4, MicroBatchLimit(rows=4)) == [1, 1, 1, 1]
    # four would have one of two rows as well
    assert micro_batch_sizes([8, 8, 8, 8, 8], 4, MicroBatchLimit(rows=4)) == [2, 2, 1]


@pytest.mark.parametrize("pack", [keep_micro_steps, balance_by_length])
def test_an_update_without_rows_still_has_a_micro_batch_for_every_micro_step_and_rank(pack: object) -> None:
    assert callable(pack)
    packing = pack([], 2, 3, MicroBatchLimit(rows=4))
    assert packing == [[[[0]], [[1]], [[2]]], [[[3]], [[4]], [[5]]]]


# -- columns ---------------------------------------------------------------------------------------------------------

ADVANTAGES = [0.1, 0, -0.1, -0.0666667, 0.2333333, -0.1666667]


def buffer() -> TensorDict:
    # Ids are 10 x prompt + generation: p0g0 is 0, p1g2 is 12.
    return {
        "input_ids": torch.tensor([[0], [1], [2], [10], [11], [12]]),
        "advantages": torch.tensor(ADVANTAGES),
        "reference_logps": None,
        "update_tokens": torch.tensor(6.0),
    }


def column(tensors: TensorDict, name: str) -> list[float]:
    value = tensors[name]
    assert value is not None
    return value.flatten().tolist()


def test_a_shuffle_moves_all_tensors_by_one_permutation() -> None:
    shuffled = shuffle_tensor_dict(buffer(), (4, 0, 5, 2, 3, 1))
    assert column(shuffled, "input_ids") == [11, 0, 12, 2, 10, 1]
    expected = [0.2333333, 0.1, -0.1666667, -0.1, -0.0666667, 0]
    assert column(shuffled, "advantages") == pytest.approx(expected, abs=1e-6)
    assert shuffled["reference_logps"] is None
    assert column(shuffled, "update_tokens") == [6.0]


def test_a_split_keeps_rows_aligned_and_none_none() -> None:
    first, second = split_tensor_dict(shuffle_tensor_dict(buffer(), (4, 0, 5, 2, 3, 1)), 2)
    assert column(first, "input_ids") == [11, 0, 12]
    assert column(second, "input_ids") == [2, 10, 1]
    assert column(second, "advantages") == pytest.approx([-0.1, -0.0666667, 0], abs=1e-6)
    for chunk in (first, second):
        assert chunk["reference_logps"] is None
        assert column(chunk, "update_tokens") == [6.0]


def test_seven_rows_in_two_chunks_are_refused_with_the_sizes_that_divide() -> None:
    with pytest.raises(ConfigError, match=r"7 rows do not divide into 2 chunks.* 6 and 8"):
        split_tensor_dict({"x": torch.arange(7)}, 2)


def test_misaligned_tensors_are_refused() -> None:
    tensors = {"x": torch.arange(4), "y": torch.arange(3)}
    for use in (lambda: split_tensor_dict(tensors, 1), lambda: shuffle_tensor_dict(tensors, [0, 1, 2])):
        with pytest.raises(ConfigError, match="not aligned"):
            use()


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [1, 2, 3], [[0, 1, 2]]])
def test_an_order_that_is_no_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ConfigError, match="not a permutation"):
        shuffle_tensor_dict({"x": torch.arange(3)}, order)
