"""GSM8K with Qwen2.5-0.5B and 1.5B Instruct, beside the scores that verl and AReaL have published.

    python benchmarks/gsm8k.py --model 0.5b|1.5b|1.5b-lora [--seeds 5] [--gpus 1] [--out runs/gsm8k]
    python benchmarks/gsm8k.py --model tiny --seeds 1     # all of it on two CPU cores, without network
    python benchmarks/gsm8k.py --table                    # what was run so far

For each seed `vf-train` runs the run file of the model in `benchmarks/gsm8k/`: seconds to the published scores,
tokens per second, MFU, the trainer's peak memory, and the eval score with an error clustered by problem. Then two
faults on shorter runs: kill -9 at half time and the same command again, and 5 % of the grades failing. The same
command continues what was broken off; `--only` runs parts. Results are in OUT/MODEL/result.json, and the last line
has them as JSON. `benchmarks/gsm8k/README.md` has the hardware, the thresholds, and where they come from.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("gpu")))
sys.path.insert(0, str(Path(__file__).with_name("gsm8k")))
sys.path.insert(0, str(Path(__file__).with_name("training_faults")))

from grades import read_grades, reward_bias
from intervals import mean_over_seeds
from killing import Attempt, kill_and_resume, passive_environ
from measurements import last_eval, logged_rewards, newest_step, read_measurements
from peak_flops import peak_flops_of
from suites import SUITES, Suite, write_run_file

from verifiers.evals.statistics import mean_and_stderr_clustered

HERE = Path(__file__).parent
PARTS = ("seeds", "kill", "fail")
FAIL_SHARE = 0.05
NOT_RUN = "not run by us"


def gpu_name() -> str | None:
    """Return the name of the first GPU; None without one."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return told.stdout.splitlines()[0].strip() if told.returncode == 0 and told.stdout.strip() else None


