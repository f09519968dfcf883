"""What the model keeps of the sequences in the slots, in a form that Hugging Face models write to by themselves.

Row r of every tensor belongs to the r-th active sequence. Of keys and values its token p lies at column p, whatever
the other rows hold. So a sequence that ends is replaced by the last row, nothing is padded on the left, and a step
reads the columns up to the longest active sequence only. Recurrent and convolutional layers keep one state a row,
whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer, LinearAttentionCacheLayerMixin

from verifiers_embedded.engine.decoding import upload

_COLUMN_STEP = 64
_KEPT_IDLE = 8

ATTENTION_KINDS = ("full_attention", "sliding_attention")
STATE_KINDS = ("linear_attention", "conv")
NOTHING_KEPT = "dummy"
"""Kinds of layers, under transformers' names: with keys and values, with states, and with nothing of their own."""


@dataclass
class _Writes:
    """The places where the next forward pass puts what it computes, and reads it; shared by all layers.

    A cell is a row times the allocated columns, plus the column. With `source` the pass is over whole prompts, which
    attend to themselves alone: its token ``source[i]`` goes to ``cells[i]``, and the state behind its prompt
    ``state_source[i]`` to row ``state_rows[i]``.
    """

    rows: int = 0
    columns: int = 0
    cells: torch.Tensor | None = None
    source: torch.Tensor | None = None
    read_rows: torch.Tensor | slice = field(default_factory=lambda: slice(0))
    read_columns: int = 0
    state_rows: torch.Tensor | slice = field(default_factory=lambda: slice(0))
    state_source: torch.Tensor | None = None


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values, (rows, columns, heads, head_dim), so that a decode step is one index_copy."""

    is_sliding = False

    def __init__(self, writes: _Writes) -> None:
        super().__init__()
        self._writes = writes
        self._shapes: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the tensors, zeroed: a masked column counts 0 times its value, and 0 times NaN is NaN."""
        # tensors without elements, which remember heads, widths, kind of number and device
        self._shapes = (
            key_states.new_zeros((0, key_states.shape[1], key_states.shape[3])),
            value_states.new_zeros((0, value_states.shape[1], value_states.shape[3])),
        )
        self._allocate(self._writes.rows, self._writes.columns)

    def _allocate(self, rows: int, columns: int) -> None:
        if self._shapes is not None:
            self.keys, self.values = (like.new_zeros((rows, columns, *like.shape[1:])) for like in self._shapes)
            self.is_initialized = True

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """The keys and the values; nothing before they are made."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the new states and return what the layer attends to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.stored
        return self._written(keys, key_states), self._written(values, value_states)

    def _written(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        writes = self._writes
        assert writes.cells is not None
        states = new.transpose(1, 2).flatten(0, 1)
        if writes.source is not None:
            states = states[writes.source]
        stored.flatten(0, 1).index_copy_(0, writes.cells, states)
        if writes.source is not None:
            return new
        return stored[writes.read_rows, : writes.read_columns].transpose(1, 2)

    def copy_out(self, row: int, length: int) -> tuple[torch.Tensor, ...]:
        return tuple(stored[row, :length].clone() for stored in self.stored)

    def copy_in(self, row: int, length: int, states: tuple[torch.Tensor, ...]) -> None:
        keys, values = states
        if not self.is_initialized:
            self.lazy_initialization(keys[None].transpose(1, 2), values[None].transpose(1, 2))
        for stored, kept in zip(self.stored, states, strict=True):
            stored[row, :length] = kept[:length]

    def move(self, source: torch.Tensor, target: torch.Tensor, columns: int) -> None:
        for stored in self.stored:
            stored[target, :columns] = stored[source, :columns]

    def resize(self, rows: int, columns: int) -> None:
        """Give the tensors a new size, keeping what fits; make them where their shapes are known."""
        if self.stored:
            self.keys, self.values = (_resized(stored, rows, columns) for stored in self.stored)
        else:
            self._allocate(rows, columns)

    def clear(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of the mask that the model makes by itself: at prefill only, which starts a sequence."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always passed in, as they differ from row to row."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: the cache grows as needed."""
        return -1

    get_max_cache_shape = get_max_length


