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
def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--turns", "100"], capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["held_mb"] < 4.0
    # eight rollouts, in the process's resident memory
    assert figures["added_mb"] < 40.0
