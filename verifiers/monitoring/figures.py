"""Figures as text: a number with the decimals that mean something, a bar, a metric's course as a sparkline."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["Trend", "bar", "rounded"]

_LEVELS = "▁▂▃▄▅▆▇█"
_MOST_VALUES = 256
_MOST_DECIMALS = 4


def rounded(value: float | None, stderr: float | None, sign: str = "") -> str:
    """Return a number with the decimals that its standard error leaves a meaning: two digits of the error.

    Args:
        value: "-" stands for None and NaN.
        stderr: of the value; 3 decimals where it is 0 or not known.
        sign: "+" shows the sign of positive numbers too.
    """
    if value is None or math.isnan(value):
        return "-"
    known = stderr is not None and math.isfinite(stderr) and stderr > 0
    decimals = min(_MOST_DECIMALS, max(0, 1 - math.floor(math.log10(stderr)))) if known and stderr else 3
    return f"{value:{sign}.{decimals}f}"


def bar(share: float, width: int) -> str:
    """Return a bar of `width` characters that is filled up to a share of 0 .. 1."""
    full = round(min(1.0, max(0.0, share)) * width)
    return "━" * full + "╌" * (width - full)


class Trend:
    """The course of a metric: its first and newest value, and means of equal spans between them.

    It keeps 256 means at most, however long the run.

    Attributes:
        first: the first value; None before there is one.
        now: the newest value; None before there is one.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.now: float | None = None
        self._means: list[float] = []
        self._newest: list[float] = []
        self._values_a_mean = 1

    def take(self, value: Any) -> None:
        """Take in a value; what is no finite number is left out."""
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        self.now = float(value)
        self.first = self.now if self.first is None else self.first
        self._newest.append(self.now)
        if len(self._newest) < self._values_a_mean:
            return
        self._means.append(math.fsum(self._newest) / len(self._newest))
        self._newest = []
        if len(self._means) == _MOST_VALUES:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(one + two) / 2 for one, two in pairs]
            self._values_a_mean *= 2

    def sparkline(self, width: int) -> str:
        """Return at most `width` characters, the lowest for the least value and the highest for the greatest."""
        values = self._means or self._newest
        count = min(width, len(values))
        spans = [values[n * len(values) // count : (n + 1) * len(values) // count] for n in range(count)]
        means = [math.fsum(span) / len(span) for span in spans]
        low, high = min(means, default=0.0), max(means, default=0.0)
        if low == high:
            return _LEVELS[3] * count
        return "".join(_LEVELS[round((mean - low) / (high - low) * (len(_LEVELS) - 1))] for mean in means)

    def __str__(self) -> str:
        if self.first is None:
            return "–"
        return f"{self.first:.3f} first, {self.now:.3f} now  {self.sparkline(24)}"
