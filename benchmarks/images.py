"""Training on images with TRL's own GRPOTrainer and with ours: seconds to a reward, from the same model.

    python benchmarks/images.py [--seeds 3] [--target 0.85] [--steps 120]

A Qwen3-VL of 0.9 million parameters is made and shown a thousand answers of which one in ten is right and the others
are drawn, until it answers with a color's name; then GRPO trains it, tower included, on `environments/color_patches`:
8 prompts x 8 completions a step, the same prompts, learning rate and loss on both sides. Both take turns with all
cores: TRL generates with transformers in its process, ours with the embedded server in its own. A side ends when the
mean reward of ten steps reaches the target; its seconds are from the first step's begin. Each side of a seed is a
process of its own, and they take turns in being first.

TRL gets images through transformers' processor, without its part for videos, which needs torchvision.

Ends with one line of JSON: `wall_ratio` (ours over TRL's until the target, a geometric mean over seeds; null where a
side did not reach it), `step_ratio` (seconds a step), of both sides `steps`, `seconds` and the mean reward of the
`first` five and the `last` ten steps, and `largest_difference` of our trainer's log-probs from the sampler's, at the
probes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any

# benchmarks/trl.py stands beside this file and would be taken for the library
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "environments" / "color_patches"))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
SIDES = ("ours", "trl")
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 8,
    "learning_rate": 4e-4,
    "lr_scheduler_type": "linear",
    "warmup_steps": 5,
    "adam_beta2": 0.99,
    "beta": 0.0,
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--steps", type=int, default=120, help="most steps of a side")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(run_side(args)))
        return 0
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(args.seeds):
            model = Path(scratch, f"model-{seed}")
            print(f"seed {seed}: the model was made in {make(model, seed):.0f} s", flush=True)
            for side in SIDES if seed % 2 else reversed(SIDES):
                command = [sys.executable, __file__, "--side", side, "--model", str(model), "--seed", str(seed)]
                command += ["--target", str(args.target), "--steps", str(args.steps)]
                done = subprocess.run(command, cwd=scratch, stdout=subprocess.PIPE, text=True, check=True)
                found[side].append(json.loads(done.stdout.strip().splitlines()[-1]))
                print(f"seed {seed}, {side}: {found[side][-1]}", flush=True)
    result: dict[str, Any] = {
        f"{side}_{name}": [one[name] for one in found[side]]
        for side in SIDES
        for name in ("steps", "seconds", "first", "last")
    }
    pairs = list(zip(found["ours"], found["trl"], strict=True))
    reached = all(one["reached"] for pair in pairs for one in pair)
    walls = [math.log(ours["seconds"] / theirs["seconds"]) for ours, theirs in pairs]
    result["wall_ratio"] = round(math.exp(fmean(walls)), 3) if reached else None
    steps = [math.log(theirs["steps"] / ours["steps"]) for ours, theirs in pairs]
    result["step_ratio"] = round(math.exp(fmean(walls) + fmean(steps)), 3)
    result["largest_difference"] = max(one["difference"] for one in found["ours"])
    print(json.dumps(result))
    return 0


def make(directory: Path, seed: int) -> float:
    """Make the model that both sides begin with; return the seconds that took."""
    import color_patches

    from verifiers.train.tiny_model.vision_model import make_vision_model, show_answers

    started = time.perf_counter()
    make_vision_model(directory, seed=seed)
    dice = random.Random(seed)
    rows = color_patches.load_environment(num_train=1000, num_eval=1, seed=1000 + seed).get_dataset()
    drawn = [row["answer"] if dice.random() < 0.1 else dice.choice(list(color_patches.COLORS)) for row in rows]
    show_answers(directory, list(zip(rows["prompt"], drawn, strict=True)), seed=seed)
    return time.perf_counter() - started


def run_side(args: argparse.Namespace) -> dict[str, Any]:
    """Train one side until the target."""
    import color_patches
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.rewards: list[float] = []
            self.started = self.seconds = 0.0

        def on_step_begin(self, *given: Any, **kwargs: Any) -> None:
            self.started = self.started or time.perf_counter()

        def on_log(self, options: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
            if "reward" in logs:
                self.rewards.append(logs["reward"])
                self.seconds = time.perf_counter() - self.started
                if len(self.rewards) >= 10 and fmean(self.rewards[-10:]) >= args.target:
                    control.should_training_stop = True
            return control

    env = color_patches.load_environment(num_train=1000, num_eval=1, seed=args.seed)
    clock = Clock()
    trainer = (ours if args.side == "ours" else trls)(args, env, clock)
    try:
        trainer.train()
        probes = [
            log["sampling/probe_difference"]
            for log in trainer.state.log_history
            if "sampling/probe_difference" in log
        ]
    finally:
        if args.side == "ours":
            trainer.close()
    newest = deque(clock.rewards, maxlen=10)
    return {
        "steps": len(clock.rewards),
        "seconds": round(clock.seconds, 1),
        "first": round(fmean(clock.rewards[:5]), 3),
        "last": round(fmean(newest), 3),
        "reached": fmean(newest) >= args.target,
        "difference": max(probes, default=0.0),
    }


def ours(args: argparse.Namespace, env: Any, clock: Any) -> Any:
    import verifiers as vf

    config = vf.GRPOConfig(
        output_dir="ours",
        seed=args.seed,
        max_steps=args.steps,
        max_images=1,
        train_vision_tower=True,
        rollout_device="cpu",
        num_batches_ahead=0,
        loss_type="dapo",
        **COMMON,
    )
    return vf.GRPOTrainer(args.model, env, config, callbacks=[clock])


def trls(args: argparse.Namespace, env: Any, clock: Any) -> Any:
    import io

    import trl
    from datasets import Dataset
    from PIL import Image
    from transformers import AutoConfig, AutoTokenizer

    from verifiers.images import image_bytes, image_urls
    from verifiers.train.image_processor import ImageProcessor

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    processor = ImageProcessor.load(args.model, tokenizer, AutoConfig.from_pretrained(args.model)).processor
    processor.chat_template = tokenizer.chat_template
    rows = []
    for row in env.get_dataset():
        (url,) = image_urls(row["prompt"])
        question = row["prompt"][0]["content"][1]["text"]
        image = Image.open(io.BytesIO(image_bytes(url)))
        rows.append({"prompt": [{"role": "user", "content": question}], "image": image, "answer": row["answer"]})

    def named(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(one[0]["content"].strip() == wanted) for one, wanted in zip(completions, answer, strict=True)]

    config = trl.GRPOConfig(
        output_dir="trl",
        seed=args.seed,
        max_steps=args.steps,
        gradient_accumulation_steps=1,
        loss_type="dapo",
        **COMMON,
    )
    return trl.GRPOTrainer(
        model=args.model,
        reward_funcs=named,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
        callbacks=[clock],
    )


if __name__ == "__main__":
    sys.exit(main())
