"""Metrics that are measured in the loss: means and extremes over sampled tokens, however they are packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["LossMetrics"]

_Found = dict[str, tuple[float, float]]
"""By name the sum and the count of a mean, or the extreme and 1."""


class LossMetrics:
    """Sums over the micro-batches of one rank since the last log; a name that ends in min or max is an extreme."""

    def __init__(self) -> None:
        self._found: _Found = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add values by name, one a token or a row; those that are not a number count nothing."""
        given = {name: one.double() for name, one in values.items() if one.numel()}
        if not given:
            return
        found = []
        for name, one in given.items():
            is_number = ~one.isnan()
            if name.endswith("min"):
                total = torch.where(is_number, one, torch.inf).min()
            elif name.endswith("max"):
                total = torch.where(is_number, one, -torch.inf).max()
            else:
                total = torch.where(is_number, one, 0.0).sum()
            found += [total, is_number.sum()]
        # one transfer from the device for all of them
        numbers = iter(torch.stack(found).tolist())
        _join(self._found, {name: (total, count) for name, total, count in zip(given, numbers, numbers, strict=True)})

    def take(self, gather: Callable[[_Found], list[_Found]]) -> dict[str, float]:
        """Return the values over all ranks by name, without means over nothing, and start over.

        Args:
            gather: gives what every rank holds; each calls this.
        """
        own, self._found = self._found, {}
        joined: _Found = {}
        for part in gather(own):
            _join(joined, part)
        return {name: total if _is_extreme(name) else total / count for name, (total, count) in joined.items()}


def _is_extreme(name: str) -> bool:
    return name.endswith(("min", "max"))


def _join(found: _Found, more: _Found) -> None:
    for name, (total, count) in more.items():
        if not count:
            continue
        before, counted = found.get(name, (total if _is_extreme(name) else 0.0, 0.0))
        joined = min(before, total) if name.endswith("min") else max(before, total)
        found[name] = (joined if _is_extreme(name) else before + total, counted + count)
