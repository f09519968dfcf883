"""Ranks under torchrun, and what accelerate's launcher tells them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

EXAMPLES = Path(__file__).parents[2] / "examples" / "accelerate"
OURS = ("ACCELERATE_", "FSDP_")


def launcher_environment(name: str) -> dict[str, str]:
    """Return the environment that `accelerate launch --config_file examples/accelerate/NAME.yaml` sets."""
    given = ["--config_file", str(EXAMPLES / f"{name}.yaml"), "--main_process_port", "0", "script.py"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        environment = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        environment = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in environment.items() if key.startswith(OURS)}


def torchrun(arguments: Sequence[str], *, timeout_s: float, python: str = sys.executable) -> str:
    """Run a script or a module on two ranks, and return what they printed."""
    anywhere = ["--nproc_per_node", "2", "--master_port", "0"]
    anywhere += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    done = subprocess.run(
        [python, "-m", "torch.distributed.run", *anywhere, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout
