"""Dictionaries of row-aligned tensors: shuffled and split without ever losing the alignment.

Row i of every column in a dictionary belongs to the same training row. A column is a tensor whose first dimension
are the rows, or, where rows differ in length, a list of one 1-D tensor a row: padding comes last, once a micro-batch
(`collate.pad_rows`). Values that are None stay None, and 0-dim tensors (a count for the whole batch) belong to every
row, so they are handed on unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from verifiers.errors import ConfigError

__all__ = [
    "Column",
    "TensorDict",
    "num_rows",
    "shuffle_tensor_dict",
    "split_tensor_dict",
]

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
        ConfigError: where columns are misaligned or the order is no permutation of their rows.
    """
    count = num_rows(rows)
    if isinstance(order, torch.Generator):
        order_R = torch.randperm(count, generator=order)
    else:
        order_R = torch.as_tensor(order, dtype=torch.long)
        if order_R.dim() != 1 or order_R.sort().values.tolist() != list(range(count)):
            raise ConfigError(f"the order is no permutation of {count} rows: {order_R.tolist()}")
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
