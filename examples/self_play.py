"""Self-play on a laptop: one small model proposes words and spells them backward, each role with its own reward.

    python examples/self_play.py [--seed 0] [--steps 100]

A model of letters is shown 400 answers of either kind, until it spells about a third of other words backward; then
GRPO trains both roles at once on `environments/propose_solve`. Prints each role's reward over the first and the last
tenth of the steps; `report.html` in `runs/propose-solve/run` has both curves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import sys
from pathlib import Path
from statistics import fmean

# one OpenMP thread a side: the trainer's and the server's teams would otherwise fight for two cores
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ENVIRONMENT = Path(__file__).parents[1] / "environments" / "propose_solve"
SHOWN, HELD_OUT = 400, 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/propose-solve"))
    args = parser.parse_args()
    sys.path.insert(0, str(ENVIRONMENT))
    import propose_solve
    import torch

    import verifiers as vf
    from verifiers.train.processes.launch import launched_server
    from verifiers.train.tiny_model.char_model import make_model
    from verifiers.train.tiny_model.warm_start import warm_start

    torch.set_num_threads(1)
    out: Path = args.output_dir
    out.mkdir(parents=True, exist_ok=True)
    proposals, solutions = answers(random.Random(args.seed), SHOWN + HELD_OUT)
    make_model(out / "model", seed=args.seed)
    shown = proposals[:SHOWN] + solutions[:SHOWN]
    start = warm_start(out / "model", out / "start", shown=shown, eval_pairs=solutions[SHOWN:], seed=args.seed)
    print(f"{start.steps} supervised steps, {start.seconds:.0f} s: {start.accuracy:.3f} of other words", flush=True)
    config = vf.GRPOConfig(
        output_dir=str(out / "run"),
        seed=args.seed,
        max_steps=args.steps,
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        per_device_train_batch_size=128,
        num_generations=16,
        num_batches_ahead=1,
        max_completion_length=12,
        logging_steps=1,
        save_strategy="no",
    )
    with launched_server("embedded", str(out / "start"), args=["--threads", "1"], log_path=out / "server.log") as url:
        config.server_url = url
        trainer = vf.GRPOTrainer(str(out / "start"), propose_solve.load_environment(), config)
        try:
            trainer.train()
        finally:
            trainer.close()
    logged = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    tenth = max(1, args.steps // 10)
    for role in ("proposer", "solver"):
        rewards = [line[f"roles/{role}/reward"] for line in logged if f"roles/{role}/reward" in line]
        print(f"{role}: {fmean(rewards[:tenth]):.3f} before, {fmean(rewards[-tenth:]):.3f} after")
    return 0


def answers(rng: random.Random, count: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return (question, answer) pairs of a proposer and of a solver, of words that nobody has to know."""
    from propose_solve import LONGEST, PROPOSE, SHORTEST, SOLVE

    words = ["".join(rng.sample(string.ascii_lowercase, rng.randint(SHORTEST, LONGEST))) for _ in range(2 * count)]
    proposals = [(PROPOSE.format(first=word[0], last=word[-1]), word) for word in words[:count]]
    return proposals, [(SOLVE.format(word=word), word[::-1]) for word in words[count:]]


if __name__ == "__main__":
    sys.exit(main())
