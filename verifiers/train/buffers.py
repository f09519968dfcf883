"""Dictionaries of row-aligned tensors: shuffled and split without ever losing the alignment.

Public under their classic names, for whoever builds buffers of their own: the trainer deals rows one by one
(`train.dealing`). `chunk_layout` and `reorder_chunks` do the same for generation that comes in chunks.

Row i of every tensor in a dictionary belongs to the same training row. Values that are None stay None, and
0-dim tensors (a count for the whole batch) belong to every row, so they go along unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from verifiers.errors import ConfigError

__all__ = [
    "TensorDict",
    "chunk_layout",
    "num_rows",
    "reorder_chunks",
    "shuffle_tensor_dict",
    "split_tensor_dict",
]

TensorDict = dict[str, Tensor | None]
Item = TypeVar("Item")


def num_rows(tensors: Mapping[str, Tensor | None]) -> int:
    """Number of rows that all tensors share.

    Raises:
        ConfigError: where first dimensions differ, or no tensor has one.
    """
    sizes = {name: len(value) for name, value in tensors.items() if value is not None and value.dim() > 0}
    if not sizes:
        raise ConfigError(f"no tensor with rows among {sorted(tensors)}")
    if len(set(sizes.values())) > 1:
        raise ConfigError(f"tensors are not aligned: their first dimensions differ, {sizes}")
    return next(iter(sizes.values()))


def shuffle_tensor_dict(
    tensors: Mapping[str, Tensor | None], order_or_generator: Sequence[int] | Tensor | torch.Generator
) -> TensorDict:
    """Reorder the rows of all tensors by one permutation.

    Args:
        tensors: row-aligned tensors, first dimension R.
        order_or_generator: the permutation of 0 .. R - 1 whose i-th entry is the old place of the new row i, or a
            CPU generator to draw one from. There is no default: a shuffle must be reproducible by its seed.

    Raises:
        ConfigError: where tensors are misaligned or the order is no permutation of their rows.
    """
    rows = num_rows(tensors)
    if isinstance(order_or_generator, torch.Generator):
        order_R = torch.randperm(rows, generator=order_or_generator)
    else:
        order_R = torch.as_tensor(order_or_generator, dtype=torch.long)
        if order_R.dim() != 1 or order_R.sort().values.tolist() != list(range(rows)):
            raise ConfigError(f"the order is no permutation of {rows} rows: {order_R.tolist()}")
    return {
        name: value if value is None or value.dim() == 0 else value[order_R.to(value.device)]
        for name, value in tensors.items()
    }


def split_tensor_dict(tensors: Mapping[str, Tensor | None], num_chunks: int) -> list[TensorDict]:
    """Split the rows of all tensors into `num_chunks` equal parts, in order.

    Raises:
        ConfigError: where tensors are misaligned, or the rows do not divide; a rest is never dropped.
    """
    rows = num_rows(tensors)
    if num_chunks < 1:
        raise ConfigError(f"num_chunks is {num_chunks}; it must be at least 1")
    size, rest = divmod(rows, num_chunks)
    if rest:
        lower, upper = size * num_chunks, (size + 1) * num_chunks
        raise ConfigError(
            f"{rows} rows do not divide into {num_chunks} chunks; the nearest sizes that do are {lower} and {upper}"
        )
    return [
        {
            name: value if value is None or value.dim() == 0 else value[start : start + size]
            for name, value in tensors.items()
        }
        for start in (chunk * size for chunk in range(num_chunks))
    ]


def chunk_layout(num_prompts: int, num_generations: int, chunk_sizes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The (prompt, generation) of each item where chunk k makes `chunk_sizes[k]` generations of every prompt.

    Raises:
        ConfigError: where the sizes do not sum to `num_generations`.
    """
    if sum(chunk_sizes) != num_generations:
        raise ConfigError(
            f"chunks of {list(chunk_sizes)} generations sum to {sum(chunk_sizes)}, not to {num_generations}"
        )
    layout, start = [], 0
    for size in chunk_sizes:
        layout.append([(p, g) for p in range(num_prompts) for g in range(start, start + size)])
        start += size
    return layout


def reorder_chunks(chunks: Iterable[Iterable[tuple[tuple[int, int], Item]]], num_generations: int) -> list[Item]:
    """Put chunked generation back into prompt-major order, whatever the order of arrival.

    Args:
        chunks: items with their identity, ((prompt, generation), item); prompt is its place in the block.
            Chunks may be uneven. `chunk_layout` gives the identities of chunks in a regular layout.
        num_generations: generations of each prompt.

    Returns:
        The items of prompt 0, generations 0 .. num_generations - 1, then those of prompt 1, and so on.

    Raises:
        ConfigError: where a generation is missing, doubled or out of range: order is never guessed.
    """
    items: dict[tuple[int, int], Item] = {}
    for chunk in chunks:
        for key, item in chunk:
            if key in items:
                raise ConfigError(f"generation {key[1]} of prompt {key[0]} arrived twice")
            items[key] = item
    wanted = {(prompt, generation) for prompt, _ in items for generation in range(num_generations)}
    if wanted != set(items):
        missing, unexpected = sorted(wanted - set(items)), sorted(set(items) - wanted)
        raise ConfigError(
            f"with {num_generations} generations a prompt, (prompt, generation) {missing} are missing "
            f"and {unexpected} do not belong"
        )
    return [items[key] for key in sorted(items)]
