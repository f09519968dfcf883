"""Length-balanced packing: which rows of an update share a micro-batch, so that little of it is padding.

A micro-batch is what goes through the model in one forward and backward pass; a micro-step (one of the update's
`gradient_accumulation_steps`) runs one or several of them. Packing decides nothing but the *order* of the rows and
the *sizes* of the micro-batches: `shuffle_tensor_dict` and `split_tensor_dict` do the rest, on columns whose row i is
the same training row in each. A column is a tensor whose first dimension are the rows, or, where rows differ in
length, a list of one 1-D tensor a row: padding comes last, once a micro-batch (`collate.pad_rows`). A value that is
None stays None, and a 0-dim tensor (a count for the whole batch) is handed on unchanged.

A micro-batch costs its rows times its longest row. With lengths falling along the micro-batches, each is padded no
further than to its own longest row, and no row of it is shorter than the next one's longest. So if none holds more
than B tokens, padding included, the padding of the rows that a rank gets from one packing is at most

    sum_k n_k (longest_k - longest_k+1)  <=  B sum_k ln(longest_k / longest_k+1)  =  B ln(longest / shortest)

whatever their number. Ranks hold equally many rows: one that has a row less than others gets a padding row, of two
tokens, and the shortest counts as that then. A micro-step that is one micro-batch, whatever its rows are, has no such
bound. Every rank runs the same number of micro-batches, each with as many rows as the others' at the same time, so
that collectives meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from verifiers.errors import ConfigError

__all__ = [
    "Column",
    "MicroBatch",
    "MicroBatchLimit",
    "MicroSteps",
    "Packing",
    "TensorDict",
    "all_micro_batches",
    "balance_by_length",
    "keep_micro_steps",
    "micro_batch_sizes",
    "num_rows",
    "packing_metrics",
    "padded_tokens",
    "shuffle_tensor_dict",
    "split_tensor_dict",
]

T = TypeVar("T")

MicroBatch = dict[str, Tensor]
"""Tensors of the rows that go through the model together."""

PADDING_LENGTH = 2
"""Tokens of a padding row."""

MicroSteps = list[list[list[MicroBatch]]]
"""By [micro-step][rank][micro-batch]; the ranks of a micro-step have equally many, of equally many rows."""

_PADDING = -1
"""Stands for a padding row where a rank has no row of its own."""

_Nested = list[list[list[list[int]]]]
"""Row numbers by [micro-step][rank][micro-batch]."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The places of an update's rows: by micro-step, then by rank, then by micro-batch.

    Attributes:
        order: the row at each place; numbers from the count of real rows on are padding rows.
        sizes: rows of each micro-batch, along `order`.
        padding_rows: padding rows to be appended to the real ones.
        ranks: number of ranks.
        micro_batches: micro-batches of each micro-step, on every rank.
    """

    order: list[int]
    sizes: list[int]
    padding_rows: int
    ranks: int
    micro_batches: list[int]

    def places(self) -> list[tuple[int, int, int]]:
        """Return (micro-step, rank, micro-batch) of each entry of `sizes`."""
        return [
            (step, rank, number)
            for step, count in enumerate(self.micro_batches)
            for rank in range(self.ranks)
            for number in range(count)
        ]

    def nested(self, micro_batches: Iterable[T]) -> list[list[list[T]]]:
        """Return what there is one of a micro-batch, in the order of `sizes`, by [micro-step][rank][micro-batch]."""
        each = iter(micro_batches)
        return [[[next(each) for _ in range(count)] for _ in range(self.ranks)] for count in self.micro_batches]


@dataclass(frozen=True, slots=True)
class MicroBatchLimit:
    """A bound of micro-batches: in tokens, in rows, or none.

    Attributes:
        tokens: rows times the longest of them, prompt and completion, are at most this; a row that is longer has a
            micro-batch of its own. None for no such budget.
        rows: without a budget, as many micro-batches as if each held at most so many rows; their sizes go by tokens,
            and none has more than this many of the longest row would have. None for one micro-batch a micro-step.
    """

    tokens: int | None = None
    rows: int | None = None


def micro_batch_sizes(lengths: Sequence[int], at_least: int, limit: MicroBatchLimit) -> list[int]:
    """Return how many rows each micro-batch takes, of rows that come longest first.

    There are as few micro-batches as the limit allows, but at least `at_least` where there are rows enough; of the
    ways to have that many, one whose largest is small, so that they are of like size.

    Args:
        lengths: tokens of each row, never rising.
        at_least: micro-batches that there must be.
        limit: of each micro-batch.
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
    """Fill micro-batches one after another, each as far as the tokens go; return their sizes."""
    sizes: list[int] = []
    start = 0
    while start < len(lengths):
        size = min(len(lengths) - start, max(1, tokens // lengths[start]))
        sizes.append(size)
        start += size
    return sizes


def _split(lengths: Sequence[int], sizes: list[int], at_least: int) -> list[int]:
    """Halve the largest micro-batches until there are `at_least`, or each holds one row."""
    while len(sizes) < at_least and max(sizes) > 1:
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        # among those of several rows the one that costs most, the first of equals
        largest = max(
            (index for index, size in enumerate(sizes) if size > 1),
            key=lambda index: (sizes[index] * lengths[starts[index]], -index),
        )
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [sizes[largest] - half, half]
    return sizes


def balance_by_length(lengths: Sequence[int], micro_steps: int, ranks: int, limit: MicroBatchLimit) -> Packing:
    """Pack rows by length alone, so that micro-batches and ranks are alike and padding is bounded.

    Micro-batches go to the micro-step that has least to do so far, the largest first: the first micro-batch of an
    update needs the most memory.

    Args:
        lengths: tokens of each row.
        micro_steps, ranks: among which the rows are divided; each micro-step gets a micro-batch at least.
        limit: of each micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    lanes = _even_lanes([order[rank::ranks] for rank in range(ranks)])
    joint = _joint_micro_batches(lanes, lengths, micro_steps, limit)
    nested: _Nested = [[[] for _ in range(ranks)] for _ in range(micro_steps)]
    load = [0] * micro_steps
    cost = [len(by_rank[0]) * max(_length(rows[0], lengths) for rows in by_rank) for by_rank in joint]
    for index in sorted(range(len(joint)), key=lambda index: (-cost[index], index)):
        lightest = load.index(min(load))
        load[lightest] += cost[index]
        for rank, rows in enumerate(joint[index]):
            nested[lightest][rank].append(rows)
    return _packing(nested, len(lengths))


def keep_micro_steps(lengths: Sequence[int], micro_steps: int, ranks: int, limit: MicroBatchLimit) -> Packing:
    """Divide rows over the micro-steps in the order they come in; lengths only decide who shares a micro-batch.

    For losses that depend on the rows that share a micro-step, which must then be a matter of chance: they do not
    depend on lengths, nor on the number of ranks.

    Args: as `balance_by_length`.
    """
    cells = micro_steps * ranks
    nested: _Nested = []
    for micro_step in range(micro_steps):
        held = [range(cell, len(lengths), cells) for cell in range(micro_step, cells, micro_steps)]
        lanes = _even_lanes([sorted(rows, key=lambda row: (-lengths[row], row)) for rows in held])
        joint = _joint_micro_batches(lanes, lengths, 1, limit)
        nested.append([[by_rank[rank] for by_rank in joint] for rank in range(ranks)])
    return _packing(nested, len(lengths))


def _packing(nested: _Nested, num_rows: int) -> Packing:
    micro_batches = [rows for by_rank in nested for held in by_rank for rows in held]
    padding = iter(range(num_rows, num_rows + sum(map(len, micro_batches))))
    return Packing(
        order=[next(padding) if row == _PADDING else row for rows in micro_batches for row in rows],
        sizes=[len(rows) for rows in micro_batches],
        padding_rows=sum(rows.count(_PADDING) for rows in micro_batches),
        ranks=len(nested[0]),
        micro_batches=[len(by_rank[0]) for by_rank in nested],
    )


def _even_lanes(lanes: list[list[int]]) -> list[list[int]]:
    depth = max(map(len, lanes))
    return [lane + [_PADDING] * (depth - len(lane)) for lane in lanes]


def _joint_micro_batches(
    lanes: list[list[int]], lengths: Sequence[int], at_least: int, limit: MicroBatchLimit
) -> list[list[list[int]]]:
    """Return rows by [micro-batch][rank], from each rank's rows, longest first; padding rows alone fill up."""
    longest = [max(_length(lane[place], lengths) for lane in lanes) for place in range(len(lanes[0]))]
    joint: list[list[list[int]]] = []
    start = 0
    for size in micro_batch_sizes(longest, at_least, limit):
        joint.append([lane[start : start + size] for lane in lanes])
        start += size
    return joint + [[[_PADDING] for _ in lanes] for _ in range(at_least - len(joint))]


def _length(row: int, lengths: Sequence[int]) -> int:
    return PADDING_LENGTH if row == _PADDING else lengths[row]


def all_micro_batches(steps: MicroSteps) -> Iterator[MicroBatch]:
    """Yield every micro-batch of every rank, in the order in which rank after rank runs them."""
    for by_rank in steps:
        for micro_batches in by_rank:
            yield from micro_batches


def padded_tokens(batch: MicroBatch) -> int:
    """Return the tokens that the model computes for a micro-batch, padding included."""
    return int(batch["prompt_ids"].numel() + batch["completion_ids"].numel())


def packing_metrics(steps: MicroSteps) -> dict[str, float]:
    """Return the padding, number and size of a block's micro-batches, over all ranks."""
    batches = list(all_micro_batches(steps))
    computed = sum(map(padded_tokens, batches))
    real = sum(int(batch[name][~batch["is_padding"]].sum()) for batch in batches for name in _MASKS)
    return {
        "rows/padding_share": 1 - real / computed if computed else 0.0,
        "rows/micro_batches": len(batches) / max(1, sum(map(len, steps))),
        "rows/largest_micro_batch_tokens": float(max(map(padded_tokens, batches), default=0)),
    }


_MASKS = ("prompt_mask", "completion_mask")


Column = Tensor | list[Tensor]
TensorDict = dict[str, Column | None]


def num_rows(rows: Mapping[str, Column | None]) -> int:
    """Return the number of rows that all columns share.

    Raises:
        ConfigError: where columns have different numbers of rows, or none has rows.
    """
    sizes = {name: len(column) for name, column in rows.items() if _has_rows(column)}
    if not sizes:
        raise ConfigError(f"no tensor with rows among {sorted(rows)}")
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"tensors are not aligned: their first dimensions differ, {sizes}")
    return next(iter(sizes.values()))


def _has_rows(column: Column | None) -> TypeGuard[Column]:
    return column is not None and (isinstance(column, list) or column.dim() > 0)


def shuffle_tensor_dict(
    rows: Mapping[str, Column | None], order: Sequence[int] | Tensor | torch.Generator
) -> TensorDict:
    """Reorder the rows of all columns by one permutation.

    Args:
        rows: row-aligned columns of R rows.
        order: the permutation of 0 .. R - 1 whose i-th entry is the old place of the new row i, or a CPU generator
            to draw one from. There is no default: a shuffle must be reproducible by its seed.

    Raises:
        ConfigError: where columns are misaligned or the order is not a permutation of their rows.
    """
    count = num_rows(rows)
    if isinstance(order, torch.Generator):
        order_R = torch.randperm(count, generator=order)
    else:
        order_R = torch.as_tensor(order, dtype=torch.long)
        if order_R.dim() != 1 or order_R.sort().values.tolist() != list(range(count)):
            raise ConfigError(f"the order is not a permutation of {count} rows: {order_R.tolist()}")
    places = order_R.tolist()

    def reorder(column: Column | None) -> Column | None:
        if isinstance(column, list):
            return [column[place] for place in places]
        return column[order_R.to(column.device)] if isinstance(column, Tensor) and column.dim() else column

    return {name: reorder(column) for name, column in rows.items()}


def split_tensor_dict(rows: Mapping[str, Column | None], chunks_or_sizes: int | Sequence[int]) -> list[TensorDict]:
    """Split the rows of all columns into consecutive parts.

    Args:
        rows: row-aligned columns of R rows.
        chunks_or_sizes: a number of equal parts, or the rows of each part, which sum to R.

    Raises:
        ConfigError: where columns are misaligned, or the parts do not make up the rows; a rest is never dropped.
    """
    count = num_rows(rows)
    sizes = _equal_sizes(count, chunks_or_sizes) if isinstance(chunks_or_sizes, int) else list(chunks_or_sizes)
    if sum(sizes) != count or min(sizes, default=0) < 0:
        raise ConfigError(f"parts of {sizes} rows sum to {sum(sizes)}, but there are {count} rows")
    parts, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        parts.append({name: column[part] if _has_rows(column) else column for name, column in rows.items()})
        start += size
    return parts


def _equal_sizes(count: int, num_chunks: int) -> list[int]:
    if num_chunks < 1:
        raise ConfigError(f"num_chunks is {num_chunks}; it must be at least 1")
    size, rest = divmod(count, num_chunks)
    if rest:
        lower, upper = size * num_chunks, (size + 1) * num_chunks
        raise ConfigError(
            f"{count} rows do not divide into {num_chunks} chunks; the nearest sizes that do are {lower} and {upper}"
        )
    return [size] * num_chunks
