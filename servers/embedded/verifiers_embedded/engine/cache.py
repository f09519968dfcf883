"""Keys and values of the sequences in the slots, in a form that Hugging Face models write to by themselves.

Row r of every tensor belongs to the r-th active sequence, and its token p lies at column p, whatever the
other rows hold. So a sequence that ends is replaced by the last row, nothing is padded on the left, and a
step reads the columns up to the longest active sequence only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from verifiers_embedded.engine.decoding import upload

_COLUMN_STEP = 64
_MOST_SHAPES = 7
"""Sizes of a cache of fixed shapes."""


@dataclass
class _Writes:
    """The places where the next forward pass puts its keys and values; shared by all layers."""

    rows: int = 0
    columns: int = 0
    prefill_rows: torch.Tensor | None = None
    prefill_source: torch.Tensor | None = None
    packed_source: torch.Tensor | None = None
    cells: torch.Tensor | None = None
    read_rows: int = 0
    read_columns: int = 0
    picked_rows: torch.Tensor | None = None


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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        writes = self._writes
        if writes.prefill_rows is not None:
            length = key_states.shape[2]
            self.keys[writes.prefill_rows, :length] = key_states.transpose(1, 2)[writes.prefill_source]
            self.values[writes.prefill_rows, :length] = value_states.transpose(1, 2)[writes.prefill_source]
            return key_states, value_states
        if writes.packed_source is not None:
            assert writes.cells is not None
            for stored, new in ((self.keys, key_states), (self.values, value_states)):
                states = new[0].transpose(0, 1)[writes.packed_source]
                stored.flatten(0, 1).index_copy_(0, writes.cells, states)
            return key_states, value_states
        return self._decode(self.keys, key_states), self._decode(self.values, value_states)

    def _decode(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        writes = self._writes
        assert writes.cells is not None
        if writes.picked_rows is not None:
            stored.flatten(0, 1).index_copy_(0, writes.cells, new.transpose(1, 2).flatten(0, 1))
            return stored[writes.picked_rows, : writes.read_columns].transpose(1, 2)
        stored.flatten(0, 1).index_copy_(0, writes.cells, new.squeeze(2))
        return stored[: writes.read_rows, : writes.read_columns].transpose(1, 2)

    def copy_out(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys[row, :length].clone(), self.values[row, :length].clone()

    def copy_in(self, row: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys[None].transpose(1, 2), values[None].transpose(1, 2))
        assert self.keys is not None
        assert self.values is not None
        self.keys[row, :length] = keys[:length]
        self.values[row, :length] = values[:length]

    def resize(self, rows: int, columns: int) -> None:
        """Give the tensors a new size, keeping what fits; make them where their shapes are known."""
        if self.keys is not None and self.values is not None:
            self.keys = _resized(self.keys, rows, columns)
            self.values = _resized(self.values, rows, columns)
        else:
            self._allocate(rows, columns)

    def move(self, source: torch.Tensor, target: torch.Tensor, columns: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[target, :columns] = self.keys[source, :columns]
            self.values[target, :columns] = self.values[source, :columns]

    def zero(self) -> None:
        if self.keys is not None and self.values is not None:
            self.keys.zero_()
            self.values.zero_()

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


class SlotCache(Cache):
    """The key-value cache of all layers, growing and shrinking with what is in the slots.

    Args:
        max_cells: most rows times columns, unless a reservation that does not fit asks for more.
        fixed: allocate all rows, and columns in few sizes, for passes that read all that is allocated: what
            is recorded for these shapes then fits every step. Such memory is held while idle, too.

    Attributes:
        place: changes where the tensors move in memory.
    """

    def __init__(self, layers: int, max_rows: int, max_columns: int, max_cells: int, *, fixed: bool = False) -> None:
        self._writes = _Writes()
        self._fixed = fixed
        self.place = 0
        self._max_rows = max_rows
        self._max_columns = max_columns
        self._max_cells = max_cells
        self._slot_layers = [_SlotLayer(self._writes) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    @property
    def allocated(self) -> tuple[int, int]:
        return self._writes.rows, self._writes.columns

    @property
    def bytes_per_token(self) -> int:
        """Memory of one column of one row in all layers; 0 before the first pass."""
        stored = [tensor for layer in self._slot_layers for tensor in (layer.keys, layer.values)]
        return sum(tensor[0, 0].numel() * tensor.element_size() for tensor in stored if tensor is not None)

    def fits(self, rows: int, columns: int) -> bool:
        """Return whether so many sequences of so many tokens stay within `max_cells`."""
        columns = min(columns, self._max_columns)
        if self._fixed:
            rows, columns = self._max_rows, self._fixed_columns(columns)
        return rows * columns <= self._max_cells

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for `rows` sequences of up to `columns` tokens, and gives back what is far too much."""
        have_rows, have_columns = self.allocated
        if self._fixed:
            size = self._fixed_columns(columns)
            # shrinks late, so as not to change to and fro at a border
            wanted = (self._max_rows, have_columns if size <= have_columns <= 2 * size else size)
            if rows and wanted != (have_rows, have_columns):
                self._resize(*wanted)
            return
        want_rows, want_columns = have_rows, have_columns
        if rows > have_rows:
            want_rows = min(self._max_rows, max(rows, 2 * have_rows))
        if columns > have_columns or 4 * columns + 4 * _COLUMN_STEP < have_columns:
            room = columns + max(_COLUMN_STEP, columns // 4)
            want_columns = min(self._max_columns, -(-room // _COLUMN_STEP) * _COLUMN_STEP)
        if want_rows * want_columns > self._max_cells:
            want_rows, want_columns = rows, max(columns, min(self._max_columns, self._max_cells // rows))
        if (want_rows, want_columns) != (have_rows, have_columns):
            self._resize(want_rows, want_columns)

    @property
    def ready(self) -> bool:
        return all(layer.is_initialized for layer in self._slot_layers)

    def _fixed_columns(self, columns: int) -> int:
        """Return the size that holds so many columns: the most there can be, halved up to six times."""
        size = self._max_columns
        for _ in range(_MOST_SHAPES - 1):
            half = -(-size // 2)
            if half < max(columns, _COLUMN_STEP):
                break
            size = half
        return size

    def _resize(self, rows: int, columns: int) -> None:
        for layer in self._slot_layers:
            layer.resize(rows, columns)
        self._writes.rows, self._writes.columns = rows, columns
        self.place += 1

    def begin_prefill(self, rows: torch.Tensor, source: torch.Tensor) -> None:
        """Prepare for a pass of whole prompts: its batch row ``source[i]`` goes to cache row ``rows[i]``."""
        self._writes.prefill_rows, self._writes.prefill_source = rows, source
        self._writes.picked_rows = self._writes.packed_source = None

    def begin_packed(self, cells: torch.Tensor, source: torch.Tensor) -> None:
        """Prepare for a pass of whole prompts end to end: its token ``source[i]`` goes to ``cells[i]``.

        A cell is a row times the allocated columns, plus the column.
        """
        self._writes.prefill_rows = self._writes.prefill_source = self._writes.picked_rows = None
        self._writes.cells, self._writes.packed_source = cells, source

    def begin_extend(self, rows: torch.Tensor, positions_NL: torch.Tensor, columns: int) -> None:
        """Prepare for a pass of several tokens for some rows, which attend to what the rows hold, too."""
        cells = rows[:, None] * self._writes.columns + positions_NL
        self._writes.prefill_rows = self._writes.prefill_source = self._writes.packed_source = None
        self._writes.cells = cells.flatten()
        self._writes.picked_rows, self._writes.read_columns = rows, columns

    def copy_out(self, row: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [layer.copy_out(row, length) for layer in self._slot_layers]

    def copy_in(self, row: int, length: int, states: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for layer, (keys, values) in zip(self._slot_layers, states, strict=True):
            layer.copy_in(row, length, keys, values)

    def begin_decode(self, positions: torch.Tensor, columns: int) -> None:
        """Prepare for a pass of one token for each of the first rows, at `positions`, the largest `columns` - 1."""
        rows = positions.shape[0]
        starts = torch.arange(rows, device=positions.device) * self._writes.columns
        self._writes.prefill_rows = self._writes.prefill_source = self._writes.packed_source = None
        self._writes.picked_rows = None
        self._writes.cells = starts + positions
        self._writes.read_rows, self._writes.read_columns = rows, columns

    def move(self, source: list[int], target: list[int], columns: int, device: torch.device) -> None:
        source_ids, target_ids = upload([source, target], device)
        for layer in self._slot_layers:
            layer.move(source_ids, target_ids, columns)

    def clear(self) -> None:
        """Forget all content, which must be prefilled again; frees the memory unless shapes are fixed."""
        if self._fixed:
            for layer in self._slot_layers:
                layer.zero()
            return
        for layer in self._slot_layers:
            layer.clear()
        self._writes.rows = self._writes.columns = 0


def _resized(stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    fresh = stored.new_zeros((rows, columns, *stored.shape[2:]))
    keep_rows, keep_columns = min(rows, stored.shape[0]), min(columns, stored.shape[1])
    fresh[:keep_rows, :keep_columns] = stored[:keep_rows, :keep_columns]
    return fresh
