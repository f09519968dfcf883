"""Starting ranks by hand, as a launcher would: what the tests of several ranks share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


def start_ranks(
    command: Sequence[str], ranks: int, logs: Path, environment: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """Start a command once a rank, without a launcher that would end the others; rank R writes to LOGS/rank-R.log."""
    logs.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with open(logs / f"rank-{rank}.log", "wb") as log:
            started.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {}), **{key: str(value) for key, value in own.items()}},
                )
            )
    return started


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> list[int]:
    """Their exit codes; what still runs at the end is killed, and has -9."""
    try:
        return [rank.wait(timeout=timeout_s) for rank in ranks]
    except subprocess.TimeoutExpired:
        return [rank.poll() or -9 for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def printed(logs: Path, ranks: int) -> str:
    """Return what the ranks said, one after another."""
    return "\n".join((logs / f"rank-{rank}.log").read_text(errors="replace") for rank in range(ranks))


PYTHON = sys.executable