class _StateLayer(LinearAttentionCacheLayerMixin):
    """One layer's states, (rows, ...) each: the last inputs of its convolution, and what its recurrence carries on.

    Models write to the states that they read, so those are views of the rows, never copies.
    """

    def __init__(self, writes: _Writes) -> None:
        super().__init__()
        self._writes = writes
        self._conv: torch.Tensor | None = None
        self._recurrent: torch.Tensor | None = None

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """The states of the convolution and of the recurrence, as far as the layer has them."""
        return tuple(state for state in (self._conv, self._recurrent) if state is not None)

    @property
    def is_initialized(self) -> bool:
        return bool(self.stored)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: states are made when the first of them come."""

    def present(self, stored: torch.Tensor | None) -> torch.Tensor | None:
        """Return the states that the pass goes on from; None where it begins with whole prompts."""
        if stored is None or self._writes.state_source is not None:
            return None
        return stored[self._writes.state_rows]

    @property
    def present_conv(self) -> torch.Tensor | None:
        return self.present(self._conv)

    @property
    def present_recurrent(self) -> torch.Tensor | None:
        return self.present(self._recurrent)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Store the last inputs of the convolution, (rows, channels, width); return them behind those before."""
        width = conv_kernel_size or conv_states.shape[-1]
        present = self.present_conv
        inputs = conv_states if present is None else torch.cat([present, conv_states], dim=-1)
        last = torch.nn.functional.pad(inputs[..., -width:], (max(0, width - inputs.shape[-1]), 0))
        if self._conv is None:
            self._conv = last.new_zeros((self._writes.rows, *last.shape[1:]))
        self._write(self._conv, last)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        if self._recurrent is None:
            self._recurrent = recurrent_states.new_zeros((self._writes.rows, *recurrent_states.shape[1:]))
        self._write(self._recurrent, recurrent_states)
        return recurrent_states

    def _write(self, stored: torch.Tensor, new: torch.Tensor) -> None:
        source = self._writes.state_source
        stored[self._writes.state_rows] = (new if source is None else new[source]).to(stored.dtype)

    def copy_out(self, row: int, length: int) -> tuple[torch.Tensor, ...]:
        return tuple(stored[row].clone() for stored in self.stored)

    def copy_in(self, row: int, length: int, states: tuple[torch.Tensor, ...]) -> None:
        if not self.is_initialized:
            made = [state.new_zeros((self._writes.rows, *state.shape)) for state in states]
            self._conv, self._recurrent = made[0], made[1] if len(made) > 1 else None
        for stored, kept in zip(self.stored, states, strict=True):
            stored[row] = kept

    def move(self, source: torch.Tensor, target: torch.Tensor, columns: int) -> None:
        for stored in self.stored:
            stored[target] = stored[source]

    def resize(self, rows: int, columns: int) -> None:
        """Give the tensors so many rows, keeping what fits."""
        made = (None if state is None else _resized(state, rows) for state in (self._conv, self._recurrent))
        self._conv, self._recurrent = made

    def clear(self) -> None:
        self._conv = self._recurrent = None


