"""A scored training rollout holds its rows, and each token once, however many turns it had."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "turns.py"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("turns", "most_mb"), [(20, 1.0), (100, 4.0)])
def test_memory_grows_with_the_tokens_and_not_with_their_square(turns: int, most_mb: float) -> None:
    command = [sys.executable, str(BENCHMARK), "--turns", str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["held_mb"] < most_mb
    # eight rollouts, in the process's resident memory
    assert figures["added_mb"] < 40.0
