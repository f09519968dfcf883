"""Round numbers for an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["round_ticks"]


def round_ticks(values: Sequence[float], about: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that span `values`, about `about` of them."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-12):
        # a flat curve still needs a scale around it
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # rounding to the step's own digits keeps 0.30000000000000004 off the axis
    digits = max(0, -math.floor(math.log10(step)))
    return [round(number * step, digits) + 0.0 for number in range(first, last + 1)]
