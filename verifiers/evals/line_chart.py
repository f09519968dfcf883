"""A line chart as inline SVG: axes, round ticks, a legend, and a title on every point for the mouse.

Colours come from the page as CSS variables --c0 .. --c7, so that one drawing serves light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Curve", "line_chart", "round_ticks"]

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _BOTTOM = 58, 14, 40
_LEGEND_ROW, _LEGEND_CHARACTER, _COLOURS = 20, 7, 8
_MOST_MARKS = 240
_Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A measured quantity over time.

    Attributes:
        name: shown in the legend.
        points: (x, y) pairs in order of x.
        unit: of y, shown at the axis; in a report, curves with the same unit share a chart, and those
            without one (the default, a bare number) stand alone.
    """

    name: str
    points: Sequence[tuple[float, float]]
    unit: str = ""


def line_chart(curves: Sequence[Curve], *, x_label: str) -> str:
    """An <svg> element with these curves over one pair of axes.

    Args:
        curves: at least one; those without a finite point appear in the legend alone.
        x_label: shown under the x axis.
    """
    legend, top = _legend(curves)
    finite = [(x, y) for curve in curves for x, y in curve.points if math.isfinite(x) and math.isfinite(y)]
    x_ticks = round_ticks([x for x, _ in finite], 6)
    y_ticks = round_ticks([y for _, y in finite], 5)
    xs = [x for x, _ in finite] or [0.0, 1.0]
    x_span = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 0.5, max(xs) + 0.5)
    y_span = (y_ticks[0], y_ticks[-1])
    place = _Place(x_span, y_span, top)
    names = ", ".join(curve.name for curve in curves)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(names)}">']
    parts += _axes(place, [tick for tick in x_ticks if x_span[0] <= tick <= x_span[1]], y_ticks)
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:g}" y="{_HEIGHT - 6}" text-anchor="middle">'
        f"{html.escape(x_label)}</text>"
    )
    unit = curves[0].unit if curves else ""
    if unit:
        parts.append(f'<text x="4" y="{top - 10}">{html.escape(unit)}</text>')
    parts += legend
    for index, curve in enumerate(curves):
        parts += _drawn(curve, f"var(--c{index % _COLOURS})", place)
    parts.append("</svg>")
    return "".join(parts)


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


@dataclass(frozen=True, slots=True)
class _Place:
    """Maps data to the drawing's units."""

    x_span: _Span
    y_span: _Span
    top: float

    def x(self, value: float) -> float:
        low, high = self.x_span
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_span
        bottom = _HEIGHT - _BOTTOM
        return bottom - (value - low) / (high - low) * (bottom - self.top)


def _axes(place: _Place, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in y_ticks:
        y = place.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for tick in x_ticks:
        x = place.x(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_number(tick)}</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return parts


def _legend(curves: Sequence[Curve]) -> tuple[list[str], int]:
    """The legend's elements, broken into lines, and the y at which the plot may begin."""
    parts, x, y = [], float(_LEFT), 14
    for index, curve in enumerate(curves):
        name = curve.name if len(curve.name) <= 60 else curve.name[:59] + "…"
        width = 26 + _LEGEND_CHARACTER * len(name)
        if x > _LEFT and x + width > _WIDTH - _RIGHT:
            x, y = float(_LEFT), y + _LEGEND_ROW
        colour = f"var(--c{index % _COLOURS})"
        parts.append(f'<rect x="{x:g}" y="{y - 8}" width="12" height="8" rx="2" style="fill:{colour}"/>')
        parts.append(f'<text class="name" x="{x + 18:g}" y="{y}">{html.escape(name)}</text>')
        x += width
    return parts, y + 28


def _drawn(curve: Curve, colour: str, place: _Place) -> list[str]:
    parts = []
    for run in _finite_runs(curve.points):
        line = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in run)
        parts.append(f'<polyline class="curve" style="stroke:{colour}" points="{line}"/>')
    finite = [(x, y) for x, y in curve.points if math.isfinite(x) and math.isfinite(y)]
    # every point is in the line; only so many can be pointed at
    every = -(-len(finite) // _MOST_MARKS) or 1
    radius = 3 if len(finite) <= 40 else 0 if len(finite) > 120 else 1.5
    for x, y in finite[::every]:
        at = f'cx="{place.x(x):.1f}" cy="{place.y(y):.1f}"'
        title = html.escape(f"{curve.name}: {_number(y)} {curve.unit}".rstrip() + f" at {_number(x)}")
        parts.append(
            f'<g class="mark"><circle class="dot" {at} r="{radius}" style="fill:{colour}"/>'
            f'<circle class="hit" {at} r="8"><title>{title}</title></circle></g>'
        )
    return parts


def _finite_runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """The points, broken where one is not finite."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if len(run) > 1]


def _number(value: float) -> str:
    if value == round(value) and abs(value) < 1e15:
        return f"{round(value):,}"
    return f"{value:.4g}"
