"""The whole way once against vLLM: the demo's model is made, warmed up, trained, and better on eval words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# of the demo's 600: enough for a gain of about 0.13, whose interval excludes 0; a prime, so that the demo evaluates
# before and after alone
STEPS = 61


@pytest.mark.timeout(2400)
def test_the_demo_trains_against_vllm(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/demo/tiny.py"), "--server", "vllm", "--steps", str(STEPS)]
    ran = subprocess.run(
        [*command, "--output-dir", str(tmp_path)], capture_output=True, text=True, timeout=2380, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    print(summary)
    assert 0.3 <= summary["before"]["accuracy"] <= 0.45
    assert summary["gain"]["low"] > 0.0
    assert (tmp_path / "run" / "report.html").stat().st_size > 1000
