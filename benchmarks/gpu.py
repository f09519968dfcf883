"""Tests and speeds on a GPU, in stages; nothing is downloaded.

    python benchmarks/gpu.py tests|speed [--stages NAME,...] [--out FILE] [--minutes 9]
    python benchmarks/gpu.py tests|speed --device cpu --tiny     # the same code without a GPU, in a minute or two

Each stage is a process of its own; its results are printed as they come, one line of JSON each, and appended to
--out. A stage that is still running when the minutes are over is ended, and what it has reported stays. Ends with one
line of JSON: the machine, every result by stage and name (null where it was not run, false where a check failed or a
stage broke off), and what failed. The exit code is 1 where a check failed or a stage broke off.

benchmarks/gpu/README.md lists the packages to bring to a machine without network.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = {
    "tests": ("server_checks", "training_step", "resume"),
    "speed": ("serving", "training", "prefixes", "pushes", "overlap"),
}
SCRIPTS = {"training_step": "training", "prefixes": "training", "resume": "learning", "overlap": "learning"}
SCRIPTS |= {"pushes": "serving"}
NEED_TRAINER = ("server_checks", "training_step", "training", "prefixes", "resume", "overlap")
_LEAST_S = 15.0
"""A stage for which less is left is not begun."""

Tell = Callable[[dict[str, Any]], None]


def run_stage(stage: str, options: argparse.Namespace, deadline: float, tell: Tell) -> None:
    """Run a stage in a process of its own until it ends or the deadline, and pass its results on."""
    left = deadline - time.monotonic()
    if stage in NEED_TRAINER and importlib.util.find_spec("datasets") is None:
        tell({"stage": stage, "name": stage, "value": None, "why": "datasets is not installed, and TRL needs it"})
        return
    if left < _LEAST_S:
        tell({"stage": stage, "name": stage, "value": None, "why": "no time was left"})
        return
    script = Path(__file__).with_name("gpu") / f"{SCRIPTS.get(stage, stage)}.py"
    # both are made and removed here, as a stage that is killed removes nothing
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir=_memory_directory()) as memory:
        given = {"stage": stage, "device": options.device, "tiny": options.tiny, "scratch": scratch, "memory": memory}
        command = [sys.executable, str(script), json.dumps(given)]
        errors = Path(scratch, "errors")
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        with errors.open("w") as log, subprocess.Popen(command, stderr=log, **streams) as process:
            time_is_over = threading.Event()

            def end_in_time() -> None:
                time_is_over.set()
                end_group(process)

            timer = threading.Timer(left, end_in_time)
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith('{"stage"'):
                        tell(json.loads(line))
                # the stage has closed its output, so it ends by itself
                code = process.wait()
            finally:
                timer.cancel()
                end_group(process)
        if code:
            ended = f"ended by signal {-code}: " if code < 0 else ""
            said = "the time was over" if time_is_over.is_set() else ended + errors.read_text()[-2000:]
            tell({"stage": stage, "name": stage, "value": False, "check": True, "why": said})


def _memory_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def end_group(process: subprocess.Popen[str]) -> None:
    """End a stage's processes; its own exit code stays where it has ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name(0) if options.device == "cuda" else None
    return {"gpu": gpu, "cpu": platform.processor() or platform.machine(), "torch": torch.__version__}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=tuple(STAGES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models and few rounds: shows that the code runs")
    parser.add_argument("--stages", help="names of stages, with commas between them (default: all)")
    parser.add_argument("--out", type=Path, help="file to append the results to")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of the whole command")
    options = parser.parse_args()
    known = STAGES[options.suite]
    options.stages = options.stages.split(",") if options.stages else list(known)
    if unknown := set(options.stages) - set(known):
        parser.error(f"no stage {', '.join(sorted(unknown))}; choose of {', '.join(known)}")
    return options


def main() -> int:
    options = parse()
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("gpu.py: torch sees no CUDA device; use --device cpu --tiny to try the code", file=sys.stderr)
            return 2
    deadline = time.monotonic() + 60 * options.minutes
    results: dict[str, dict[str, Any]] = {}
    failed = []

    def tell(result: dict[str, Any]) -> None:
        results.setdefault(result["stage"], {})[result["name"]] = result["value"]
        if result.get("check") and not result["value"]:
            failed.append(f"{result['stage']}: {result['name']}")
        print(json.dumps(result), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")

    for stage in options.stages:
        run_stage(stage, options, deadline, tell)
    print(json.dumps({"machine": machine(options), "tiny": options.tiny, "results": results, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
