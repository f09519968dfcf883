"""Output of `vf-eval`: its tables, and a live line, drawn at most 4 times a second, or printed now and then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from verifiers.cli.main import shown
from verifiers.monitoring.number_text import bar, format_seconds, rounded
from verifiers.testing.fake_model import FAKE_URL

if TYPE_CHECKING:
    from rich.console import Console

    from verifiers.evals.evaluation_run import EvaluationRun

_TERMINAL_EVERY_S = 0.25
_PLAIN_EVERY_S = 5.0
_BAR_CHARACTERS = 12


def progress_text(
    run: EvaluationRun,
    elapsed_s: float,
    *,
    in_flight: int,
    grading: int,
    quiet_s: float = 0.0,
    with_bar: bool = False,
) -> str:
    """Return the progress line: rollouts done, mean reward, time left, failures, retries, tokens a second.

    Where no rollout ended in the last `quiet_s` seconds, a quarter of all, they say nothing about when the rest will.
    """
    results, done = run.results, run.finished_before + run.ran
    mean = f"{results.mean_reward:.3f}" if results.scored else "-"
    rate = run.tokens / elapsed_s if elapsed_s > 0 else 0.0
    # what an earlier process finished says nothing about today's speed
    left = f"{format_seconds((run.planned - done) * elapsed_s / run.ran)} left" if run.ran else "? left"
    is_quiet = quiet_s >= max(_PLAIN_EVERY_S, elapsed_s / 4)
    parts = [
        *([bar(done / run.planned, _BAR_CHARACTERS)] if with_bar else []),
        run.metadata["env"],
        f"{done}/{run.planned} rollouts",
        f"reward {mean}",
        f"none ended for {format_seconds(quiet_s)}" if is_quiet else left,
        f"{len(results) - results.scored} failed",
        f"{results.retries} retries",
        f"{in_flight} in flight",
        *([f"grading {grading}"] if grading else []),
        f"{rate:,.0f} tokens/s{' since resuming' if run.finished_before else ''}",
    ]
    sampling = run.metadata["sampling_args"]
    is_bounded = any(sampling.get(name) for name in ("max_tokens", "max_completion_tokens"))
    if is_quiet and in_flight and not is_bounded:
        parts.append("without -t an answer may be as long as the server allows")
    return "  ".join(parts)


@contextlib.asynccontextmanager
async def live_line(text: Callable[[bool], str], stream: TextIO | None = None) -> AsyncIterator[None]:
    """Show `text(on_terminal)` on standard error while the block runs; on a terminal it is gone afterwards."""
    stream = stream or sys.stderr
    show = _on_terminal if stream.isatty() else _in_lines
    task = asyncio.create_task(show(text, stream))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _on_terminal(text: Callable[[bool], str], stream: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    with Live(Text(text(True), no_wrap=True), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(_TERMINAL_EVERY_S)
            live.update(Text(text(True), no_wrap=True, overflow="ellipsis"), refresh=True)


async def _in_lines(text: Callable[[bool], str], stream: TextIO) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(_PLAIN_EVERY_S)
        print(f"[{format_seconds(time.monotonic() - began)}] {text(False)}", file=stream, flush=True)


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under columns; the first column names the row, the others hold numbers."""
    from rich.markup import escape
    from rich.table import Table

    if not console.is_terminal:
        if title:
            console.print(title, markup=False, soft_wrap=True)
        for row in rows:
            cells = ", ".join(f"{column} {cell}" for column, cell in zip(columns[1:], row[1:], strict=True))
            console.print(f"{row[0]}: {cells}", markup=False, soft_wrap=True)
        return
    table = Table(title=escape(title) or None, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def show_summary(run: EvaluationRun, summary: Mapping[str, Any], *, title: str, as_json: bool) -> None:
    """Print the summary of a run: tables and lines, or one line for machines."""
    if as_json:
        print(json.dumps({**summary, "results": str(run.directory)}))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    if run.metadata["base_url"] == FAKE_URL:
        console.print("built-in fake endpoint, no model: these numbers say nothing about any policy")
    columns = ("", "mean", "± stderr", "95 % interval", "scored")
    print_table(console, columns, [_row(name, e, summary["rollouts"]) for name, e in _estimates(summary)], title)
    for line in _lines(run, summary):
        console.print(shown(line))


def _estimates(summary: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from summary["rewards"].items()
    yield from ((f"reward of {task}", of_task["reward"]) for task, of_task in summary["tasks"].items())
    for name, kind in (("pass@", "pass_at_k"), ("pass^", "pass_hat_k"), ("best@", "best_at_k")):
        # one rollout of a prompt is the mean; and where rewards are 0 and 1 the best of k is what passes
        if name != "best@" or not _all_near(summary["best_at_k"], summary["pass_at_k"]):
            yield from ((f"{name}{k}", estimate) for k, estimate in summary[kind].items() if int(k) > 1)


def _all_near(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(math.isclose(one[k]["mean"], other[k]["mean"], abs_tol=1e-9) for k in one)


def _row(name: str, estimate: Mapping[str, Any], rollouts: int) -> tuple[str, ...]:
    mean, stderr, low, high = (
        rounded(estimate[key], estimate["stderr"]) for key in ("mean", "stderr", "low", "high")
    )
    scored = estimate["rollouts"]
    without = estimate.get("without", rollouts - scored)
    interval = "-" if low == "-" else f"{low} .. {high}"
    return name, mean, stderr, interval, f"{scored} of {scored + without}"


def _lines(run: EvaluationRun, summary: Mapping[str, Any]) -> Iterator[str]:
    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items())
    missing = f"; {summary['missing']} missing" if summary["missing"] else ""
    cost = "" if summary["cost"] is None else f"; {summary['cost']:.4f} {summary['currency']}"
    tokens = f"{summary['completion_tokens']:,} completion tokens{cost}"
    if summary["without_usage"]:
        tokens = f"tokens and cost are not known, as {summary['without_usage']} rollouts came without usage"
    yield (
        f"{summary['rollouts']} rollouts of {summary['prompts']} prompts in {summary['seconds']:.1f} s: {outcomes}"
        f"{missing}; {summary['retries']} retries; {tokens}"
    )
    for what, number, first in (
        ("tool calls failed", "tool_call_errors", "first_tool_call_error"),
        ("rollouts ended with a refusal or a filtered answer", "refusals", "first_refusal"),
    ):
        if summary[number]:
            yield f"{summary[number]} {what}, the first: {' '.join(summary[first].split()):.160}"
    if trained_on := summary.get("prompts_trained_on"):
        asked = run.metadata["num_examples"]
        yield f"{trained_on} of {asked} prompts are training rows too: this is not a held-out reward"
    elif trained_on is None:
        yield "whether prompts are training rows too was not checked: those are too many, or are made when first used"
    variance = summary["variance"]
    if variance["share_between"] is not None and variance["advice"]:
        yield (
            f"{100 * variance['share_between']:.0f} % of the reward's variance is between prompts: "
            f"{variance['advice']} narrow the interval most"
        )
    if run.lag_distorts and run.metadata["base_url"] != FAKE_URL:
        yield (
            f"the event loop was late by {summary['loop_lag_ms']['p95']:g} ms in 1 of 20 cases: timings show this "
            "machine rather than the server; try a smaller -c"
        )
    yield f"{run.directory}/results.jsonl"
    yield f"{run.directory}/report.html"
