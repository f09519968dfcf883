"""Every benchmark begins: what it imports is still there under that name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_tells_its_options(script: Path) -> None:
    told = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr
    assert "usage:" in told.stdout
