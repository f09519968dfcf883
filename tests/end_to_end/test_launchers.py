"""`vf-train` on several processes, by the command of the documentation and by the rendered Slurm script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sharded_world
import tiny_world
from ports import free_port
from transformers import AutoModelForCausalLM

from verifiers.cli.launch import rendered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "accelerate" / "ddp.yaml"

SETTINGS: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}

SERVER = """
[server]
launch = "embedded"
args = ["--threads", "1"]
"""

CLUSTER = """
[cluster]
trainer_nodes = 2
server_nodes = 1
accelerate_config = "{config}"
server_port = {server_port}
main_process_port = {main_port}
ray_nodes = 1
ray_port = {ray_port}

[workers]
engine = "ray"
count = 2
cpus = 0.5
start_timeout = 200.0
"""

# each node is an address of this machine
SCONTROL = "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.1\\n127.0.0.2\\n127.0.0.1\\n'\n"

SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys

arguments, tasks = sys.argv[1:], 1
while arguments[0].startswith("--"):
    name, _, value = arguments.pop(0).partition("=")
    tasks = int(value) if name == "--ntasks" else tasks
started = [
    subprocess.Popen(arguments, env={{**os.environ, "SLURM_PROCID": str(number)}}) for number in range(tasks)
]
signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in started])
codes = [process.wait() for process in started]
with open(os.environ["SRUN_LOG"], "a") as log:
    print(arguments[0], codes, file=log)
sys.exit(max(map(abs, codes)))
"""


def processes_of(directory: Path) -> list[str]:
    """Return the processes whose environment names a directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(directory).encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@pytest.mark.ray
def test_the_script_trains_on_two_nodes_against_a_third_and_ends_all(model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    ports = {name: free_port() for name in ("server_port", "main_port", "ray_port")}
    settings = {**SETTINGS, "output_dir": str(tmp_path / "out")}
    settings |= {"weight_sync": "directory", "weight_sync_dir": str(tmp_path)}
    tables = SERVER + CLUSTER.format(config=CONFIG, **ports)
    run_file, script = tiny_world.write_run(tmp_path, model_dir, tables, **settings), tmp_path / "run.sbatch"
    script.write_text(rendered(str(run_file), "slurm"))
    installed = Path(sys.executable).parent
    # the tests' own cluster has settings of its own, which are not this script's
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        ["bash", str(script)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={
            **inherited,
            "PATH": f"{programs}:{installed}:{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "node[1-3]",
            "SRUN_LOG": str(tmp_path / "srun.log"),
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("batch plan", f"saved to {tmp_path}", "step 2/2"):
        assert done.stdout.count(line) == 1, done.stdout
    assert "devices           2" in done.stdout
    # every step has ended when the script has: the trainers by themselves, then the server at SIGTERM
    trainers, *others = (tmp_path / "srun.log").read_text().splitlines()
    assert trainers == "bash [0, 0]"
    assert sorted(line.partition(" ")[0] for line in others) == ["ray", "vf-serve"]
    limit = time.monotonic() + 120
    while (left := processes_of(tmp_path)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert left == []
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_documented_command_trains_on_two_processes_and_speaks_once(model_dir: Path, tmp_path: Path) -> None:
    run_file = tiny_world.write_run(tmp_path, model_dir, SERVER, output_dir=str(tmp_path / "out"), **SETTINGS)
    documented = re.search(
        r"^    OMP_NUM_THREADS=1 torchrun (--nproc_per_node 2 -m verifiers.cli.train) run.toml$",
        (ROOT / "docs" / "training.md").read_text(),
        re.M,
    )
    assert documented is not None
    printed = sharded_world.torchrun([*documented[1].split(), str(run_file)], timeout_s=110)
    for line in ("batch plan", "saved to", "step 2/2"):
        assert printed.count(line) == 1, printed
    assert "devices           2" in printed
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero2", "zero3"])
def test_the_example_files_are_what_accelerate_launch_takes(name: str) -> None:
    told = sharded_world.launcher_environment(name)
    assert told.get("ACCELERATE_USE_FSDP", "false") == str(name == "fsdp").lower()
    assert told.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == {"zero2": "2", "zero3": "3"}.get(name)
