"""Charts as inline SVG in colours that the page's style sheet names by class, with their numbers as JSON.

Without the page's script a chart is whole; with it, all legends tell the values at the step under the mouse.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verifiers.evals.viewer.data import json_text
from verifiers.train.watching.history import Evaluations, Points, smoothed
from verifiers.train.watching.ticks import round_ticks

__all__ = ["COLOURS", "Chart", "chart_figure", "short"]

COLOURS = 9
_WIDTH, _HEIGHT = 420.0, 180.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 8.0, 8.0, 22.0
_SPANS_SHOWN = 3


@dataclass(slots=True)
class Chart:
    """Curves over optimizer steps.

    Attributes:
        title: of the chart.
        note: a few words more.
        curves: by name, in the order of their colours.
        stacked: the curves' values are parts of a whole, drawn on top of one another.
        evaluations: held-out means, drawn as points with 95 % intervals.
        steps_between: the value holds until the next point: a staircase.
        colours: of the curves, where they are not 0, 1, 2.
        from_zero: the y axis begins at 0.
    """

    title: str
    curves: Mapping[str, Points]
    note: str = ""
    stacked: bool = False
    evaluations: Mapping[str, Evaluations] = field(default_factory=dict)
    steps_between: bool = False
    colours: Sequence[int] = ()
    from_zero: bool = True

    @property
    def is_empty(self) -> bool:
        """True where there is nothing to draw."""
        return not any(points.x for points in self.curves.values()) and not self.evaluations


def chart_figure(chart: Chart, x_span: tuple[float, float], marks: Sequence[tuple[float, str]] = ()) -> str:
    """A <figure> with the chart.

    Args:
        x_span: of the axis; the same for all charts of a page.
        marks: steps to point out, each with what happened there.
    """
    tops = _stacked(chart) if chart.stacked else None
    place = _Place(x_span, _y_span(chart, tops))
    parts = [f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{html.escape(chart.title)}">']
    parts += _axes(place)
    for step, text in marks:
        if x_span[0] < step < x_span[1]:
            parts.append(
                f'<line class="event" x1="{place.x(step):.1f}" x2="{place.x(step):.1f}" y1="{_TOP}" '
                f'y2="{_HEIGHT - _BOTTOM}"><title>{html.escape(text)}</title></line>'
            )
    for number, (name, points) in enumerate(chart.curves.items()):
        colour = _colour(chart, number)
        if tops is not None:
            parts.append(_area(place, points.x, tops[number], tops[number + 1], f"area {colour}"))
        else:
            parts += _curve(place, name, points, colour, chart)
    for number, evaluations in enumerate(chart.evaluations.values(), start=len(chart.curves)):
        parts += _points(place, evaluations, _colour(chart, number))
    parts.append('<line class="cursor" y1="8" y2="158" hidden="" /></svg>')
    note = f' <span class="soft">{html.escape(chart.note)}</span>' if chart.note else ""
    numbers = f'<script type="application/json">{json_text(_numbers(chart, x_span))}</script>'
    # the legend last, so that drawings beside one another begin at one height whatever its length
    return (
        f'<figure class="chart"><figcaption><b>{html.escape(chart.title)}</b>{note}</figcaption>'
        f"{''.join(parts)}{_legend(chart)}{numbers}</figure>"
    )


def short(value: float | None) -> str:
    """A number in a few characters."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if value == 0 or (size < 1e6 and value == round(value)):
        return f"{value:,.0f}"
    if size >= 1e6:
        return f"{value / 1e6:.3g} M"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1e-3:
        return f"{value:.3g}"
    digits, power = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


