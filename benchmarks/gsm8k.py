"""GSM8K with Qwen2.5-0.5B and 1.5B Instruct, beside the scores that verl and AReaL have published.

    python benchmarks/gsm8k.py --model 0.5b|1.5b|1.5b-lora [--seeds 5] [--gpus 1] [--out runs/gsm8k]
    python benchmarks/gsm8k.py --model tiny --seeds 1     # all of it on two CPU cores, without network

For each seed `vf-train` runs the run file of the model in `benchmarks/gsm8k/`: seconds to the published scores,
tokens per second, MFU, the trainer's peak memory, and the eval score with an error clustered by problem. The same
command continues what was broken off. Results are in OUT/MODEL/result.json, and the last line has them as JSON.
`benchmarks/gsm8k/README.md` has the hardware, the thresholds, and where they come from.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("gpu")))
sys.path.insert(0, str(Path(__file__).with_name("gsm8k")))
sys.path.insert(0, str(Path(__file__).with_name("trl_sides")))

from faults import passive_environ
from intervals import mean_over_seeds
from measurements import last_eval, read_measurements
from peak_flops import peak_flops_of
from suites import SUITES, write_run_file

from verifiers.evals.statistics import mean_and_stderr_clustered

HERE = Path(__file__).parent


def gpu_name() -> str | None:
    """Return the name of the first GPU; None without one."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return told.stdout.splitlines()[0].strip() if told.returncode == 0 and told.stdout.strip() else None


def train(name: str, seed: int, out: Path) -> Path:
    """Run `vf-train` with a seed, or continue it; return the directory of the run."""
    directory, settings = (out / f"seed-{seed}").resolve(), SUITES[name].settings()
    settings["trainer"] |= {"output_dir": str(directory / "run"), "seed": seed}
    environ = dict(os.environ)
    if name == "tiny":
        environ = passive_environ(1)
        # beside this file `import trl` would find the benchmark of that name
        command = [sys.executable, str(HERE / "gsm8k" / "suites.py"), str(out / "model")]
        subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
        settings["model"]["path"] = str((out / "model" / "start").resolve())
    run_file = write_run_file(directory / "run.toml", settings)
    # environments are found by name; the run file is in another directory
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE / "gsm8k"), environ.get("PYTHONPATH"))))
    with (directory / "log").open("ab") as log:
        command = [sys.executable, "-m", "verifiers.cli.train", str(run_file)]
        done = subprocess.run(command, stdout=log, stderr=log, env=environ)
    if done.returncode:
        sys.exit(f"{directory}: the run ended with {done.returncode}: {(directory / 'log').read_text()[-2000:]}")
    return directory / "run"


def run_seeds(name: str, seeds: int, out: Path, *, gpu: str | None, gpus: int) -> dict[str, Any]:
    """Train with each seed; return the measurements with their intervals over seeds."""
    suite = SUITES[name]
    thresholds = [anchor.score for anchor in suite.anchors]
    found, by_problem = {}, dict[Any, list[float]]()
    for seed in range(seeds):
        run = train(name, seed, out)
        found[seed] = read_measurements(
            run,
            thresholds,
            gpus=gpus,
            parameters=suite.parameters,
            peak=peak_flops_of(gpu) if gpu else None,
            operations=suite.operations,
        )
        print(json.dumps({"seed": seed, **found[seed]}), flush=True)
        for problem, rewards in last_eval(run)[1].items():
            by_problem.setdefault(problem, []).extend(rewards)
    score = mean_and_stderr_clustered(list(by_problem.values()), bounds=(0.0, 1.0))
    told: dict[str, Any] = {"by_seed": list(found.values())}
    told["eval_score"] = {"mean": score.mean, "stderr": score.stderr, "low": score.low, "high": score.high}
    told["eval_score_over_seeds"] = mean_over_seeds(
        {seed: [one["eval_score"]] for seed, one in found.items()}, (0.0, 1.0)
    )
    for key in ("tokens_per_s", "tokens_per_s_and_gpu", "mfu", "peak_memory_gib"):
        told[key] = over_seeds({seed: one[key] for seed, one in found.items()})
    told["seconds_to"] = {
        str(threshold): over_seeds({seed: one["seconds_to"][str(threshold)] for seed, one in found.items()})
        for threshold in thresholds
    }
    return told


def over_seeds(values: dict[int, float | None]) -> dict[str, Any]:
    """Return mean and interval where every seed has a value, and how many have."""
    known = {seed: [value] for seed, value in values.items() if value is not None}
    told = mean_over_seeds(known) if len(known) == len(values) else {"mean": None, "low": None, "high": None}
    return {**told, "seeds": len(values), "with_a_value": len(known)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SUITES), required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of a run, those of the server too")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k"))
    args = parser.parse_args()
    if args.seeds < 1 or args.gpus < 1:
        parser.error(f"--seeds and --gpus must be 1 or more, not {args.seeds} and {args.gpus}")
    return args


def main() -> int:
    args = parse()
    gpus, gpu = (0, None) if args.model == "tiny" else (args.gpus, gpu_name())
    if gpus and gpu is None:
        print(f"gsm8k.py: no GPU was found, and {args.model} needs one; try --model tiny", file=sys.stderr)
        return 2
    result = run_seeds(args.model, args.seeds, args.out / args.model, gpu=gpu, gpus=gpus)
    line = json.dumps(result | {"gpu": gpu, "gpus": gpus})
    (args.out / args.model / "result.json").write_text(line + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
