"""Keys and values of finished sequences, kept for the turn that extends them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

BLOCK = 16
"""A prefix is found by whole blocks of tokens, and then followed token by token."""

LayerStates = list[tuple[torch.Tensor, torch.Tensor]]
"""A layer's keys and values each, shaped (tokens, heads, head_dim)."""


@dataclass(eq=False)
class Prefix:
    """The keys and values of some tokens, under the weights that the server has now."""

    tokens: tuple[int, ...]
    states: LayerStates
    blocks: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for pair in self.states for tensor in pair)


class PrefixStore:
    """Prefixes by their tokens, the least recently used given up first. Used by the engine's thread only."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.tokens_reused = 0
        self._held: OrderedDict[Prefix, None] = OrderedDict()
        self._by_block: dict[int, list[Prefix]] = {}
        self._by_last_block: dict[int, list[Prefix]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def find(self, tokens: Sequence[int]) -> tuple[Prefix, int] | None:
        """Return the prefix that shares most of its beginning with `tokens`, and how many tokens that is."""
        if not self._held:
            return None
        found: Prefix | None = None
        for block in _blocks(tokens):
            held = self._by_block.get(block)
            if not held:
                break
            found = held[-1]
        if found is None:
            return None
        shared = _common(found.tokens, tokens)
        # hashes may collide: what is not really shared is not used
        if shared < BLOCK:
            return None
        self._held.move_to_end(found)
        self.hits += 1
        self.tokens_reused += shared
        return found, shared

    def keep(self, tokens: Sequence[int], states: LayerStates) -> None:
        """Hold the states of `tokens`, in the place of those that they extend."""
        prefix = Prefix(tuple(tokens), states, list(_blocks(tokens)))
        if not prefix.blocks or prefix.bytes > self.max_bytes:
            return
        older = self._ending_at(prefix)
        if older is not None:
            self._drop(older)
        self._held[prefix] = None
        self.bytes += prefix.bytes
        for block in prefix.blocks:
            self._by_block.setdefault(block, []).append(prefix)
        self._by_last_block.setdefault(prefix.blocks[-1], []).append(prefix)
        while self.bytes > self.max_bytes:
            self._drop(next(iter(self._held)))

    def clear(self) -> None:
        self._held.clear()
        self._by_block.clear()
        self._by_last_block.clear()
        self.bytes = 0

    def _ending_at(self, prefix: Prefix) -> Prefix | None:
        """Return a held prefix of which the new one is a continuation (or the same)."""
        for block in reversed(prefix.blocks):
            for older in self._by_last_block.get(block, ()):
                if prefix.tokens[: len(older.tokens)] == older.tokens:
                    return older
        return None

    def _drop(self, prefix: Prefix) -> None:
        del self._held[prefix]
        self.bytes -= prefix.bytes
        for block in prefix.blocks:
            _take_out(self._by_block, block, prefix)
        _take_out(self._by_last_block, prefix.blocks[-1], prefix)


def _take_out(index: dict[int, list[Prefix]], block: int, prefix: Prefix) -> None:
    index[block].remove(prefix)
    if not index[block]:
        del index[block]


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """Return a number for each beginning of whole blocks; equal beginnings have equal numbers."""
    number = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        number = hash((number, tuple(tokens[start : start + BLOCK])))
        yield number


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    size = min(len(one), len(other))
    if tuple(one[:size]) == tuple(other[:size]):
        return size
    return next(place for place in range(size) if one[place] != other[place])
