"""How much sooner credit by turn learns a game of four turns than credit by rollout.

    python benchmarks/objectives.py [--seeds 5] [--steps 40]

In each turn the game names a kind of character (capitals, small letters, digits, others), and only a turn that
answers with such a one is rewarded. A random model of letters (0.3 M parameters) is trained from the same weights on
the same prompts: once by the rollout's sum of rewards, and once by turn (`turn_discount=0.0`, each turn's own
reward). Server and trainer share the process.

Ends with one line of JSON: `turn_credit_gain` is the share of right turns over the last ten steps by turn, less that
by rollout, mean over the seeds; `interval` is its 95 % interval by Student's t; `by_turn` and `by_rollout` are the
shares of each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

# benchmarks/trl.py stands beside this file and would be taken for the library
sys.path.remove(str(Path(__file__).resolve().parent))

os.environ.setdefault("HF_HUB_OFFLINE", "1")

KINDS: dict[str, Callable[[str], bool]] = {
    "C": str.isupper,
    "s": str.islower,
    "1": str.isdigit,
    "?": lambda text: not text.isalnum(),
}
TURNS = 4
SIDES = ("by_turn", "by_rollout")


def run_side(side: str, seed: int, steps: int) -> float:
    """Train, and return the share of right turns over the last ten steps."""
    import random

    import verifiers as vf
    from verifiers.train.tiny_model.char_model import make_model

    class Game(vf.MultiTurnEnv):
        async def env_response(self, messages: vf.Messages, state: vf.State, **_: Any) -> vf.Messages:
            return [{"role": "user", "content": state["answer"][state["turn"]]}]

    def right(completion: vf.Messages, answer: str) -> list[float]:
        said = [message["content"] for message in completion if message["role"] == "assistant"]
        return [float(KINDS[kind](text[:1])) for text, kind in zip(said, answer, strict=True)]

    def sum_of_turns(completion: vf.Messages, answer: str) -> float:
        return sum(right(completion, answer))

    draw = random.Random(seed)
    words = ["".join(draw.choices([*KINDS], k=TURNS)) for _ in range(500)]
    rows = [{"prompt": [{"role": "user", "content": word[0]}], "answer": word} for word in words]
    funcs = [vf.turn_reward(right), sum_of_turns]
    rubric = vf.Rubric(funcs=funcs, weights=[1.0, 0.0] if side == "by_turn" else [0.0, 1.0])
    env = Game(dataset=rows, rubric=rubric, max_turns=TURNS, sampling_args={"max_tokens": 1})
    with tempfile.TemporaryDirectory() as scratch:
        make_model(f"{scratch}/model", seed=seed)
        args = vf.GRPOConfig(
            f"{scratch}/run",
            rollout_device="cpu",
            num_batches_ahead=0,
            max_steps=steps,
            learning_rate=1e-3,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=1,
            num_generations=8,
            max_completion_length=1,
            beta=0.0,
            turn_discount=0.0 if side == "by_turn" else None,
            logging_steps=1,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            seed=seed,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = vf.GRPOTrainer(f"{scratch}/model", env, args)
        trainer.train()
        found = [log["rewards/sum_of_turns/mean"] for log in trainer.state.log_history if "reward" in log]
    return fmean(found[-10:]) / TURNS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps({"share": run_side(options.side, options.seed, options.steps)}))
        return
    shares: dict[str, list[float]] = {side: [] for side in SIDES}
    for seed in range(options.seeds):
        for side in SIDES:
            command = [sys.executable, *sys.argv, "--side", side, "--seed", str(seed)]
            answered = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            shares[side].append(json.loads(answered.stdout.splitlines()[-1])["share"])
            print(side, seed, round(shares[side][-1], 3), flush=True)
    from verifiers.evals.statistics import t_quantile

    gains = [one - other for one, other in zip(shares["by_turn"], shares["by_rollout"], strict=True)]
    half = t_quantile(0.975, len(gains) - 1) * stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    gain = fmean(gains)
    line = {"turn_credit_gain": round(gain, 3), "interval": [round(gain - half, 3), round(gain + half, 3)]}
    print(json.dumps({**line, **{side: [round(one, 3) for one in shares[side]] for side in SIDES}}))


if __name__ == "__main__":
    main()
