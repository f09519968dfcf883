"""The live table of a run on a terminal: refreshed in place, under whatever is printed meanwhile."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from verifiers.train.watching.clock import STAGES
from verifiers.train.watching.figures import RunTime
from verifiers.train.watching.verdict import Verdict

__all__ = ["LiveTable", "can_draw", "run_table"]

_REFRESH_EVERY_S = 0.5
_NARROW = 76
_NAMES = {"old_logprobs": "old log-probs", "eval": "evaluation", "save": "checkpoints", "wait": "waiting"}


def can_draw(stream: TextIO) -> bool:
    """True for a terminal that a table can be refreshed on."""
    if not stream.isatty():
        return False
    return not Console(file=stream).is_dumb_terminal


class LiveTable:
    """Draws `content()` twice a second from a thread of its own, until it is stopped; the last table stays.

    What is printed, warned of or logged meanwhile appears above it.

    Args:
        content: makes what is drawn; called from another thread.
        stream: a terminal.
    """

    def __init__(self, content: Callable[[int], RenderableType], stream: TextIO) -> None:
        self._content = content
        self._console = Console(file=stream, highlight=False)
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._last: RenderableType = Text("")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="verifiers-table", daemon=True)
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            auto_refresh=False,
            # what goes to a file is to stay there
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
            vertical_overflow="crop",
        )

    def start(self) -> None:
        """Begin to draw."""
        before = (sys.stdout, sys.stderr)
        self._live.start()
        # handlers keep the stream that they were made with, and would write across the table
        for handler in _stream_handlers():
            for old, new in zip(before, (sys.stdout, sys.stderr), strict=True):
                if handler.stream is old and old is not new:
                    handler.setStream(new)
                    self._handlers.append((handler, old))
        self._thread.start()

    def print(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False, soft_wrap=True)

    def stop(self) -> None:
        """Draw once more, and leave the terminal as it was. May be called twice."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        handlers, self._handlers = self._handlers, []
        for handler, stream in handlers:
            handler.setStream(stream)
        self._live.stop()

    def _refresh(self) -> None:
        while not self._stopped.wait(_REFRESH_EVERY_S):
            self._live.refresh()

    def _draw(self) -> RenderableType:
        try:
            self._last = self._content(self._console.width)
        except Exception as error:
            # a figure that cannot be shown ends no run
            self._last = Text(f"the table cannot be drawn: {type(error).__name__}: {error}")
        return self._last


def run_table(
    width: int,
    *,
    title: str,
    now: str,
    latest: Mapping[str, Any],
    total: RunTime,
    verdict: Verdict | None,
) -> RenderableType:
    """The table.

    Args:
        width: of the terminal, in characters.
        title: step, elapsed time, time left.
        now: what the trainer does at the moment, and the generator.
        latest: the newest value of each metric.
        total: sums over the run.
    """
    lines: list[RenderableType] = [_line(title, "bold"), _line(now, "cyan")]
    if total.wall > 0:
        time, figures = _time_table(latest, total), _figures(latest)
        if width < _NARROW:
            lines += [figures, time]
        else:
            both = Table.grid(padding=(0, 4))
            both.add_row(time, figures)
            lines.append(both)
    if verdict is not None:
        lines.append(_line(str(verdict), "yellow"))
        lines.append(_line(f"try: {verdict.advice}", "dim"))
    return Group(*lines)


def _time_table(latest: Mapping[str, Any], total: RunTime) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("time", "a step", "share", "peak"):
        table.add_column(name, justify="left" if name == "time" else "right", no_wrap=True)
    for stage in STAGES:
        if total.share(stage) < 0.0005:
            continue
        seconds = _number(latest, f"time/{stage}_s")
        peak = total.peak_gib.get(stage)
        table.add_row(
            _NAMES.get(stage, stage),
            _seconds(seconds),
            f"{100 * total.share(stage):.0f} %",
            f"{peak:.1f} GiB" if peak else "",
        )
    step = _number(latest, "time/step_s")
    table.add_row("step", _seconds(step), "", "", style="bold")
    return table


def _figures(latest: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    rows = [
        ("reward", _joined(latest, "{:.3f}", "reward") + _held_out(latest)),
        ("overlap ratio", _joined(latest, "{:.2f}", "overlap_ratio")),
        ("server busy", _percent(latest, "rollouts/server_busy")),
        ("in flight, queued", _joined(latest, "{:.0f}", "rollouts/in_flight", "rollouts/queued")),
        ("rollout p50/p95/max", _times(latest, "time/rollout_p50_s", "time/rollout_p95_s", "time/rollout_max_s")),
        ("generation, scoring", _times(latest, "time/block_generation_s", "time/scoring_mean_s")),
        ("tokens/s", _joined(latest, "{:,.0f}", "tokens/sampled_per_s", "tokens/trained_per_s") + " trained"),
        ("staleness", _joined(latest, "{:.1f}", "staleness")),
        ("mismatch KL", _joined(latest, "{:.2g}", "mismatch_kl")),
        ("failed", _joined(latest, "{:.0f}", "rollouts/failed")),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _held_out(latest: Mapping[str, Any]) -> str:
    reward, error = _number(latest, "eval_reward"), _number(latest, "eval_reward_stderr")
    if reward is None:
        return ""
    return f", held out {reward:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _joined(latest: Mapping[str, Any], form: str, *names: str) -> str:
    values = [_number(latest, name) for name in names]
    return " / ".join("–" if value is None else form.format(value) for value in values)


def _times(latest: Mapping[str, Any], *names: str) -> str:
    return " / ".join(_seconds(_number(latest, name)) or "–" for name in names)


def _percent(latest: Mapping[str, Any], name: str) -> str:
    value = _number(latest, name)
    return "–" if value is None else f"{100 * value:.0f} %"


def _number(latest: Mapping[str, Any], name: str) -> float | None:
    value = latest.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f} s" if value >= 0.1 else f"{1000 * value:.1f} ms"


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for one in loggers:
        if isinstance(one, logging.Logger):
            yield from (handler for handler in one.handlers if isinstance(handler, logging.StreamHandler))
