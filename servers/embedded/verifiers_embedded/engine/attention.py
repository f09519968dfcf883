"""Attention that skips what padding costs on a CPU: rows of different lengths, and prompts laid end to end.

It is a kind of attention of transformers' own interface. A model that runs with it attends as with "sdpa",
unless the batch has said, for the passes of its own thread, how the rows or prompts are laid out. On a GPU
one large call is faster than several small ones, so there the model keeps its own kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "verifiers_slots"

_WORTH_A_CALL = 256
"""Cells (one column of one row) that cost as much as one more call of attention; measured on small models,
where it matters most."""


@dataclass(frozen=True)
class Rows:
    """A pass of one token for each row: rows ``[first, last)`` of a group see its first `columns` columns."""

    groups: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Prompts:
    """A pass over whole prompts laid end to end in one row: so many after another of each length."""

    runs: tuple[tuple[int, int], ...]


STEP_16_BIT = 32
"""Columns by which 16-bit attention is filled up on the CPU. A pass over a whole sequence sums its softmax
over blocks of so many; a sum of another length rounds otherwise, and that grows from token to token.
"""

_layout: ContextVar[Rows | Prompts | None] = ContextVar("layout", default=None)


@contextmanager
def laid_out(layout: Rows | Prompts | None) -> Iterator[None]:
    """Set the layout of rows or prompts for the passes inside, in this thread."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def install(model: Any) -> bool:
    """Make a model on the CPU attend by this module; return whether it does now.

    Models that attend in a way of their own (without transformers' interface, or not by "sdpa") stay as they
    are.
    """
    present = model.config._attn_implementation
    able = getattr(model, "_supports_attention_backend", False)
    if model.device.type != "cpu" or present not in ("sdpa", NAME) or not able:
        return False
    if present != NAME:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        # the text side alone: a tower that was dropped cannot be told
        model.set_attn_implementation({"": NAME, "text_config": NAME})
    return bool(model.config._attn_implementation == NAME)


def filled_up(columns: int, dtype: torch.dtype) -> int:
    """Round up to a number of columns over which sums round as in a pass over a whole sequence."""
    step = STEP_16_BIT if dtype.itemsize == 2 else 1
    return -(-columns // step) * step


def row_groups(lengths: Sequence[int], most: int, dtype: torch.dtype) -> Rows:
    """Group neighbouring rows, which read as many columns as their longest has; lengths are best in falling order."""
    groups: list[tuple[int, int, int]] = []
    first, longest, wasted = 0, 0, 0
    for row, length in enumerate(lengths):
        taller = max(longest, length)
        wasted += (taller - longest) * (row - first) + taller - length
        longest = taller
        if wasted > _WORTH_A_CALL and row > first:
            groups.append((first, row, max(lengths[first:row])))
            first, longest, wasted = row, length, 0
    groups.append((first, len(lengths), longest))
    return Rows(tuple((first, last, min(filled_up(columns, dtype), most)) for first, last, columns in groups))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers: (rows, heads, tokens, width) in, (rows, tokens, heads, width) out."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    layout = _layout.get()
    if layout is None or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if isinstance(layout, Prompts):
        groups = query.shape[1] // key.shape[1]
        return _attend_prompts(query, repeat_kv(key, groups), repeat_kv(value, groups), layout, scaling), None
    return _attend_rows(query, key, value, attention_mask, layout, scaling), None


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    layout: Rows,
    scaling: float | None,
) -> torch.Tensor:
    rows, heads, _, width = query.shape
    kept = key.shape[1]
    # heads that share keys are queries of one head: nothing is repeated
    packed = query.reshape(rows, kept, heads // kept, width)
    parts = [
        scaled_dot_product_attention(
            packed[first:last],
            key[first:last, :, :columns],
            value[first:last, :, :columns],
            attn_mask=mask[first:last, ..., :columns],
            scale=scaling,
        )
        for first, last, columns in layout.groups
    ]
    return torch.cat(parts).reshape(rows, 1, heads, value.shape[-1])


def _attend_prompts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Prompts, scaling: float | None
) -> torch.Tensor:
    heads, width = query.shape[1], value.shape[-1]
    parts = []
    start = 0
    for count, length in layout.runs:
        stop = start + count * length
        # (1, heads, count * length, width) -> (count, heads, length, width)
        q, k, v = (
            states[0, :, start:stop].unflatten(1, (count, length)).transpose(0, 1) for states in (query, key, value)
        )
        if (missing := filled_up(length, q.dtype) - length) > 0:
            q, k, v = (torch.nn.functional.pad(states, (0, 0, 0, missing)) for states in (q, k, v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)[:, :, :length]
        parts.append(attended.transpose(1, 2).reshape(count * length, heads, width))
        start = stop
    return torch.cat(parts)[None]