@dataclass(frozen=True, slots=True)
class _Place:
    x_span: tuple[float, float]
    y_span: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_span
        return _LEFT + (value - low) / ((high - low) or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_span
        bottom = _HEIGHT - _BOTTOM
        return bottom - (min(max(value, low), high) - low) / ((high - low) or 1.0) * (bottom - _TOP)


def _colour(chart: Chart, number: int) -> str:
    return f"c{(chart.colours[number] if number < len(chart.colours) else number) % COLOURS}"


def _y_span(chart: Chart, tops: list[list[float]] | None) -> tuple[float, float]:
    values = list(tops[-1]) if tops else []
    if tops is None:
        several = len(chart.curves) > _SPANS_SHOWN
        for points in chart.curves.values():
            values += [*points.y] if several else [*points.low, *points.high]
    for found in chart.evaluations.values():
        for reward, error in zip(found.rewards, found.errors, strict=True):
            margin = 1.96 * error if math.isfinite(error) else 0.0
            values += [reward - margin, reward + margin]
    if chart.from_zero or chart.stacked:
        values.append(0.0)
    if values and max(values) == min(values) == 0.0:
        values.append(1.0)
    if not values or max(values) == min(values):
        ticks = round_ticks(values, 4)
        return ticks[0], ticks[-1]
    margin = 0.04 * (max(values) - min(values))
    low = 0.0 if min(values) == 0.0 else min(values) - margin
    return low, max(values) + margin


def _axes(place: _Place) -> list[str]:
    parts = []
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for tick in round_ticks(place.y_span, 4):
        if not place.y_span[0] <= tick <= place.y_span[1]:
            continue
        y = place.y(tick)
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{right:g}" y1="{y:.1f}" y2="{y:.1f}" />')
        parts.append(f'<text x="{_LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in round_ticks(place.x_span, 6):
        if place.x_span[0] <= tick <= place.x_span[1] and tick == round(tick):
            parts.append(
                f'<text x="{place.x(tick):.1f}" y="{bottom + 16:g}" text-anchor="middle">{short(tick)}</text>'
            )
    parts.append(f'<line class="axis" x1="{_LEFT:g}" x2="{right:g}" y1="{bottom:g}" y2="{bottom:g}" />')
    return parts


def _curve(place: _Place, name: str, points: Points, colour: str, chart: Chart) -> list[str]:
    if not points.x:
        return []
    if chart.steps_between:
        xs = [x for pair in zip(points.x, [*points.x[1:], points.x[-1]], strict=True) for x in pair]
        ys = [y for y in points.y for _ in range(2)]
        return [_line(place, xs, ys, f"curve {colour}")]
    parts = []
    if len(chart.curves) <= _SPANS_SHOWN:
        if points.is_thinned:
            parts.append(_area(place, points.x, points.low, points.high, f"span {colour}"))
        if len(points.x) > 40:
            parts.append(_line(place, points.x, points.y, f"raw {colour}"))
    if len(points.x) == 1:
        parts.append(
            f'<circle class="dot {colour}" cx="{place.x(points.x[0]):.1f}" cy="{place.y(points.y[0]):.1f}" r="3" />'
        )
    else:
        parts.append(_line(place, points.x, smoothed(points.y), f"curve {colour}"))
    return parts


def _points(place: _Place, found: Evaluations, colour: str) -> list[str]:
    parts = [_line(place, found.steps, found.rewards, f"thin {colour}")]
    radius = 3.2 if len(found.steps) <= 60 else 1.6
    for step, reward, error in zip(found.steps, found.rewards, found.errors, strict=True):
        x = place.x(step)
        if math.isfinite(error):
            low, high = place.y(reward - 1.96 * error), place.y(reward + 1.96 * error)
            parts.append(
                f'<line class="whisker {colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" />'
            )
        parts.append(f'<circle class="dot {colour}" cx="{x:.1f}" cy="{place.y(reward):.1f}" r="{radius}" />')
    return parts


def _line(place: _Place, xs: Sequence[float], ys: Sequence[float], classes: str) -> str:
    corners = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline class="{classes}" points="{corners}" />'


def _area(place: _Place, xs: Sequence[float], low: Sequence[float], high: Sequence[float], classes: str) -> str:
    there = [f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in zip(xs, high, strict=True)]
    back = [f"{place.x(x):.1f},{place.y(y):.1f}" for x, y in zip(xs, low, strict=True)]
    return f'<polygon class="{classes}" points="{" ".join([*there, *reversed(back)])}" />'


def _stacked(chart: Chart) -> list[list[float]]:
    """The lower edges of the stacked curves, and the upper edge of the last; all have the same x."""
    length = max((len(points.x) for points in chart.curves.values()), default=0)
    edges = [[0.0] * length]
    for points in chart.curves.values():
        edges.append([below + value for below, value in zip(edges[-1], points.y, strict=True)])
    return edges


def _legend(chart: Chart) -> str:
    names = [*chart.curves, *chart.evaluations]
    lasts = [points.y[-1] if points.y else None for points in chart.curves.values()]
    lasts += [found.rewards[-1] for found in chart.evaluations.values()]
    items = [
        f'<li><i class="key {_colour(chart, number)}"></i>{html.escape(name)} <b class="value">{short(last)}</b></li>'
        for number, (name, last) in enumerate(zip(names, lasts, strict=True))
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _numbers(chart: Chart, x_span: tuple[float, float]) -> dict[str, object]:
    curves = [[points.x, _rounded(points.y)] for points in chart.curves.values()]
    curves += [[found.steps, _rounded(found.rewards)] for found in chart.evaluations.values()]
    return {"span": list(x_span), "left": _LEFT, "right": _WIDTH - _RIGHT, "width": _WIDTH, "curves": curves}


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
