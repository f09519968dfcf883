"""Keys and values of the sequences in the slots, in a form that Hugging Face models write to by themselves.

Row r of every tensor belongs to the r-th active sequence, and its token p lies at column p, whatever the
other rows hold. So a sequence that ends is replaced by the last row, nothing is padded on the left, and a
step reads the columns up to the longest active sequence only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from verifiers_embedded.engine.decoding import upload

_COLUMN_STEP = 64
_MOST_SHAPES = 7
"""Sizes of a cache of fixed shapes."""


@dataclass
class _Writes:
    """The places where the next forward pass puts its keys and values, and reads them; shared by all layers.

    A cell is a row times the allocated columns, plus the column. With `source` the pass is over whole prompts, which
    attend to themselves alone: its token ``source[i]`` goes to ``cells[i]``.
    """

    rows: int = 0
    columns: int = 0
    cells: torch.Tensor | None = None
    source: torch.Tensor | None = None
    read_rows: torch.Tensor | slice = field(default_factory=lambda: slice(0))
    read_columns: int = 0


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

    def copy_out(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.stored
        return keys[row, :length].clone(), values[row, :length].clone()

    def copy_in(self, row: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys[None].transpose(1, 2), values[None].transpose(1, 2))
        for stored, states in zip(self.stored, (keys, values), strict=True):
            stored[row, :length] = states[:length]

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
        return sum(stored[0, 0].numel() * stored.element_size() for stored in self._stored())

    def _stored(self) -> list[torch.Tensor]:
        return [stored for layer in self._slot_layers for stored in layer.stored]

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

    def begin_prompts(self, cells: torch.Tensor, source: torch.Tensor) -> None:
        """Prepare for a pass of whole prompts: its token ``source[i]`` goes to ``cells[i]``."""
        self._writes.cells, self._writes.source = cells, source

    def begin_extend(self, rows: torch.Tensor, positions_NL: torch.Tensor, columns: int) -> None:
        """Prepare for a pass of several tokens for some rows, which attend to what the rows hold, too."""
        cells = rows[:, None] * self._writes.columns + positions_NL
        self._writes.cells, self._writes.source = cells.flatten(), None
        self._writes.read_rows, self._writes.read_columns = rows, columns

    def begin_decode(self, positions: torch.Tensor, columns: int) -> None:
        """Prepare for a pass of one token for each of the first rows, at `positions`, the largest `columns` - 1."""
        rows = positions.shape[0]
        starts = torch.arange(rows, device=positions.device) * self._writes.columns
        self._writes.cells, self._writes.source = starts + positions, None
        self._writes.read_rows, self._writes.read_columns = slice(rows), columns

    def copy_out(self, row: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [layer.copy_out(row, length) for layer in self._slot_layers]

    def copy_in(self, row: int, length: int, states: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for layer, (keys, values) in zip(self._slot_layers, states, strict=True):
            layer.copy_in(row, length, keys, values)

    def move(self, source: list[int], target: list[int], columns: int, device: torch.device) -> None:
        source_ids, target_ids = upload([source, target], device)
        for stored in self._stored():
            stored[target_ids, :columns] = stored[source_ids, :columns]

    def clear(self) -> None:
        """Forget all content, which must be prefilled again; frees the memory unless shapes are fixed."""
        if self._fixed:
            for stored in self._stored():
                stored.zero_()
            return
        for layer in self._slot_layers:
            layer.clear()
        self._writes.rows = self._writes.columns = 0


def _resized(stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    fresh = stored.new_zeros((rows, columns, *stored.shape[2:]))
    keep_rows, keep_columns = min(rows, stored.shape[0]), min(columns, stored.shape[1])
    fresh[:keep_rows, :keep_columns] = stored[:keep_rows, :keep_columns]
    return fresh
