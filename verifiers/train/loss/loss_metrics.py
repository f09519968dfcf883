"""Metrics that TRL measures inside its loss, joined over micro-batches: means over sampled tokens, however packed.

TRL logs the mean over its calls. With micro-batches of different sizes that would be another number for each packing,
so here each call counts as what it is a mean of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["LossMetrics"]

_PER_ROW_RATIO = ("clip_ratio/", "cispo_clip_ratio", "vespo/phi_seq_mean")
"""Means over rows, not tokens, where ratios are those of whole sequences."""

_OF_PADDING = {"vespo/phi_seq_mean": 1.0}
"""The value that a padding row adds to a mean over rows, where that is not 0."""


_OF_THE_UPDATE = ("policy_loss", "entropy_coef")
"""Metrics that are logged for an update in which no token is trained too."""


@dataclass(slots=True)
class LossMetrics:
    """Sums over calls of the loss, until they are taken."""

    _sums: dict[str, float] = field(default_factory=dict)
    _counts: dict[str, float] = field(default_factory=dict)
    _extremes: dict[str, float] = field(default_factory=dict)
    _micro_steps: int = 0

    def add(self, measured: Mapping[str, list[float]], batch: Mapping[str, Tensor], *, per_row: bool) -> None:
        """Add what one call measured.

        Args:
            measured: TRL's values by name.
            batch: the micro-batch, with `call_tokens`, `call_rows` and `call_padding_rows` over all ranks.
            per_row: ratios are those of whole rows, so that means of them are over rows where they have one column.
        """
        tokens = float(batch["call_tokens"])
        for name, values in measured.items():
            if not tokens and name not in _OF_THE_UPDATE:
                # made of padding alone
                continue
            for value in values:
                if math.isnan(value):
                    continue
                if name.endswith("_min"):
                    self._extremes[name] = min(value, self._extremes.get(name, value))
                elif name.endswith("_max"):
                    self._extremes[name] = max(value, self._extremes.get(name, value))
                elif name == "policy_loss":
                    self._sums[name] = self._sums.get(name, 0.0) + value
                elif name == "entropy_coef":
                    self._count(name, value, 1.0)
                elif name.startswith(_PER_ROW_RATIO) and (per_row or "phi" in name) and _one_column(batch):
                    rows, padding = float(batch["call_rows"]), float(batch["call_padding_rows"])
                    self._count(name, value * rows - _OF_PADDING.get(name, 0.0) * padding, rows - padding)
                else:
                    self._count(name, value * tokens, tokens)

    def _count(self, name: str, total: float, count: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0.0) + count

    def end_micro_step(self) -> None:
        """Count a micro-step: the losses of its micro-batches add up to its loss."""
        self._micro_steps += 1

    def take(self) -> dict[str, float]:
        """Return the joined values by name, without means over nothing, and start over."""
        joined = {
            name: total / self._counts.get(name, max(1, self._micro_steps)) for name, total in self._sums.items()
        }
        joined.update(self._extremes)
        self._sums, self._counts, self._extremes, self._micro_steps = {}, {}, {}, 0
        return joined


def _one_column(batch: Mapping[str, Tensor]) -> bool:
    """Return whether a ratio of rows stays one of rows; importance weights and advantages per token spread it."""
    return batch["advantages"].dim() == 1
