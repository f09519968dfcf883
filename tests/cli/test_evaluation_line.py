"""The live line: what a person wants to know, and not too often."""

from __future__ import annotations

import asyncio
import io
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.cli import evaluation_output
from verifiers.cli.evaluation_output import live_line, progress_text
from verifiers.evals.evaluation_run import EvaluationRun, new_run
from verifiers.evals.results import RolloutResults


def run(sampling: dict[str, Any] | None = None, **known: Any) -> EvaluationRun:
    plan = {"env": "sums", "num_examples": 4, "rollouts_per_example": 3, "sampling_args": sampling or {}}
    return replace(new_run(Path("nowhere"), plan, vf.SingleTurnEnv(eval_dataset=[{"question": "q"}])), **known)


def test_the_line_counts_todays_speed_only_from_todays_rollouts() -> None:
    rows = [
        {"example_id": 0, "generation": g, "outcome": "completed", "reward": r, "attempts": 2}
        for g, r in enumerate((1.0, 0.0, None))
    ]
    some = run(results=RolloutResults(rows), done={0: {0}}, ran=2, tokens=500)
    text = progress_text(some, 4.0, in_flight=7, grading=2)
    assert text.split("  ") == [
        "sums",
        "3/12 rollouts",
        "reward 0.500",
        "0:18 left",
        "1 failed",
        "3 retries",
        "7 in flight",
        "grading 2",
        "125 tokens/s since resuming",
    ]
    assert progress_text(some, 4.0, in_flight=7, grading=2, with_bar=True) == "━━━╌╌╌╌╌╌╌╌╌  " + text


def test_nothing_is_made_up_before_the_first_rollout() -> None:
    text = progress_text(run(), 0.0, in_flight=0, grading=0)
    assert "grading" not in text
    assert text.split("  ")[2] == "reward -"
    assert "  ? left  " in text


@pytest.mark.parametrize("ran", [0, 9])
def test_answers_without_a_bound_are_named_while_none_comes(ran: int) -> None:
    said = "none ended for 0:06  0 failed  0 retries  3 in flight  0 tokens/s  without -t an answer may be as long"
    assert said in progress_text(run(ran=ran), 20.0, in_flight=3, grading=0, quiet_s=6.0)
    bounded = run({"max_tokens": 64}, ran=ran)
    assert "without -t" not in progress_text(bounded, 20.0, in_flight=3, grading=0, quiet_s=6.0)
    # while workers start
    assert "without -t" not in progress_text(run(ran=ran), 20.0, in_flight=0, grading=0, quiet_s=6.0)
    for elapsed_s, quiet_s in ((1.0, 1.0), (60.0, 6.0)):
        assert " left  " in progress_text(run(ran=ran), elapsed_s, in_flight=3, grading=0, quiet_s=quiet_s)


async def test_elsewhere_plain_lines_come_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_output, "_PLAIN_EVERY_S", 0.05)
    stream = io.StringIO()
    began = time.monotonic()
    async with asyncio.timeout(60), live_line(lambda on_terminal: f"5 of 9 {on_terminal}", stream):
        while stream.getvalue().count("\n") < 3:  # noqa: ASYNC110 - nor does this one
            await asyncio.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert time.monotonic() - began > 0.045 * len(lines)
    assert all(re.fullmatch(r"\[0:\d\d\] 5 of 9 False", line) for line in lines)
