"""A model that sees, on a laptop: made on the spot, it learns to name the color of a noisy patch.

    python examples/color_patches.py [--seed 0] [--steps 120]

A Qwen3-VL of 0.9 million random parameters is shown a thousand answers of which one in ten is right and the others
are drawn, until it answers with a color's name; then GRPO trains it, tower included, on `environments/color_patches`,
with the server in the trainer's process. Prints the mean reward of the first and the last tenth of the steps;
`report.html` in `runs/color-patches/run` has the curve.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import fmean

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ENVIRONMENT = Path(__file__).parents[1] / "environments" / "color_patches"
SHARE_RIGHT = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/color-patches"))
    args = parser.parse_args()
    sys.path.insert(0, str(ENVIRONMENT))
    import color_patches
    import torch

    import verifiers as vf
    from verifiers.train.tiny_model.vision_model import make_vision_model, show_answers

    out: Path = args.output_dir
    started = time.perf_counter()
    make_vision_model(out / "start", seed=args.seed)
    dice, names = random.Random(args.seed), list(color_patches.COLORS)
    rows = color_patches.load_environment(num_train=1000, num_eval=1, seed=1000 + args.seed).get_dataset()
    answers = [answer if dice.random() < SHARE_RIGHT else dice.choice(names) for answer in rows["answer"]]
    show_answers(out / "start", list(zip(rows["prompt"], answers, strict=True)), seed=args.seed)
    print(f"the start was made in {time.perf_counter() - started:.0f} s", flush=True)
    config = vf.GRPOConfig(
        output_dir=str(out / "run"),
        seed=args.seed,
        max_steps=args.steps,
        max_images=1,
        train_vision_tower=True,
        rollout_device="cuda:0" if torch.cuda.is_available() else "cpu",
        bf16=False,
        num_batches_ahead=0,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=8,
        learning_rate=4e-4,
        lr_scheduler_type="linear",
        warmup_steps=5,
        adam_beta2=0.99,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = vf.GRPOTrainer(str(out / "start"), color_patches.load_environment(seed=args.seed), config)
    try:
        trainer.train()
    finally:
        trainer.close()
    logged = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in logged if "reward" in line]
    tenth = max(1, args.steps // 10)
    print(f"reward: {fmean(rewards[:tenth]):.3f} before, {fmean(rewards[-tenth:]):.3f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
