"""Every benchmark begins: what it imports is still there under that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


HELP = """
import gc, os, runpy, sys
import peft, torch, transformers
gc.freeze()
for script in sys.argv[1:]:
    if not os.fork():
        sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
    if os.wait()[1]:
        sys.exit(f"{script} fails")
"""


@pytest.mark.slow
def test_each_benchmark_tells_its_options() -> None:
    """In forks of a process that has imported what takes long."""
    told = subprocess.run([sys.executable, "-c", HELP, *BENCHMARKS], capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("usage:") == len(BENCHMARKS)
