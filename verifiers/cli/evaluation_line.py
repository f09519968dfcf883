"""The live line of an evaluation: at most 4 times a second on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from verifiers.evals.tally import Tally

__all__ = ["live_line", "progress_text"]

_TERMINAL_EVERY_S = 0.25
_PLAIN_EVERY_S = 5.0


def progress_text(
    tally: Tally, *, planned: int, finished_before: int, ran: int, tokens: int, elapsed_s: float, in_flight: int
) -> str:
    """One line for a person: how far it is, the mean reward, failures, retries, tokens a second, time left.

    Args:
        planned: rollouts of the whole evaluation.
        finished_before: rollouts that an earlier process finished; they say nothing about today's speed.
        ran, tokens, elapsed_s: rollouts, completion tokens and seconds of this process.
    """
    mean = f"{tally.mean_reward:.4f}" if tally.scored else "-"
    done = finished_before + ran
    rate = tokens / elapsed_s if elapsed_s > 0 else 0.0
    eta = _duration((planned - done) * elapsed_s / ran) if ran else "?"
    parts = [
        f"{done}/{planned} rollouts",
        f"reward {mean}",
        f"{tally.failed} failed",
        f"{tally.retries} retries",
        f"{in_flight} in flight",
        f"{rate:,.0f} tokens/s",
        f"{eta} left",
    ]
    return "  ".join(parts)


@contextlib.asynccontextmanager
async def live_line(text: Callable[[], str], stream: TextIO | None = None) -> AsyncIterator[None]:
    """Show `text()` on standard error while the block runs; on a terminal it is gone afterwards."""
    stream = stream or sys.stderr
    show = _on_terminal if stream.isatty() else _in_lines
    task = asyncio.create_task(show(text, stream))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _on_terminal(text: Callable[[], str], stream: TextIO) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    with Live(Text(text(), no_wrap=True), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(_TERMINAL_EVERY_S)
            live.update(Text(text(), no_wrap=True, overflow="ellipsis"), refresh=True)


async def _in_lines(text: Callable[[], str], stream: TextIO) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(_PLAIN_EVERY_S)
        print(f"[{_duration(time.monotonic() - began)}] {text()}", file=stream, flush=True)


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
