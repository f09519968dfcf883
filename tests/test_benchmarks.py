"""Every benchmark begins: what it imports is still there under that name."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

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


def run_stage(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, seconds: float) -> list[dict[str, Any]]:
    """Run this text as a stage of the GPU suite; return what is reported."""
    spec = importlib.util.spec_from_file_location("gpu_suite", BENCHMARKS[0].with_name("gpu.py"))
    assert spec is not None
    assert spec.loader is not None
    suite = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(suite)
    script = tmp_path / "stage.py"
    script.write_text("import json, os, sys, time\ngiven = json.loads(sys.argv[1])\n" + text)
    monkeypatch.setitem(suite.SCRIPTS, "pushes", str(script.with_suffix("")))
    monkeypatch.setattr(suite, "_LEAST_S", 0.0)
    told: list[dict[str, Any]] = []
    options = argparse.Namespace(device="cpu", tiny=True)
    suite.run_stage("pushes", options, time.monotonic() + seconds, told.append)
    return told


@pytest.mark.slow
def test_a_stage_killed_at_its_deadline_leaves_no_file_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    code = f"""
path = os.path.join(given["memory"], "model.safetensors")
open(path, "w").write("weights")
open({str(made)!r}, "w").write(path)
time.sleep(600)
"""
    [told] = run_stage(code, tmp_path, monkeypatch, seconds=5)
    assert told["why"] == "the time was over"
    assert not Path(made.read_text()).parent.exists()
