"""Whole evaluations per second against an instant server, beside other tools and raw aiohttp.

    python benchmarks/evaluate.py [--rollouts 2000] [--in-flight 256] [--rounds 3] [--quick]

An evaluation is prompts rolled out, scored and stored. All sides get the same prompts, one rollout each, the same
number in flight, and the same server: a process of its own on loopback that answers every request at once with the
same bytes. Each side is a process of its own (`evaluation_sides/`), which evaluates 64 prompts first and is then
timed; sides take turns, several rounds. Others run in virtual environments that are built beside the project when
they are not there yet (`.venv-bench-*`), with their own stores on and their displays off. Ours is the whole `vf-eval`
command but for report.html, which nobody else writes; "extra" is what that takes.

`--quick` is a smoke run: few rollouts, one round, and of the others those whose environment is there.

Raw aiohttp posts, decodes and compares, and nothing else. It is so quick that a short run would measure how a command
starts; so it is compared over more rollouts, and the short runs' ratio is told beside it.

Ends with one line of JSON: ratio_to_verifiers, ratio_to_inspect and ratio_to_raw (our rollouts per second over
theirs), ratio_to_raw_in_a_short_run, ratio_to_raw_same_gc (against raw aiohttp with our setting of the garbage
collector), ratio_to_raw_with_report, cpu_ratio_to_raw (raw's CPU time over ours), cpu_s_per_1000 by side, and our
peak memory by rollouts. Exit code 1 where one of the first three is below its target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIDES = HERE / "evaluation_sides"
SIDE_TIMEOUT_S = 600
MANY = 50_000
TARGETS = {"ratio_to_verifiers": 10.0, "ratio_to_inspect": 30.0, "ratio_to_raw": 0.4}


@dataclass(frozen=True)
class Side:
    """One of the tools that are compared.

    Attributes:
        program: in `evaluation_sides/`.
        pins: what its virtual environment holds; empty for ours.
        extra: further arguments of the program.
    """

    name: str
    program: str
    pins: tuple[str, ...] = ()
    venv: str = ""
    extra: tuple[str, ...] = ()


OURS = Side("vf-eval", "ours.py")
RAW = Side("raw aiohttp", "raw.py")
RAW_SAME_GC = Side("raw, rarer collections", "raw.py", extra=("same-gc",))
VERIFIERS = Side("verifiers 0.1.14", "peer_verifiers.py", ("verifiers==0.1.14",), ".venv-bench-verifiers")
INSPECT = Side(
    "inspect-ai 0.3.285", "peer_inspect.py", ("inspect-ai==0.3.285", "openai==3.52.0"), ".venv-bench-inspect"
)
ALL = (RAW, RAW_SAME_GC, OURS, VERIFIERS, INSPECT)


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


@contextlib.contextmanager
def instant_server(answer: str) -> Iterator[str]:
    """Return the base URL of a server that answers everything with `answer`."""
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        process = subprocess.Popen([sys.executable, SIDES / "instant_server.py", port_file, answer])
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}")
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port_file.read_text()}/v1"
        finally:
            process.terminate()
            process.wait()


def run_side(side: Side, python: Path, url: str, rollouts: int, in_flight: int) -> dict[str, Any]:
    """Run one process of a side, and return what it measured."""
    # nothing may reach for a hub or send telemetry, and the numerical libraries must not start threads
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    environ = {**os.environ, **quiet}
    if side.pins:
        # a path to our sources would hide the other package of the same name
        environ.pop("PYTHONPATH", None)
    command = [str(python), str(SIDES / side.program), url, str(rollouts), str(in_flight), *side.extra]
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command,
            cwd=scratch,
            env=environ,
            capture_output=True,
            text=True,
            timeout=SIDE_TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit(f"{side.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def median(runs: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def rate(run: dict[str, Any]) -> float:
    return float(run["rollouts"] / run["seconds"])


def speed(of_side: Sequence[dict[str, Any]]) -> float:
    """Return the rollouts per second, the median of the rounds."""
    return statistics.median(map(rate, of_side))


def cpu_s_per_1000(of_side: Sequence[dict[str, Any]]) -> float:
    return statistics.median(run["cpu_s"] / run["rollouts"] * 1000 for run in of_side)


def table_of(runs: Runs, rollouts: int) -> Iterator[str]:
    """Return a line for each side."""
    columns = ("rollouts/s", "range", "CPU s per 1,000", "peak MB", "stored MB", "extra s")
    yield f"{f'{rollouts:,} rollouts':<24}" + "".join(f"{name:>17}" for name in columns)
    for side, of_side in runs.items():
        rates = [rate(run) for run in of_side]
        cells = (
            f"{statistics.median(rates):,.0f}",
            f"{min(rates):,.0f} .. {max(rates):,.0f}",
            f"{cpu_s_per_1000(of_side):.2f}",
            f"{median(of_side, 'peak_mb'):.0f}",
            f"{median(of_side, 'stored_mb'):.2f}",
            f"{median(of_side, 'extra_s'):.2f}",
        )
        yield f"{side.name:<24}" + "".join(f"{cell:>17}" for cell in cells)


def ratios_of(runs: Runs, beside_raw: Runs) -> dict[str, Any]:
    """Return what the last line says of speed and CPU time."""
    found: dict[str, Any] = {}
    for name, of_run, side in (
        ("ratio_to_verifiers", runs, VERIFIERS),
        ("ratio_to_inspect", runs, INSPECT),
        ("ratio_to_raw", beside_raw, RAW),
        ("ratio_to_raw_in_a_short_run", runs, RAW),
        ("ratio_to_raw_same_gc", beside_raw, RAW_SAME_GC),
    ):
        found[name] = round(speed(of_run[OURS]) / speed(of_run[side]), 3) if side in of_run else None
    ours = beside_raw[OURS]
    with_report = statistics.median(run["rollouts"] / (run["seconds"] + run["extra_s"]) for run in ours)
    found["ratio_to_raw_with_report"] = round(with_report / speed(beside_raw[RAW]), 3)
    found["cpu_ratio_to_raw"] = round(cpu_s_per_1000(beside_raw[RAW]) / cpu_s_per_1000(ours), 3)
    found["cpu_s_per_1000"] = {side.name: round(cpu_s_per_1000(of_side), 3) for side, of_side in runs.items()}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=2000, help="of each side in each round (default: 2000)")
    parser.add_argument("--in-flight", type=int, default=256, help="(default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--beside-raw", type=int, default=10_000, help="rollouts beside raw aiohttp (default: 10000)")
    parser.add_argument("--many", type=int, default=MANY, help="rollouts of the second look at memory")
    parser.add_argument("--cache", type=Path, default=HERE.parent, help="where the others' environments are")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    args = parser.parse_args()
    if args.quick:
        args.rollouts, args.beside_raw, args.rounds, args.many = 200, 500, 1, 1000
    pythons = {side: python_of(side, args.cache, build=not args.quick) for side in ALL}
    for side in (side for side, python in pythons.items() if python is None):
        print(f"left out, since {args.cache / side.venv} is not built: {side.name}", file=sys.stderr)
    runs: Runs = {side: [] for side, python in pythons.items() if python is not None}
    beside_raw: Runs = {side: [] for side in (RAW, RAW_SAME_GC, OURS)}
    with instant_server("The answer is 42.") as url:
        for _ in range(args.rounds):
            for side, of_side in runs.items():
                python = pythons[side]
                assert python is not None
                of_side.append(run_side(side, python, url, args.rollouts, args.in_flight))
            for side, of_side in beside_raw.items():
                of_side.append(run_side(side, Path(sys.executable), url, args.beside_raw, args.in_flight))
        many = run_side(OURS, Path(sys.executable), url, args.many, args.in_flight)
    print(
        f"{args.in_flight} in flight, medians of {args.rounds} rounds; "
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    )
    print("\n".join(table_of(runs, args.rollouts)))
    print("\n".join(table_of(beside_raw, args.beside_raw)))
    print(f"vf-eval, {many['rollouts']:,} rollouts: {rate(many):,.0f}/s, peak {many['peak_mb']:.0f} MB")
    found = ratios_of(runs, beside_raw)
    counted = [*runs[OURS][:1], *beside_raw[OURS][:1], many]
    found["peak_mb"] = {str(run["rollouts"]): run["peak_mb"] for run in counted}
    print(json.dumps(found))
    missed = [name for name, target in TARGETS.items() if found[name] is not None and found[name] < target]
    return 1 if missed and not args.quick else 0


if __name__ == "__main__":
    sys.exit(main())
