"""A real language model of 135 M parameters, by the commands: a push, an evaluation, kill -9 and an exact resume."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

RUN = """
environment.id = "structured-output"
environment.args = {{ level = 1, num_train = 64, num_eval = 4 }}
model.path = "{model}"
lora.r = 8

[trainer]
output_dir = "{directory}"
max_steps = 3
learning_rate = 1e-4
per_device_train_batch_size = 4
num_generations = 4
max_completion_length = 24
logging_steps = 1
save_steps = 1
save_total_limit = 2
eval_strategy = "steps"
eval_steps = 3
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def started(directory: Path, model: Path) -> subprocess.Popen[bytes]:
    """Start `vf-train` in a directory of its own, which keeps its output."""
    directory.mkdir(exist_ok=True)
    (directory / "run.toml").write_text(RUN.format(model=model, directory=directory / "run"))
    command = [str(Path(sys.executable).with_name("vf-train")), str(directory / "run.toml")]
    with open(directory / "log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def lines(directory: Path) -> list[dict[str, Any]]:
    path = directory / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(directory: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm by optimizer step."""
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines(directory) if "loss" in line}


def test_a_run_killed_between_steps_resumes_to_the_same_losses(smollm2: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert started(whole, smollm2).wait() == 0, (whole / "log").read_text()
    assert set(losses(whole)) == {1, 2, 3}

    run = started(killed, smollm2)
    while not (killed / "run" / "checkpoint-1" / "verifiers_state.json").exists() or len(losses(killed)) < 2:
        assert run.poll() is None, (killed / "log").read_text()
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert started(killed, smollm2).wait() == 0, (killed / "log").read_text()
    # two whole runs beside other work differ in the fifth digit, too, already in their first step
    for step, values in losses(whole).items():
        assert losses(killed)[step] == pytest.approx(values, rel=1e-3, abs=1e-5)

    # pushes were checked by log-probs, and the end was evaluated
    checked = [line["sampling/probe_difference"] for line in lines(whole) if "sampling/probe_difference" in line]
    assert checked
    assert max(checked) < 1e-3
    [evaluation] = (whole / "run" / "evals").glob("step-3/results.jsonl")
    assert len(evaluation.read_text().splitlines()) == 4
