"""What TRL measures inside its loss, joined over passes: means over sampled tokens, however rows were dealt.

TRL logs the mean over its calls. With passes of different sizes that would be another number for each way to cut a
micro-batch, so here each call counts as what it is a mean of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["LossMetrics"]

_PER_ROW_RATIO = ("clip_ratio/", "cispo_clip_ratio", "vespo/phi_seq_mean")
"""Means of what there may be one of a row, where ratios are those of whole sequences."""

_OF_PADDING = {"vespo/phi_seq_mean": 1.0}
"""What a padding row adds to a mean over rows, where that is not 0."""


_OF_THE_UPDATE = ("policy_loss", "entropy_coef")
"""What is told of an update in which no token is trained too."""


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
            batch: the pass, with `call_tokens`, `call_rows` and `call_padding_rows` over all ranks.
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
        """Count a micro-step: losses of passes add up to that of their micro-step."""
        self._micro_steps += 1

    def take(self) -> dict[str, float]:
        """The joined values by name, without means over nothing; begins anew."""
        joined = {
            name: total / self._counts.get(name, max(1, self._micro_steps)) for name, total in self._sums.items()
        }
        joined.update(self._extremes)
        self._sums, self._counts, self._extremes, self._micro_steps = {}, {}, {}, 0
        return joined


def _one_column(batch: Mapping[str, Tensor]) -> bool:
    """Whether advantages leave a ratio of rows one of rows; the correction and advantages per token spread it."""
    return batch["advantages"].dim() == 1