class Bench:
    """The runs of one model.

    Args:
        name: of the model in SUITES.
        out: directory of its runs.
        gpus: GPUs of a run, those of the server too.
    """

    def __init__(self, name: str, out: Path, gpus: int) -> None:
        self.suite: Suite = SUITES[name]
        self.out = out / name
        self.tiny = name == "tiny"
        self.gpus = 0 if self.tiny else gpus
        self.gpu = None if self.tiny else gpu_name()
        if self.tiny:
            # beside this file `import trl` would find the benchmark of that name
            command = [sys.executable, str(HERE / "gsm8k" / "suites.py"), str(self.out / "model")]
            subprocess.run(command, env=passive_environ(1), check=True, stdout=subprocess.DEVNULL)

    def attempt(self, name: str, *, fault: bool = False, seed: int = 0, fail_share: float = 0.0) -> Attempt:
        """Return a run of `vf-train` in its own directory; one with a fault is shorter and notes its grades."""
        directory = (self.out / name).resolve()
        settings = self.suite.settings()
        settings["trainer"] |= {"output_dir": str(directory / "run"), "seed": seed}
        if self.tiny:
            settings["model"]["path"] = str((self.out / "model" / "start").resolve())
        if fault:
            steps = self.suite.fault_steps
            settings["trainer"] |= {"max_steps": steps, "save_steps": steps // 5}
            settings["trainer"] |= {"eval_strategy": "no", "eval_on_start": False}
            noted = {"grades": str(directory / "grades.jsonl"), "fail_share": fail_share, "seed": seed}
            settings["environment"]["args"] = {**settings["environment"].get("args", {}), **noted}
            shutil.rmtree(directory, ignore_errors=True)
        run_file = write_run_file(directory / "run.toml", settings)
        environ = passive_environ(1) if self.tiny else dict(os.environ)
        # environments are found by name; the run file is in another directory
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE / "gsm8k"), environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "verifiers.cli.train", str(run_file)]
        return Attempt(command, directory, environ, lambda: newest_step(directory / "run"))

    def run_seeds(self, seeds: int) -> dict[str, Any]:
        """Train with each seed; return the measurements with their intervals over seeds."""
        thresholds = [anchor.score for anchor in self.suite.anchors]
        found, by_problem = {}, dict[Any, list[float]]()
        for seed in range(seeds):
            attempt = self.attempt(f"seed-{seed}", seed=seed)
            attempt.run()
            run = attempt.directory / "run"
            peak = peak_flops_of(self.gpu) if self.gpu else None
            suite = self.suite
            found[seed] = read_measurements(
                run,
                thresholds,
                gpus=self.gpus,
                parameters=suite.parameters,
                peak=peak,
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
        for name in ("tokens_per_s", "tokens_per_s_and_gpu", "mfu", "peak_memory_gib"):
            told[name] = over_seeds({seed: one[name] for seed, one in found.items()})
        for name in ("seconds_to", "seconds_to_without_evaluations"):
            told[name] = {
                str(threshold): over_seeds({seed: one[name][str(threshold)] for seed, one in found.items()})
                for threshold in thresholds
            }
        return told

    def run_kill(self) -> dict[str, Any]:
        """Kill a run at half time and resume it."""
        whole, killed = (self.attempt(name, fault=True) for name in ("whole", "killed"))
        group = self.suite.settings()["trainer"]["num_generations"]
        return kill_and_resume(whole, killed, steps=self.suite.fault_steps, group=group)

    def run_fail(self) -> dict[str, Any]:
        """Run while 5 % of the grades fail; return the bias of the logged rewards."""
        attempt = self.attempt("failing", fault=True, fail_share=FAIL_SHARE)
        attempt.run()
        return reward_bias(logged_rewards(attempt.directory / "run"), read_grades(attempt.directory / "grades.jsonl"))


def over_seeds(values: dict[int, float | None]) -> dict[str, Any]:
    """Return mean and interval where every seed has a value, and how many have."""
    known = {seed: [value] for seed, value in values.items() if value is not None}
    told = mean_over_seeds(known) if len(known) == len(values) else {"mean": None, "low": None, "high": None}
    return {**told, "seeds": len(values), "with_a_value": len(known)}


def table(results: dict[str, dict[str, Any]]) -> Iterable[str]:
    """Yield the lines of the table of every model; what was not run says so."""
    yield "| model | figure | measured | published |"
    yield "|---|---|---|---|"
    for name, suite in SUITES.items():
        result = results.get(name, {})
        seeds, kill, fail = (result.get(part) for part in PARTS)
        for anchor in suite.anchors:
            for label, key in (
                ("", "seconds_to"),
                (", waits for evaluations left out", "seconds_to_without_evaluations"),
            ):
                to = seeds[key].get(str(anchor.score)) if seeds else None
                yield f"| {name} | seconds to {anchor.score} ({anchor.name}){label} | {_interval(to)} | |"
        best = "; ".join(f"{anchor.score} ({anchor.name})" for anchor in suite.anchors)
        score = f"{seeds['eval_score']['mean']:.4f} ± {_number(seeds['eval_score']['stderr'])}" if seeds else NOT_RUN
        yield f"| {name} | eval score ± standard error, clustered by problem | {score} | {best} |"
        for label, key in (
            ("eval score over seeds", "eval_score_over_seeds"),
            ("sampled tokens/s and GPU", "tokens_per_s_and_gpu"),
            ("MFU of training", "mfu"),
            ("peak memory of the trainer, GiB", "peak_memory_gib"),
        ):
            yield f"| {name} | {label} | {_interval(seeds[key] if seeds else None)} | |"
        for label, row, key in (
            ("kill -9 at half time: seconds lost", kill, "seconds_lost"),
            ("kill -9 at half time: prompts graded again", kill, "prompts_again"),
            ("kill -9 at half time: prompts skipped", kill, "prompts_skipped"),
            ("5 % of grades fail: bias of the reward", fail, "bias"),
        ):
            yield f"| {name} | {label} | {NOT_RUN if row is None else _number(row[key])} | |"


def _interval(value: dict[str, Any] | None) -> str:
    if value is None:
        return NOT_RUN
    if value["mean"] is None:
        some = value.get("with_a_value", 0)
        return f"in {some} of {value['seeds']} seeds" if some else "none"
    if value["low"] is None:
        return _number(value["mean"])
    return f"{_number(value['mean'])} ({_number(value['low'])} to {_number(value['high'])})"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """Return the results that were stored, by model."""
    paths = {name: out / name / "result.json" for name in SUITES}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SUITES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of a run, those of the server too")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k"))
    parser.add_argument("--table", action="store_true", help="print the table of what was run, and run nothing")
    args = parser.parse_args()
    if args.model is None and not args.table:
        parser.error(f"give --model, one of {', '.join(SUITES)}, or --table")
    if args.seeds < 1 or args.gpus < 1:
        parser.error(f"--seeds and --gpus must be 1 or more, not {args.seeds} and {args.gpus}")
    return args


def main() -> int:
    args = parse()
    if not args.table:
        if args.model != "tiny" and gpu_name() is None:
            print(f"gsm8k.py: no GPU was found, and {args.model} needs one; try --model tiny", file=sys.stderr)
            return 2
        bench = Bench(args.model, args.out, args.gpus)
        path = bench.out / "result.json"
        result = read_results(args.out).get(args.model, {}) | {"gpu": bench.gpu, "gpus": bench.gpus}
        steps = {"seeds": lambda: bench.run_seeds(args.seeds), "kill": bench.run_kill, "fail": bench.run_fail}
        for part in args.only:
            result[part] = steps[part]()
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps({part: result[part]}), flush=True)
    results = read_results(args.out)
    print("\n".join(table(results)))
    print(json.dumps({name: results.get(name, NOT_RUN) for name in SUITES}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
