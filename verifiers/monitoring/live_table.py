"""The live table of a run on a terminal: refreshed in place, under whatever is printed meanwhile."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from verifiers.evals.store import finite
from verifiers.monitoring.findings import Finding
from verifiers.monitoring.history import EVAL_REWARD, eval_set_label, is_trained_on
from verifiers.monitoring.number_text import bar, sparkline
from verifiers.monitoring.stage_timer import STAGES, RunTime

_LEAST_S = 0.1
_EVAL_SETS_SHOWN = 2
_NAME_CHARACTERS = 18
_BAR_CHARACTERS = 16
_NAMES = {"old_logprobs": "old log-probs", "eval": "evaluation", "save": "checkpoints", "wait": "waiting"}


class LiveTable:
    """A table of `content()`, drawn twice a second by another thread until it is stopped; the last one stays.

    What is printed, warned of or logged meanwhile appears above it.
    """

    def __init__(self, content: Callable[[], RenderableType], stream: TextIO) -> None:
        self._content = content
        self._console = Console(file=stream, highlight=False)
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._last: RenderableType = Text("")
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=2,
            # what goes to a file is to stay there
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )

    def start(self) -> None:
        before = (sys.stdout, sys.stderr)
        self._live.start()
        # handlers keep the stream that they were made with, and would write across the table
        for handler in _stream_handlers():
            for old, new in zip(before, (sys.stdout, sys.stderr), strict=True):
                if handler.stream is old and old is not new:
                    handler.setStream(new)
                    self._handlers.append((handler, old))

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Draw once more, and leave the terminal as it was. May be called twice."""
        handlers, self._handlers = self._handlers, []
        for handler, stream in handlers:
            handler.setStream(stream)
        self._live.stop()

    def _draw(self) -> RenderableType:
        try:
            self._last = self._content()
        except Exception as error:
            # a number that cannot be shown does not end the run
            self._last = Text(f"the table cannot be drawn: {type(error).__name__}: {error}")
        return self._last


def run_table(
    *,
    title: str,
    now: str,
    latest: Mapping[str, Any],
    total: RunTime,
    bottleneck: Finding | None,
    learning: Finding | None = None,
    done: float = 0.0,
    reward: Sequence[float] = (),
) -> RenderableType:
    lines: list[RenderableType] = [Text(title, style="bold"), Text(now, style="cyan"), _progress(done, reward)]
    if total.wall > 0:
        # the newest log first: where there is no room beside it, a terminal of few lines cuts off what is below
        lines.append(Columns([_newest_log(latest), _time_table(total)], padding=(0, 2)))
    for finding, style in ((learning, "bold red"), (bottleneck, "yellow")):
        if finding is not None:
            lines += [Text(str(finding), style=style), Text(f"try: {finding.advice}", style="dim")]
    return Group(*lines)


def _progress(done: float, reward: Sequence[float]) -> Text:
    """Return the bar of the run, and the reward's course behind it."""
    text = Text.assemble((bar(done, _BAR_CHARACTERS), "green"), f" {100 * done:.0f} %")
    if reward:
        text.append(f"   reward {reward[0]:.3f} first, {reward[-1]:.3f} now  {sparkline(reward, 24)}")
    return text


def _time_table(total: RunTime) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("whole run", "a step", "share", "peak"):
        table.add_column(name, justify="left" if name == "whole run" else "right", no_wrap=True)
    steps = max(1.0, total.steps)
    for stage in STAGES:
        if total.share(stage) < 0.0005:
            continue
        peak = total.peak_gib.get(stage)
        table.add_row(
            _NAMES.get(stage, stage),
            _seconds(total.stages[stage] / steps),
            f"{100 * total.share(stage):.0f} %",
            f"{peak:.1f} G" if peak else "",
        )
    table.add_row("step", _seconds(total.wall / steps), "", "", style="bold")
    return table


def _newest_log(latest: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("newest log", style="dim", no_wrap=True)
    table.add_column("", no_wrap=True)
    rows = [
        ("reward", _joined(latest, "{:.3f}", "reward")),
        *_eval_rewards(latest),
        ("a step", _times(latest, "time/step_s")),
        ("overlap ratio", _joined(latest, "{:.2f}", "overlap_ratio")),
        ("server busy", _joined(latest, "{:.0%}", "rollouts/server_busy").replace("%", " %")),
        ("in flight, queued", _joined(latest, "{:.0f}", "rollouts/in_flight", "rollouts/queued")),
        ("latency p50/95/max", _times(latest, "time/rollout_p50_s", "time/rollout_p95_s", "time/rollout_max_s")),
        ("block, its scoring", _times(latest, "time/block_generation_s", "time/scoring_mean_s")),
        ("tokens/s, trained", _joined(latest, "{:,.0f}", "tokens/sampled_per_s", "tokens/trained_per_s")),
        ("staleness", _joined(latest, "{:.1f}", "staleness")),
        ("mismatch KL", _joined(latest, "{:.2g}", "mismatch_kl")),
        ("failed a block", _joined(latest, "{:.1f}", "rollouts/failed")),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _eval_rewards(latest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rewards of evaluations: the trainer's own set, or the first of those that have names."""
    names = [name for name in latest if EVAL_REWARD.fullmatch(name) and finite(latest.get(name)) is not None]
    rows = []
    for name in names[:_EVAL_SETS_SHOWN]:
        reward, error = finite(latest.get(name)), finite(latest.get(f"{name}_stderr"))
        shown = f"{reward:.3f}" + (f" ± {error:.3f}" if error is not None else "")
        label = eval_set_label(name, trained_on=is_trained_on(name, latest))
        rows.append((label if len(label) <= _NAME_CHARACTERS else label[: _NAME_CHARACTERS - 1] + "…", shown))
    if more := len(names) - len(rows):
        rows.append(("", f"and {more} more"))
    return rows


def _joined(latest: Mapping[str, Any], form: str, *names: str) -> str:
    values = [finite(latest.get(name)) for name in names]
    return " / ".join("–" if value is None else form.format(value) for value in values)


def _times(latest: Mapping[str, Any], *names: str) -> str:
    """Return times side by side, with one unit where it suits all of them."""
    values = [finite(latest.get(name)) for name in names]
    known = [value for value in values if value is not None]
    if not known:
        return " / ".join("–" for _ in names)
    if min(known) < _LEAST_S:
        return " / ".join(_seconds(value) or "–" for value in values)
    return " / ".join("–" if value is None else _three_digits(value) for value in values) + " s"


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{_three_digits(value)} s" if value >= _LEAST_S else f"{_three_digits(1000 * value)} ms"


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for one in loggers:
        if isinstance(one, logging.Logger):
            yield from (handler for handler in one.handlers if isinstance(handler, logging.StreamHandler))
