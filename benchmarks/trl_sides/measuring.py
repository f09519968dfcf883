"""Runs of a side as a process of its own: its lines, its seconds to a target, and its largest memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from faults import passive_environ

SIDES = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """A side's seconds and steps to the target, tokens per second, largest memory in bytes, and held-out gain."""

    seconds: float
    steps: int
    tokens_per_s: float
    memory_bytes: int
    reached: bool
    gain: float | None


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
    """The memory of a process tree, read twice a second."""

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
    command = [sys.executable, str(SIDES / f"{name}.py"), json.dumps({**asked, "threads": threads})]
    log = Path(asked["output_dir"])
    log.mkdir(parents=True, exist_ok=True)
    lines = []
    with open(log / "log", "wb") as errors:
        side = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=passive_environ(threads))
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
    """Run a side to the target once."""
    started = time.perf_counter()
    *lines, last = run_side(name, asked, threads)
    gain = lines.pop()["gain"] if "gain" in lines[-1] else None
    newest = [line["reward"] for line in lines[-asked["window"] :]]
    result = Run(
        seconds=lines[-1]["seconds"],
        steps=int(lines[-1]["step"]),
        tokens_per_s=sum(line["tokens"] for line in lines) / lines[-1]["seconds"],
        memory_bytes=int(last["memory"]),
        reached=sum(newest) / len(newest) >= asked["target"],
        gain=gain,
    )
    print(
        f"{name:<7} seed {asked['seed']}  latency {asked['latency_s']:g} s: {result.seconds:7.1f} s, "
        f"{result.steps:4d} steps, {result.tokens_per_s:6.0f} tokens/s, {result.memory_bytes / 1e6:6.0f} MB"
        f"{'' if result.reached else '  (target not reached)'}"
        f"{'' if gain is None else f'  held-out {gain:+.3f}'}   [{time.perf_counter() - started:.0f} s in all]",
        flush=True,
    )
    return result
