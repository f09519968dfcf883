"""Whole evaluations per second against an instant server, beside other tools and raw aiohttp.

    python benchmarks/evaluate.py [--rollouts 2000] [--in-flight 256] [--rounds 3] [--quick]

An evaluation is prompts rolled out, scored and stored. All sides get the same prompts, one rollout each, the same
number in flight, and the same server: a process of its own on loopback that answers every request at once with the
same bytes. Each side is a process of its own (`evaluation_sides/`), which evaluates 64 prompts first and is then
timed; sides take turns, several rounds. Others run in virtual environments that are built beside the project when
they are not there yet (`.venv-bench-*`), with their own stores on and their displays off. Ours is the whole `vf-eval`
command with its report.html, which nobody else writes.

`--quick` is a smoke run: few rollouts, one round, and of the others those whose environment is there.

Raw aiohttp posts, decodes and compares, and nothing else. It is so quick that a short run would measure how a command
starts; so it is compared over more rollouts, and the short runs' ratio is told beside it.

Ends with one line of JSON: ratio_to_verifiers, ratio_to_inspect and ratio_to_raw (our rollouts per second over
theirs), ratio_to_raw_in_a_short_run, cpu_ratio_to_raw (raw's CPU time over ours), and our peak memory by rollouts.
Exit code 1 where one of the first three is below its target.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_process import server_process

HERE = Path(__file__).resolve().parent
SIDE_TIMEOUT_S = 600
TARGETS = {"ratio_to_verifiers": 10.0, "ratio_to_inspect": 30.0, "ratio_to_raw": 0.4}


@dataclass(frozen=True)
class Side:
    """One of the tools that are compared: a program in `evaluation_sides/`, and what its environment holds."""

    name: str
    program: str
    pins: tuple[str, ...] = ()
    venv: str = ""


OURS = Side("vf-eval", "ours.py")
RAW = Side("raw aiohttp", "raw.py")
VERIFIERS = Side("verifiers 0.1.14", "peer_verifiers.py", ("verifiers==0.1.14",), ".venv-bench-verifiers")
INSPECT = Side(
    "inspect-ai 0.3.285", "peer_inspect.py", ("inspect-ai==0.3.285", "openai==3.52.0"), ".venv-bench-inspect"
)

Runs = dict[Side, list[dict[str, Any]]]


def python_of(side: Side, cache: Path, *, build: bool) -> Path | None:
    """Return the interpreter of a side, and build its environment where it is missing; None where it must not be."""
    if not side.pins:
        return Path(sys.executable)
    directory = cache / side.venv
    python, installed = directory / "bin" / "python", directory / ".installed"
    wanted = "\n".join(side.pins) + "\n"
    if installed.is_file() and installed.read_text() == wanted:
        return python
    if not build:
        return None
    print(f"building {directory} for {', '.join(side.pins)}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *side.pins]
    subprocess.run(install, check=True)
    installed.write_text(wanted)
    return python


def run_side(side: Side, python: Path, url: str, rollouts: int, in_flight: int) -> dict[str, Any]:
    """Run one process of a side, and return what it measured."""
    # nothing may reach for a hub or send telemetry, and the numerical libraries must not start threads
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    environ = {**os.environ, **quiet}
    if side.pins:
        # a path to our sources would hide the other package of the same name
        environ.pop("PYTHONPATH", None)
    command = [str(python), str(HERE / "evaluation_sides" / side.program), url, str(rollouts), str(in_flight)]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command, cwd=scratch, env=environ, capture_output=True, text=True, timeout=SIDE_TIMEOUT_S, check=False
        )
    if done.returncode != 0:
        raise SystemExit(f"{side.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"per_s": found["rollouts"] / found["seconds"], "cpu": found["cpu_s"] / found["rollouts"] * 1000}


def median(of_side: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in of_side)


def table_of(runs: Runs, rollouts: int) -> Iterator[str]:
    """Return a line for each side."""
    columns = ("rollouts/s", "range", "CPU s per 1,000", "peak MB", "stored MB")
    yield f"{f'{rollouts:,} rollouts':<24}" + "".join(f"{name:>17}" for name in columns)
    for side, of_side in runs.items():
        rates = [run["per_s"] for run in of_side]
        cells = (
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} .. {max(rates):,.0f}",
            f"{median(of_side, 'cpu'):.2f}",
            f"{median(of_side, 'peak_mb'):.0f}",
            f"{median(of_side, 'stored_mb'):.2f}",
        )
        yield f"{side.name:<24}" + "".join(f"{cell:>17}" for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=2000, help="of each side in each round (default: 2000)")
    parser.add_argument("--in-flight", type=int, default=256, help="(default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--beside-raw", type=int, default=10_000, help="rollouts beside raw aiohttp (default: 10000)")
    parser.add_argument("--many", type=int, default=50_000, help="rollouts of the second look at memory")
    parser.add_argument("--cache", type=Path, default=HERE.parent, help="where the others' environments are")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    if args.quick:
        args.rollouts, args.beside_raw, args.rounds, args.many = 200, 500, 1, 1000
    pythons = {side: python_of(side, args.cache, build=not args.quick) for side in (RAW, OURS, VERIFIERS, INSPECT)}
    for side in (side for side, python in pythons.items() if python is None):
        print(f"left out, since {args.cache / side.venv} is not built: {side.name}", file=sys.stderr)
    there = {side: python for side, python in pythons.items() if python is not None}
    runs: Runs = {side: [] for side in there}
    beside_raw: Runs = {RAW: [], OURS: []}
    with server_process("The answer is 42.", "--instant") as url:
        for _ in range(args.rounds):
            for rollouts, asked in ((args.rollouts, runs), (args.beside_raw, beside_raw)):
                for side, of_side in asked.items():
                    of_side.append(run_side(side, there[side], url, rollouts, args.in_flight))
        many = run_side(OURS, there[OURS], url, args.many, args.in_flight)
    print(
        f"{args.in_flight} in flight, medians of {args.rounds} rounds; "
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    )
    print("\n".join(table_of(runs, args.rollouts)))
    print("\n".join(table_of(beside_raw, args.beside_raw)))
    print(f"vf-eval, {many['rollouts']:,} rollouts: {many['per_s']:,.0f}/s, peak {many['peak_mb']:.0f} MB")
    found: dict[str, Any] = {}
    for name, of_run, side in (
        ("ratio_to_verifiers", runs, VERIFIERS),
        ("ratio_to_inspect", runs, INSPECT),
        ("ratio_to_raw", beside_raw, RAW),
        ("ratio_to_raw_in_a_short_run", runs, RAW),
    ):
        ours = median(of_run[OURS], "per_s")
        found[name] = round(ours / median(of_run[side], "per_s"), 3) if side in of_run else None
    found["cpu_ratio_to_raw"] = round(median(beside_raw[RAW], "cpu") / median(beside_raw[OURS], "cpu"), 3)
    counted = [*runs[OURS][:1], *beside_raw[OURS][:1], many]
    found["peak_mb"] = {str(run["rollouts"]): run["peak_mb"] for run in counted}
    print(json.dumps(found))
    missed = [name for name, target in TARGETS.items() if found[name] is not None and found[name] < target]
    return 1 if missed and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
