"""One HTML file that shows a run: a summary, curves, and samples to read.

The file needs nothing else: no scripts, fonts or pictures from elsewhere, so it can be mailed, archived and
opened offline. Everything that a model or an environment wrote is escaped.
"""

from __future__ import annotations

import html
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verifiers.evals.line_chart import Curve, line_chart

__all__ = ["Curve", "Sample", "render_report", "write_report"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout to read.

    Attributes:
        label: what it is, e.g. "example 12, rollout 0".
        prompt: as text.
        completion: as text.
        reward: None where it was not scored.
        answer: the right answer, or "".
    """

    label: str
    prompt: str
    completion: str
    reward: float | None = None
    answer: str = ""


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    summary_rows: Sequence[tuple[str, str]] = (),
    curves: Sequence[Curve] = (),
    samples: Sequence[Sample] = (),
    x_label: str = "optimizer step",
) -> Path:
    """Write the report in one step: readers see the file as it was before, or whole.

    Args:
        path: of the HTML file; its directory is made where it is missing.
        title: heading and window title.
        summary_rows: (name, value) pairs, as text.
        curves: those with the same unit share a chart; points that are not finite leave gaps.
        samples: rollouts, folded up until opened.
        x_label: what the curves' x values count.

    Returns:
        The path written to.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = render_report(title, summary_rows, curves, samples, x_label)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        # lone surrogates, which models do produce, become question marks instead of an error
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def render_report(
    title: str,
    summary_rows: Sequence[tuple[str, str]],
    curves: Sequence[Curve],
    samples: Sequence[Sample],
    x_label: str = "optimizer step",
) -> str:
    """The report as HTML text; arguments as in `write_report`."""
    name = html.escape(title)
    sections = [_summary(summary_rows), _charts(curves, x_label), _samples(samples)]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # a second lock behind the escaping: nothing in this file may run or load
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{name}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<header><h1>{name}</h1></header>",
            *filter(None, sections),
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _summary(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    cells = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in rows)
    return f'<section aria-label="Summary"><dl class="summary">{cells}</dl></section>'


def _charts(curves: Sequence[Curve], x_label: str) -> str:
    # a bare number has no scale in common with another, so it gets a chart of its own
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        if curve.points:
            groups.setdefault((curve.unit, "" if curve.unit else curve.name), []).append(curve)
    figures = [f"<figure>{line_chart(group, x_label=x_label)}</figure>" for group in groups.values()]
    return f'<section><h2>Curves</h2><div class="charts">{"".join(figures)}</div></section>' if figures else ""


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    cards = "".join(_sample(sample, is_open=index == 0) for index, sample in enumerate(samples))
    return f"<section><h2>Samples</h2>{cards}</section>"


def _sample(sample: Sample, is_open: bool) -> str:
    answer = f"<h3>Answer</h3><pre>{html.escape(sample.answer)}</pre>" if sample.answer else ""
    return (
        f'<details class="sample"{" open" if is_open else ""}>'
        f"<summary><span>{html.escape(sample.label)}</span>{_reward_badge(sample.reward)}</summary>"
        f"<h3>Prompt</h3><pre>{html.escape(sample.prompt)}</pre>"
        f"<h3>Completion</h3><pre>{html.escape(sample.completion)}</pre>{answer}</details>"
    )


def _reward_badge(reward: float | None) -> str:
    if reward is None or not math.isfinite(reward):
        return '<span class="badge none">not scored</span>'
    kind = "good" if reward >= 0.995 else "bad" if reward <= 0.005 else "some"
    return f'<span class="badge {kind}">reward {reward:.4g}</span>'


_STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b1f27; --soft: #667085;
  --line: #e3e6eb; --good: #17803d; --some: #9a6700; --bad: #b42318;
  --c0: #2563c9; --c1: #d1601b; --c2: #148a62; --c3: #8b45c4;
  --c4: #c02f6d; --c5: #8a6d12; --c6: #0e8aa5; --c7: #667085; }
@media (prefers-color-scheme: dark) { :root { --page: #12151b; --card: #1a1e26; --ink: #e6e9ef; --soft: #98a2b3;
  --line: #2c323d; --good: #5fd38d; --some: #e0b04a; --bad: #ff8a80;
  --c0: #74a7ff; --c1: #ff9a5c; --c2: #4fd1a1; --c3: #c493f5;
  --c4: #ff7eb0; --c5: #dcc05a; --c6: #55cbe3; --c7: #98a2b3; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 70rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 1.25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .75rem; }
h3 { font-size: .75rem; font-weight: 600; letter-spacing: .04em; text-transform: uppercase; color: var(--soft);
  margin: 1rem 0 .3rem; }
.summary { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .75rem; margin: 0; }
.summary > div, figure, .sample { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.summary > div { padding: .7rem .9rem; }
dt { color: var(--soft); font-size: .8rem; }
dd { margin: .1rem 0 0; font-size: 1.1rem; font-weight: 600; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .9rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
svg .name { fill: var(--ink); }
svg .grid { stroke: var(--line); }
svg .axis { stroke: var(--soft); }
svg .curve { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .dot { stroke: none; }
svg .hit { fill: transparent; }
svg .mark:hover .dot { r: 5px; }
.sample { margin: 0 0 .6rem; padding: 0 1rem; }
.sample[open] { padding-bottom: 1rem; }
summary { display: flex; gap: 1rem; justify-content: space-between; align-items: center; padding: .65rem 0;
  cursor: pointer; font-weight: 600; }
summary::before { content: "\\25B8"; color: var(--soft); }
[open] > summary::before { content: "\\25BE"; }
summary span:first-child { flex: 1; overflow-wrap: anywhere; }
.badge { flex: none; padding: .1rem .6rem; border: 1px solid currentColor; border-radius: 99px; font-size: .8rem; }
.good { color: var(--good); } .some { color: var(--some); } .bad { color: var(--bad); } .none { color: var(--soft); }
pre { margin: 0; padding: .7rem .8rem; background: var(--page); border-radius: 6px; max-height: 28rem;
  overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
@media print { pre { max-height: none; } }
"""
