"""Training to a given reward with TRL's own GRPOTrainer and with ours: wall clock, tokens per second, memory.

    python benchmarks/trl.py [--seeds 3] [--target 0.55] [--latency 1.0] [--places near far]

Both begin with the same model (the demo's, after its supervised warm start; one a seed), on the same task, with the
same sizes (16 prompts x 16 completions a step, one update each), learning rate and loss, and end when the mean reward
of the last ten steps reaches the target. A side is a process of its own with its children; one runs at a time.

- TRL generates with transformers in its own process, on both cores: `--threads` OpenMP threads. Its vLLM server mode
  cannot run here, since its weight transfer needs NCCL, so it needs a GPU on either side.
- Ours has a trainer and the embedded server on one OpenMP thread each; one batch ahead, and two where it is far.
- "near" is as it is; "far" adds a latency to everything that is generated, as a remote server has it: TRL's
  generation ends so much later, and our server answers each request so much later. Neither costs CPU.

Seconds are from the first step's begin to the step that reached the target: loading is left out. Memory is the
largest sum of the proportional set sizes of a side's processes, so pages that they share count once. Ends with one
line of JSON, ours over TRL's, medians over the seeds: wall_ratio (near), wall_ratio_remote (far), memory_ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SIDES = Path(__file__).with_name("trl_sides")
WINDOW = 10


@dataclass(frozen=True)
class Run:
    """The costs of a side: seconds and steps to the target, tokens per second, and its largest memory in bytes."""

    seconds: float
    steps: int
    tokens_per_s: float
    memory_bytes: int
    reached: bool


def proportional_bytes(root: int) -> int:
    """Return the sum of the proportional set sizes of a process and its descendants (bytes)."""
    total = 0
    try:
        process = psutil.Process(root)
        for one in [process, *process.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
            except psutil.Error:
                continue
    except psutil.Error:
        return 0
    return total


class Memory(threading.Thread):
    """Watches a process tree, twice a second."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.largest_bytes = 0
        self._root = root
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            self.largest_bytes = max(self.largest_bytes, proportional_bytes(self._root))

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self.largest_bytes


def run_side(name: str, asked: dict[str, Any], threads: int) -> list[dict[str, float]]:
    """Run a side to its end; gives its lines, and its memory in the last."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, str(SIDES / f"{name}.py"), json.dumps({**asked, "threads": threads})]
    log = Path(asked["output_dir"])
    log.mkdir(parents=True, exist_ok=True)
    lines = []
    with open(log / "log", "wb") as errors:
        side = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environ)
        memory = Memory(side.pid)
        memory.start()
        assert side.stdout is not None
        for line in side.stdout:
            if line.startswith(b"{"):
                lines.append(json.loads(line))
        code = side.wait()
    largest = memory.stop()
    if code:
        sys.exit(f"{name} ended with {code}: {(log / 'log').read_text()[-2000:]}")
    return [*lines, {"memory": largest}]


def measure(name: str, asked: dict[str, Any], threads: int) -> Run:
    """One run of a side to the target."""
    started = time.perf_counter()
    *lines, last = run_side(name, asked, threads)
    newest = [line["reward"] for line in lines[-WINDOW:]]
    result = Run(
        seconds=lines[-1]["seconds"],
        steps=int(lines[-1]["step"]),
        tokens_per_s=sum(line["tokens"] for line in lines) / lines[-1]["seconds"],
        memory_bytes=int(last["memory"]),
        reached=sum(newest) / len(newest) >= asked["target"],
    )
    print(
        f"{name:<7} seed {asked['seed']}  latency {asked['latency_s']:g} s: {result.seconds:7.1f} s, "
        f"{result.steps:4d} steps, {result.tokens_per_s:6.0f} tokens/s, {result.memory_bytes / 1e6:6.0f} MB"
        f"{'' if result.reached else '  (target not reached)'}   [{time.perf_counter() - started:.0f} s in all]",
        flush=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--places", nargs="+", choices=("near", "far"), default=["near", "far"])
    parser.add_argument("--target", type=float, default=0.55, help="mean reward of ten steps that ends a run")
    parser.add_argument("--latency", type=float, default=1.0, help="of the far server, in seconds")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="OpenMP threads of TRL's side")
    parser.add_argument("--work-dir", type=Path, help="keeps the models between calls")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="verifiers-benchmark-trl-") as scratch:
        report(args, args.work_dir or Path(scratch))


def report(args: argparse.Namespace, work: Path) -> None:
    """Run both sides for every seed, near and far, and print the ratios."""
    runs: dict[tuple[str, str], list[Run]] = {}
    for seed in range(args.seeds):
        home = work / f"seed-{seed}"
        if not (home / "start").exists():
            run_side("start", {"output_dir": str(home), "seed": seed}, 1)
        for place in args.places:
            latency_s = args.latency if place == "far" else 0.0
            for name, threads in (("theirs", args.threads), ("ours", 1)):
                asked = {
                    "output_dir": str(home / f"{name}-{place}"),
                    "model": str(home / "start"),
                    "seed": seed,
                    "target": args.target,
                    "window": WINDOW,
                    "max_steps": args.max_steps,
                    "latency_s": latency_s,
                    "server_threads": 1,
                    "num_batches_ahead": 2 if latency_s else 1,
                }
                runs.setdefault((name, place), []).append(measure(name, asked, threads))

    def ratio(place: str, what: str) -> float:
        ours, theirs = (
            statistics.median(getattr(run, what) for run in runs[name, place]) for name in ("ours", "theirs")
        )
        return round(ours / theirs, 3)

    print(f"threads: TRL {args.threads}, ours 1 for the trainer and 1 for the server; {os.cpu_count()} cores")
    ratios: dict[str, Any] = {}
    if "near" in args.places:
        ratios |= {"wall_ratio": ratio("near", "seconds"), "memory_ratio": ratio("near", "memory_bytes")}
    if "far" in args.places:
        ratios["wall_ratio_remote"] = ratio("far", "seconds")
    if not all(run.reached for side in runs.values() for run in side):
        ratios["reached"] = False
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
