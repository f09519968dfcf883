"""Training to a given reward with TRL's own GRPOTrainer and with ours: wall clock, tokens, memory, and two faults.

    python benchmarks/trl.py [--seeds 5] [--places near far] [--fault-seeds 5] [--target 0.55]

Both begin with the same model (the demo's, after its supervised warm start; one a seed), on the same task, with the
same sizes (16 prompts x 16 completions a step, one update each), learning rate and loss, and end when the mean reward
of the last ten steps reaches the target. A side is a process of its own with its children; one runs at a time.

- TRL generates with transformers in its own process, on both cores: `--threads` OpenMP threads. Its vLLM server mode
  cannot run here, since its weight transfer needs NCCL, so it needs a GPU on either side.
- Ours has a trainer and the embedded server on one OpenMP thread each; one batch ahead, and two where it is far.
- "near" is as it is; "far" adds a latency to everything that is generated, as a remote server has it: TRL's
  generation ends so much later, and our server answers each request so much later. Neither costs CPU.

Seconds are from the first step's begin to the step that reached the target: loading is left out. Memory is the
largest sum of the proportional set sizes of a side's processes, so pages that they share count once.

Faults are of runs of `--fault-steps` steps with a checkpoint every fifth of them, near (see `faults.py`): kill -9
at half time and the same command again, and 5 % of the grades failing.

Ratios are ours over TRL's: medians (wall_ratio, wall_ratio_remote, memory_ratio), and geometric means paired by seed
with 95 % intervals by Student's t (..._paired). Where a run misses the target, the
ratios of its place are null. Ends with one line of JSON. On two free cores five seeds take 54 minutes; `--seeds 1`
and `--places near` are shorter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("trl_sides")))
from faults import measure_faults
from intervals import mean_over_seeds, ratio_over_seeds
from measuring import SIDES, Run, measure, run_side

WINDOW = 10


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--places", nargs="*", choices=("near", "far"), default=["near", "far"])
    parser.add_argument("--target", type=float, default=0.55, help="mean reward of ten steps that ends a run")
    parser.add_argument("--latency", type=float, default=1.0, help="of the far server, in seconds")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument(
        "--fault-seeds", type=int, help="seeds of the fault rows (default: --seeds); 0 leaves them out"
    )
    parser.add_argument("--fault-steps", type=int, default=25, help="optimizer steps of a run with a fault")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="OpenMP threads of TRL's side")
    parser.add_argument("--work-dir", type=Path, help="keeps the models between calls")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds is {args.seeds}, but it must be 1 or more")
    if args.fault_steps < 10:
        parser.error(f"--fault-steps is {args.fault_steps}, but checkpoints and a half time need 10 or more")
    args.fault_seeds = args.seeds if args.fault_seeds is None else min(args.fault_seeds, args.seeds)
    return args


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="verifiers-benchmark-trl-") as scratch:
        report(args, args.work_dir or Path(scratch))


def asked_of(home: Path, seed: int, **more: Any) -> dict[str, Any]:
    """Return what a run of a seed is asked, whichever side runs it."""
    base = {"model": str(home / "start"), "seed": seed, "window": WINDOW, "latency_s": 0.0}
    return {**base, "server_threads": 1, "num_batches_ahead": 1, **more}


def report(args: argparse.Namespace, work: Path) -> None:
    """Run both sides for every seed, near and far, then the faults, and print the ratios."""
    sides = {"theirs": args.threads, "ours": 1}
    runs: dict[tuple[str, str], dict[int, Run]] = {}
    faults: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        home = work / f"seed-{seed}"
        if not (home / "start").exists():
            run_side("start", {"output_dir": str(home), "seed": seed}, 1)
        for place, (name, threads) in itertools.product(args.places, sides.items()):
            latency_s = args.latency if place == "far" else 0.0
            asked = asked_of(
                home,
                seed,
                output_dir=str(home / f"{name}-{place}"),
                target=args.target,
                max_steps=args.max_steps,
                latency_s=latency_s,
                num_batches_ahead=2 if latency_s else 1,
            )
            runs.setdefault((name, place), {})[seed] = measure(name, asked, threads)
        if seed < args.fault_seeds:
            for name, threads in sides.items():
                asked = asked_of(home, seed, max_steps=args.fault_steps, save_steps=args.fault_steps // 5)
                asked["threads"] = threads
                faults += measure_faults(SIDES / f"{name}.py", asked, home / "faults", raises=seed == 0)

    def ratios(place: str, what: str, name: str) -> dict[str, Any]:
        if not all(run.reached for side in sides for run in runs[side, place].values()):
            return {name: None, f"{name}_paired": None}
        found = {side: {seed: [getattr(run, what)] for seed, run in runs[side, place].items()} for side in sides}
        middle = {side: statistics.median(getattr(run, what) for run in runs[side, place].values()) for side in sides}
        paired = ratio_over_seeds(found["ours"], found["theirs"])
        return {name: round(middle["ours"] / middle["theirs"], 3), f"{name}_paired": paired}

    print(f"threads: TRL {args.threads}, ours 1 for the trainer and 1 for the server; {os.cpu_count()} cores")
    told: dict[str, Any] = {"seeds": args.seeds}
    if "near" in args.places:
        told |= ratios("near", "seconds", "wall_ratio") | ratios("near", "memory_bytes", "memory_ratio")
    if "far" in args.places:
        told |= ratios("far", "seconds", "wall_ratio_remote")
    if not all(run.reached for side in runs.values() for run in side.values()):
        told["reached"] = False
    if faults:
        told["faults"] = {name: summary(faults, name) for name in sides}
    print(json.dumps(told))


def summary(faults: list[dict[str, Any]], side: str) -> dict[str, Any]:
    """Return the fault measurements of a side: means and intervals over seeds."""
    rows = [row for row in faults if row["side"] == side]
    found: dict[str, Any] = {}
    for what in ("seconds_lost", "prompts_again", "prompts_skipped", "bias", "zero_bias"):
        values = {row["seed"]: [row[what]] for row in rows if row.get(what) is not None}
        found[what] = mean_over_seeds(values) if values else None
    ended = [row["exit_code"] for row in rows if row["fault"] == "a grader that raises"]
    return {**found, "exit_code_where_a_grader_raises": ended[0] if ended else None}


if __name__ == "__main__":
    main()
