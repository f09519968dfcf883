"""What the model keeps of finished sequences, held for the turn that extends them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

BLOCK = 16
"""A prefix is found by whole blocks of tokens, and then followed token by token."""

LayerStates = list[tuple[torch.Tensor, ...]]
"""A layer's keys and values each, (tokens, heads, head_dim); of other layers the states behind the last token."""


@dataclass(eq=False)
class Prefix:
    """What the model keeps of some tokens, under the weights that the server has now."""

    tokens: tuple[int, ...]
    states: LayerStates
    blocks: list[int] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for layer in self.states for tensor in layer)


class PrefixStore:
    """Prefixes by their tokens, the least recently used given up first. Used by the engine's thread only.

    Args:
        whole: find prefixes of which every token is shared: a recurrent state cannot be cut back.
    """

    def __init__(self, max_bytes: int, *, whole: bool = False) -> None:
        self.max_bytes = max_bytes
        self._whole = whole
        self.bytes = 0
        self.hits = 0
        self.tokens_reused = 0
        self._held: OrderedDict[Prefix, None] = OrderedDict()
        self._by_block: dict[int, list[Prefix]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def find(self, tokens: Sequence[int]) -> tuple[Prefix, int] | None:
        """Return the prefix that shares most of its beginning with `tokens`, and how many tokens that is."""
        found = self._nearest(tokens)
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
        blocks = list(_blocks(tokens))
        # what is found whole is looked for under its last block alone
        prefix = Prefix(tuple(tokens), states, blocks[-1:] if self._whole else blocks)
        if not prefix.blocks or prefix.bytes > self.max_bytes:
            return
        found = self._nearest(prefix.tokens)
        if found is not None and prefix.tokens[: len(found.tokens)] == found.tokens:
            self._drop(found)
        self._held[prefix] = None
        self.bytes += prefix.bytes
        for block in prefix.blocks:
            self._by_block.setdefault(block, []).append(prefix)
        while self.bytes > self.max_bytes:
            self._drop(next(iter(self._held)))

    def clear(self) -> None:
        self._held.clear()
        self._by_block.clear()
        self.bytes = 0

    def _nearest(self, tokens: Sequence[int]) -> Prefix | None:
        """Return the prefix, held last, that begins with most of the blocks that `tokens` begins with."""
        found: Prefix | None = None
        for block in _blocks(tokens):
            held = self._by_block.get(block, [])
            if self._whole:
                shared = [one for one in held if one.tokens == tuple(tokens[: len(one.tokens)])]
                found = max(shared, key=lambda one: len(one.tokens), default=found)
            elif held:
                found = held[-1]
            else:
                break
        return found

    def _drop(self, prefix: Prefix) -> None:
        del self._held[prefix]
        self.bytes -= prefix.bytes
        for block in prefix.blocks:
            self._by_block[block].remove(prefix)
            if not self._by_block[block]:
                del self._by_block[block]


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
