"""The live line: what a person wants to know, and not too often."""

from __future__ import annotations

import asyncio
import io
import re
import time

import pytest

from verifiers.cli.evaluation import output
from verifiers.cli.evaluation.output import live_line, progress_text
from verifiers.evals.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_counts_todays_speed_only_from_todays_rollouts() -> None:
    progress = Progress()
    for generation, reward in enumerate((1.0, 0.0, None)):
        outcome = "timed_out" if reward is None else "completed"
        progress.add_row(
            {"example_id": 0, "generation": generation, "outcome": outcome, "reward": reward, "attempts": 2}
        )
    known = {"planned": 12, "finished_before": 1, "ran": 2, "tokens": 500, "elapsed_s": 4.0, "in_flight": 7}
    text = progress_text(progress, env="sums", **known)  # type: ignore[arg-type]
    assert text.split("  ") == [
        "sums",
        "3/12 rollouts",
        "reward 0.500",
        "0:18 left",
        "1 failed",
        "3 retries",
        "7 in flight",
        "125 tokens/s",
    ]
    with_bar = progress_text(progress, env="sums", **known, with_bar=True)  # type: ignore[arg-type]
    assert with_bar == "━━━╌╌╌╌╌╌╌╌╌  " + text


def test_nothing_is_made_up_before_the_first_rollout() -> None:
    text = progress_text(
        Progress(), env="sums", planned=5, finished_before=0, ran=0, tokens=0, elapsed_s=0.0, in_flight=0
    )
    assert text.split("  ")[2] == "reward -"
    assert "  ? left  " in text


async def test_a_terminal_is_written_to_at_most_four_times_a_second() -> None:
    shown = 0

    def text(on_terminal: bool) -> str:
        nonlocal shown
        shown += 1
        assert on_terminal
        return f"line {shown}"

    stream = Terminal()
    began = time.monotonic()
    async with asyncio.timeout(60), live_line(text, stream):
        while shown < 4:  # noqa: ASYNC110 - a line tells nobody
            await asyncio.sleep(0.01)
    # the first is there at once
    assert time.monotonic() - began > 0.74
    assert "line 2" in stream.getvalue()


async def test_elsewhere_plain_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_PLAIN_EVERY_S", 0.05)
    stream = io.StringIO()
    began = time.monotonic()
    async with asyncio.timeout(60), live_line(lambda on_terminal: f"5 of 9 {on_terminal}", stream):
        while stream.getvalue().count("\n") < 3:  # noqa: ASYNC110 - nor does this one
            await asyncio.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert time.monotonic() - began > 0.045 * len(lines)
    assert all(re.fullmatch(r"\[0:\d\d\] 5 of 9 False", line) for line in lines)