class SlotCache(Cache):
    """The cache of all layers, growing and shrinking with what is in the slots.

    Args:
        kinds: of the layers, as `layer_kinds` gives them.
        max_cells: most rows times columns, unless a reservation that does not fit asks for more.
        fixed: grow by doubling, give nothing back while sequences are held, and keep up to an eighth of `max_cells`
            while idle, so that what is recorded for these addresses serves long.

    Attributes:
        place: changes where the tensors move in memory.
    """

    def __init__(
        self, kinds: Sequence[str], max_rows: int, max_columns: int, max_cells: int, *, fixed: bool = False
    ) -> None:
        self._writes = _Writes()
        self._fixed = fixed
        self.place = 0
        self._max_rows = max_rows
        self._max_columns = max_columns
        self._max_cells = max_cells
        layers = [_layer_of(kind, self._writes) for kind in kinds]
        self._slot_layers = [layer for layer in layers if isinstance(layer, _SlotLayer | _StateLayer)]
        self._state_layers = [layer for layer in self._slot_layers if isinstance(layer, _StateLayer)]
        super().__init__(layers=layers)

    @property
    def allocated(self) -> tuple[int, int]:
        return self._writes.rows, self._writes.columns

    @property
    def bytes_per_token(self) -> int:
        """Memory of one column of one row in all layers; 0 before the first pass."""
        keys = [stored for layer in self._slot_layers if isinstance(layer, _SlotLayer) for stored in layer.stored]
        return sum(stored[0, 0].numel() * stored.element_size() for stored in keys)

    @property
    def bytes_per_row(self) -> int:
        """Memory of one row's states, however long it is; 0 before the first pass, and without such layers."""
        states = [stored for layer in self._state_layers for stored in layer.stored]
        return sum(stored[0].numel() * stored.element_size() for stored in states)

    def fits(self, rows: int, columns: int) -> bool:
        """Return whether so many sequences of so many tokens stay within `max_cells`."""
        return rows * min(columns, self._max_columns) <= self._max_cells

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` sequences of up to `columns` tokens; unless fixed, give back what is far too much."""
        have_rows, have_columns = self.allocated
        want_rows, want_columns = have_rows, have_columns
        if self._fixed:
            if rows <= have_rows and columns <= have_columns:
                return
            doubled_rows, doubled_columns = self._doubled(rows, columns)
            want_rows, want_columns = max(have_rows, doubled_rows), max(have_columns, doubled_columns)
        else:
            if rows > have_rows:
                want_rows = min(self._max_rows, max(rows, 2 * have_rows))
            if columns > have_columns or 4 * columns + 4 * _COLUMN_STEP < have_columns:
                room = columns + max(_COLUMN_STEP, columns // 4)
                want_columns = min(self._max_columns, -(-room // _COLUMN_STEP) * _COLUMN_STEP)
        if want_rows * want_columns > self._max_cells:
            want_columns = max(columns, min(want_columns, self._max_cells // rows))
            want_rows = max(rows, min(self._max_rows, self._max_cells // want_columns))
        if (want_rows, want_columns) != (have_rows, have_columns):
            self._resize(want_rows, want_columns)

    @property
    def ready(self) -> bool:
        return all(layer.is_initialized for layer in self._slot_layers)

    def shape_of_pass(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the least allocated rows and columns, in steps of doubling, that hold so many."""
        have_rows, have_columns = self.allocated
        rows, columns = self._doubled(rows, columns)
        return min(rows, have_rows), min(columns, have_columns)

    def _doubled(self, rows: int, columns: int) -> tuple[int, int]:
        rows, columns = (1 << (least - 1).bit_length() for least in (max(rows, 1), max(columns, _COLUMN_STEP)))
        return min(rows, self._max_rows), min(columns, self._max_columns)

    def _resize(self, rows: int, columns: int) -> None:
        for layer in self._slot_layers:
            layer.resize(rows, columns)
        self._writes.rows, self._writes.columns = rows, columns
        self.place += 1

    def begin_prompts(
        self, cells: torch.Tensor, source: torch.Tensor, rows: torch.Tensor | None = None, prompts: Any = None
    ) -> None:
        """Prepare for a pass of whole prompts: its token ``source[i]`` goes to ``cells[i]``.

        The state behind its prompt ``prompts[i]`` goes to ``rows[i]``, where the model has states.
        """
        self._writes.cells, self._writes.source = cells, source
        self._writes.state_rows, self._writes.state_source = slice(0) if rows is None else rows, prompts

    def begin_extend(self, rows: list[int], positions_NL: torch.Tensor, columns: int) -> None:
        """Prepare for a pass of several tokens for some rows, which attend to what the rows hold, too.

        Where the model has states, for one row.
        """
        row_ids = upload(rows, positions_NL.device)
        cells = row_ids[:, None] * self._writes.columns + positions_NL
        self._writes.cells, self._writes.source = cells.flatten(), None
        self._writes.read_rows, self._writes.read_columns = row_ids, columns
        self._writes.state_rows, self._writes.state_source = slice(rows[0], rows[0] + 1), None

    def begin_decode(self, positions: torch.Tensor, columns: int) -> None:
        """Prepare for a pass of one token for each of the first rows, at `positions`, the largest `columns` - 1."""
        rows = positions.shape[0]
        starts = torch.arange(rows, device=positions.device) * self._writes.columns
        self._writes.cells, self._writes.source = starts + positions, None
        self._writes.read_rows, self._writes.read_columns = slice(rows), columns
        self._writes.state_rows, self._writes.state_source = slice(rows), None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the last inputs of a convolution; None where the pass begins with whole prompts."""
        layer: Any = self.layers[layer_idx]
        state: torch.Tensor | None = layer.present_conv
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state of a recurrence; None where the pass begins with whole prompts."""
        layer: Any = self.layers[layer_idx]
        state: torch.Tensor | None = layer.present_recurrent
        return state

    def begin_rows(self, rows: list[int], device: torch.device) -> None:
        """Set the states of rows to those before a first token: nothing is computed before their next pass."""
        for layer in self._state_layers:
            for stored in layer.stored:
                stored[upload(rows, device)] = 0

    def copy_out(self, row: int, length: int) -> list[tuple[torch.Tensor, ...]]:
        return [layer.copy_out(row, length) for layer in self._slot_layers]

    def copy_in(self, row: int, length: int, states: list[tuple[torch.Tensor, ...]]) -> None:
        for layer, kept in zip(self._slot_layers, states, strict=True):
            layer.copy_in(row, length, kept)

    def move(self, source: list[int], target: list[int], columns: int, device: torch.device) -> None:
        source_ids, target_ids = upload([source, target], device)
        for layer in self._slot_layers:
            layer.move(source_ids, target_ids, columns)

    def clear(self, *, is_idle: bool) -> None:
        """Forget all content, which must be prefilled again, and free the memory where it need not stay in place."""
        rows, columns = self.allocated
        if self._fixed and (not is_idle or rows * columns <= self._max_cells // _KEPT_IDLE):
            for layer in self._slot_layers:
                for stored in layer.stored:
                    stored.zero_()
            return
        for layer in self._slot_layers:
            layer.clear()
        self._writes.rows = self._writes.columns = 0
        self.place += 1


def _layer_of(kind: str, writes: _Writes) -> Any:
    if kind == NOTHING_KEPT:
        return DummyLayer()
    return _StateLayer(writes) if kind in STATE_KINDS else _SlotLayer(writes)


def _resized(stored: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Return a tensor with other sizes of its first dimensions, and zeros where it has grown."""
    fresh = stored.new_zeros((*sizes, *stored.shape[len(sizes) :]))
    kept = tuple(slice(min(size, had)) for size, had in zip(sizes, stored.shape, strict=False))
    fresh[kept] = stored[kept]
    return fresh
