"""`vf-train` as several processes, by the command of the documentation."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import sharded_world
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PAGE = Path(__file__).parents[2] / "docs" / "training.md"

ENVIRONMENT = """
import verifiers as vf


def letters(completion, **kwargs):
    return float(sum(message["content"].count("e") for message in completion)) + 0.01 * len(str(completion))


def load_environment():
    rows = [{"question": f"abc {number}", "answer": "e"} for number in range(8)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[letters]))
"""

RUN_FILE = """
[environment]
id = "letters_env"

[model]
path = "{model}"

[server]
launch = "embedded"
args = ["--threads", "1"]

[trainer]
output_dir = "{output}"
max_steps = 2
num_generations = 4
per_device_train_batch_size = 2
gradient_accumulation_steps = 2
max_completion_length = 8
"""


def test_the_documented_command_trains_on_two_processes_and_speaks_once(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "letters_env.py").write_text(ENVIRONMENT)
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(model=model_dir, output=tmp_path / "out"))
    documented = re.search(
        r"^    OMP_NUM_THREADS=1 torchrun (--nproc_per_node 2 -m verifiers.cli.train) run.toml$",
        PAGE.read_text(),
        re.M,
    )
    assert documented is not None
    done = subprocess.run(
        [*sharded_world.torchrun(2), *documented[1].split(), str(run_file)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("batch plan", "saved to", "step 2/2"):
        assert done.stdout.count(line) == 1, done.stdout
    assert "devices           2" in done.stdout
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", "zero3"])
def test_the_example_files_are_what_accelerate_launch_takes(name: str) -> None:
    told = sharded_world.launcher_environment(name)
    assert told.get("ACCELERATE_USE_FSDP", "false") == str(name == "fsdp").lower()
    assert told.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == {"zero2": "2", "zero3": "3"}.get(name)
