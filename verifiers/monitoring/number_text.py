"""Numbers as text: rounded to the digits that mean something, as a time, as a bar, or as a sparkline of many."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LEVELS = "▁▂▃▄▅▆▇█"
_MOST_DECIMALS = 4


def rounded(value: float | None, stderr: float | None, sign: str = "") -> str:
    """Return a number with the decimals that its standard error leaves a meaning: two digits of the error.

    It has 3 decimals where that is 0 or not known, and "-" stands for None and NaN.
    """
    if value is None or math.isnan(value):
        return "-"
    known = stderr is not None and math.isfinite(stderr) and stderr > 0
    decimals = min(_MOST_DECIMALS, max(0, 1 - math.floor(math.log10(stderr)))) if known and stderr else 3
    return f"{value:{sign}.{decimals}f}"


def format_seconds(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss; "?" stands for what is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def bar(share: float, width: int) -> str:
    """Return a bar of `width` characters that is filled up to a share of 0 .. 1."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "━" * full + "╌" * (width - full)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return at most `width` characters, the lowest for the least value and the highest for the greatest."""
    count = min(width, len(values))
    spans = [values[n * len(values) // count : (n + 1) * len(values) // count] for n in range(count)]
    means = [math.fsum(span) / len(span) for span in spans]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if low == high:
        return _LEVELS[3] * count
    return "".join(_LEVELS[round((mean - low) / (high - low) * (len(_LEVELS) - 1))] for mean in means)
