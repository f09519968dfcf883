"""Does a curriculum help? The demo's small model on longer words, through a dataserver, with and without stages.

    python examples/curriculum/run.py --seed 0 --arm curriculum [--url http://127.0.0.1:9000]
    python examples/curriculum/run.py --seed 0 --arm plain
    python examples/curriculum/run.py --table

Both arms start from the same warm start (on words of 3 to 5 letters, as in examples/demo), train for the same number
of steps and completions, and are measured on the same eval words of level 2 (3 to 7 letters), greedily. The plain
arm draws from level 2 from its first step; the curriculum arm follows the stages of levels.yaml. Prompts and grades
come from `vf-dataserver levels.yaml`, which is started with the run unless `--url` names one that runs.

Needs: pip install -e ".[train]" servers/embedded servers/dataserver environments/reasoning_gym_env
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# one OpenMP thread a side: the trainer's and the server's teams would otherwise fight for two cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

HERE = Path(__file__).parent

ARMS = ("plain", "curriculum")
STEPS = 300
NUM_EVAL = 400
SHOWN = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=ARMS, default="curriculum")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="a dataserver that runs; one is started with the run when left out")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps; the stages need 300")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/curriculum"))
    parser.add_argument("--table", action="store_true", help="only print what the runs so far found")
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if not args.table:
        run(args)
    print(table(args.output_dir))
    return 0


def run(args: argparse.Namespace) -> None:
    """Run one arm with one seed, and write ARM-SEED.json."""
    import datasets
    import torch
    import transformers

    import verifiers as vf
    from verifiers.train.processes.launch import launched_server

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    start = warm_started_model(args.output_dir, args.seed)
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(dataserver(HERE / "levels.yaml"))
        env, eval_rows = environment(url, args.arm, args.seed)
        config = settings(args)
        config.server_url = stack.enter_context(launched_server("embedded", str(start), args=["--threads", "1"]))
        trainer = vf.GRPOTrainer(str(start), env, config)
        stack.callback(trainer.close)
        before = accuracy(trainer, eval_rows)
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
        after = accuracy(trainer, eval_rows)
    found = {
        "arm": args.arm,
        "seed": args.seed,
        "steps": trainer.state.global_step,
        "before": before,
        "after": after,
        "num_eval": len(eval_rows),
        "seconds": round(seconds, 1),
    }
    (args.output_dir / f"{args.arm}-{args.seed}.json").write_text(json.dumps(found) + "\n")
    print(json.dumps(found))


def environment(url: str, arm: str, seed: int) -> tuple[Any, Any]:
    """Return the arm's environment, and eval rows whose words are in no dataset that either arm trains on."""
    from verifiers.integrations.dataserver import RemoteEnv

    if arm == "curriculum":
        env = RemoteEnv(url, eval_dataset="eval", seed=seed)
    else:
        env = RemoteEnv(url, dataset="level_2", eval_dataset="eval")
    trained = RemoteEnv(url, dataset=["level_1", "level_2"]).get_dataset()
    words = {question(row) for row in trained}
    eval_rows = env.get_eval_dataset().filter(lambda row: question(row) not in words)
    return env, eval_rows.select(range(min(NUM_EVAL, len(eval_rows))))


def question(row: Any) -> str:
    return str(row["prompt"][-1]["content"])


def accuracy(trainer: Any, rows: Any) -> float:
    """Return the mean reward, which is exact match, over the eval words."""
    found: dict[str, float] = trainer.evaluate(rows)
    if found["eval_failed"]:
        raise RuntimeError(f"{found['eval_failed']:.0f} eval answers were not graded.")
    return found["eval_reward"]


def settings(args: argparse.Namespace) -> Any:
    """Return GRPO's settings: those of the demo, for both arms."""
    import verifiers as vf

    return vf.GRPOConfig(
        output_dir=str(args.output_dir / "checkpoints"),
        seed=args.seed,
        max_steps=args.steps,
        learning_rate=3e-4,
        lr_scheduler_type="linear",
        warmup_steps=10,
        per_device_train_batch_size=128,
        gradient_accumulation_steps=2,
        num_generations=16,
        num_batches_ahead=1,
        max_completion_length=12,
        beta=0.0,
        logging_steps=20,
        save_strategy="no",
    )


def warm_started_model(output_dir: Path, seed: int) -> Path:
    """Return the demo's model after its supervised start on words of 3 to 5 letters; made once for each seed."""
    import verifiers as vf
    from verifiers.train.tiny_model.char_model import make_model
    from verifiers.train.tiny_model.warm_start import warm_start

    start = output_dir / f"start-{seed}"
    if (start / "config.json").is_file():
        return start
    env = vf.load_environment(
        "reasoning-gym-env",
        task="spell_backward",
        curriculum=1,
        question_pattern=": [a-z]+$",
        num_train=4000,
        num_eval=NUM_EVAL,
        reward="exact",
    )
    shown, others = (
        [(row["question"], row["answer"]) for row in rows]
        for rows in (env.get_dataset(n=SHOWN), env.get_eval_dataset())
    )
    make_model(output_dir / f"model-{seed}", seed=seed)
    warm_start(output_dir / f"model-{seed}", start, shown=shown, eval_pairs=others, seed=seed)
    return start


@contextlib.contextmanager
def dataserver(config: Path) -> Iterator[str]:
    """Run `vf-dataserver` on a free port of this machine while the block runs; yield its URL."""
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        command = [sys.executable, "-m", "verifiers_dataserver", str(config), "--port", "0"]
        command += ["--port-file", str(port_file), "--parent-pid", str(os.getpid())]
        process = subprocess.Popen(command)
        try:
            deadline = time.monotonic() + 120
            while not port_file.is_file():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the dataserver did not start; its message stands above.")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port_file.read_text().strip()}"
        finally:
            process.terminate()
            process.wait(timeout=30)


def table(output_dir: Path) -> str:
    """Return what the runs in a directory found: a line an arm, and the difference paired by seed."""
    found = [json.loads(path.read_text()) for path in sorted(output_dir.glob("*-*.json"))]
    by_arm = {arm: {run["seed"]: run for run in found if run["arm"] == arm} for arm in ARMS}
    lines = [f"{'arm':<12}{'seeds':>6}{'before':>10}{'after':>10}{'± stderr':>10}"]
    for arm, runs in by_arm.items():
        if runs:
            before, _ = mean_and_stderr([run["before"] for run in runs.values()])
            after, stderr = mean_and_stderr([run["after"] for run in runs.values()])
            lines.append(f"{arm:<12}{len(runs):>6}{before:>10.3f}{after:>10.3f}{stderr:>10.3f}")
    plain, staged = by_arm["plain"], by_arm["curriculum"]
    if both := sorted(plain.keys() & staged.keys()):
        gain, stderr = mean_and_stderr([staged[seed]["after"] - plain[seed]["after"] for seed in both])
        lines.append(f"{'difference':<12}{len(both):>6}{'':>10}{gain:>+10.3f}{stderr:>10.3f}")
    return "\n".join(lines)


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and its standard error; NaN for a single seed."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, float("nan")
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, (variance / len(values)) ** 0.5


if __name__ == "__main__":
    sys.exit(main())
