"""The common parts of all sides: the task, the measurement, and the line that each prints. Standard library alone.

A side is a program `SIDE.py URL ROLLOUTS IN_FLIGHT` that evaluates a small task first, so that imports, caches and
compiled patterns are there, and then the whole one, and prints one line of JSON about the second.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

MODEL = "fake"
ANSWER = "The answer is 42."
WARM_UP = 64


def question(index: int) -> str:
    """Return the prompt of row `index`: no two are alike."""
    return f"Question {index}: what is 6 times 7? End with 'The answer is N.'"


def answer(index: int) -> str:
    """Return the right answer of row `index`; the server gives it for every second row."""
    return "42" if index % 2 == 0 else "41"


def cpu_s() -> float:
    """Return the CPU seconds of this process and of the children that it has waited for."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def peak_mb() -> float:
    """Return the most memory that this process has held, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


def measure(evaluate: Callable[[str, int, int, Path], float]) -> None:
    """Run a side and end the process.

    Args:
        evaluate: takes the server's base URL, the number of rollouts, how many in flight and a scratch directory;
            returns the mean reward.
    """
    url, rollouts, in_flight = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with tempfile.TemporaryDirectory(prefix="bench-evaluate-") as scratch:
        warm_up, measured = Path(scratch, "warm-up"), Path(scratch, "measured")
        warm_up.mkdir()
        measured.mkdir()
        # what a side has to say goes to standard error: the last line of standard output is ours
        with contextlib.redirect_stdout(sys.stderr):
            evaluate(url, WARM_UP, min(in_flight, WARM_UP), warm_up)
            started, cpu = time.perf_counter(), cpu_s()
            mean = evaluate(url, rollouts, in_flight, measured)
            seconds, used_s = time.perf_counter() - started, cpu_s() - cpu
        stored = sum(file.stat().st_size for file in measured.rglob("*") if file.is_file())
    if abs(mean - 0.5) > 0.01:
        raise SystemExit(f"the mean reward is {mean}, not 0.5: this side did not evaluate the task")
    found = {
        "rollouts": rollouts,
        "seconds": seconds,
        "cpu_s": used_s,
        "peak_mb": round(peak_mb(), 1),
        "stored_mb": round(stored / 1e6, 2),
    }
    print(json.dumps(found), flush=True)
    # threads that a side leaves behind may take seconds to end
    os._exit(0)
