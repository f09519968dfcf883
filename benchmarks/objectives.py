"""What objectives beside the group's reward give: credit by turn, a teacher, and demonstrations.

    python benchmarks/objectives.py [--part turns|distillation|demonstrations] [--seeds 5]

Turns: in each of four turns the game names a kind of character (capitals, small letters, digits, others), and only a
turn that answers with such a one is rewarded. A random model of letters (0.3 M parameters) is trained from the same
weights on the same prompts: once by the rollout's sum of rewards, and once by turn (`turn_discount=0.0`, each turn's
own reward). `turn_credit_gain` is the share of right turns over the last ten steps by turn, less that by rollout.

Distillation: the model that `make demo-tiny` begins with is trained until it spells 0.85 of held-out words backward,
once by GRPO alone and once with its trained model as a teacher (`teacher_url`, `teacher_top_k=8`, beside the reward).
`distillation_steps_ratio` is the steps with the teacher over those without, a mean over seeds.

Demonstrations: the same with 100 training words and their answers, of which an update has 16 beside its 256 rollouts.

Each ends with one line of JSON: the figure, its 95 % interval by Student's t, and both sides of each seed. Server and
trainer share a process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import operator
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
TURN_STEPS = 120
SIDES = {
    "turns": ("by_turn", "by_rollout"),
    "distillation": ("with_teacher", "alone"),
    "demonstrations": ("with_demonstrations", "alone"),
}
SHOWN = 100
COMMON: dict[str, Any] = {
    "rollout_device": "cpu",
    "num_batches_ahead": 0,
    "gradient_accumulation_steps": 1,
    "beta": 0.0,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
}
REACHED = 0.85
MOST_STEPS = 800


def play_game(side: str, seed: int) -> float:
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
            max_steps=TURN_STEPS,
            learning_rate=1e-3,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=1,
            turn_discount=0.0 if side == "by_turn" else None,
            logging_steps=1,
            seed=seed,
            **COMMON,
        )
        trainer = vf.GRPOTrainer(f"{scratch}/model", env, args)
        trainer.train()
        found = [log["rewards/sum_of_turns/mean"] for log in trainer.state.log_history if "reward" in log]
    return fmean(found[-10:]) / TURNS


def spell_backward(side: str, seed: int) -> float:
    """Train until enough held-out words are right, and return the steps."""
    from transformers import TrainerCallback

    import verifiers as vf
    from verifiers.train.processes.launch import launched_server

    class StopsWhenReached(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
            control.should_training_stop = metrics["eval_reward"] >= REACHED

    demo = Path("runs/demo-tiny")
    env = vf.load_environment(
        "reasoning-gym-env",
        task="spell_backward",
        task_config={"min_word_len": 3, "max_word_len": 5},
        question_pattern=": [a-z]+$",
        num_train=8000,
        num_eval=400,
        reward="exact",
    )
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        options: dict[str, Any] = {}
        if side == "with_demonstrations":
            shown = Path(scratch, "shown.jsonl")
            rows = env.get_dataset().select(range(SHOWN))
            said = [[*row["prompt"], {"role": "assistant", "content": row["answer"]}] for row in rows]
            shown.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said))
            options = {"demonstrations": str(shown), "demonstrations_share": 1 / 16}
        if side == "with_teacher":
            served = launched_server("embedded", str(demo / "trained"), args=["--threads", "1"])
            options = {"teacher_url": stack.enter_context(served), "teacher_top_k": 8}
        args = vf.GRPOConfig(
            scratch,
            max_steps=MOST_STEPS,
            learning_rate=3e-4,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            per_device_train_batch_size=256,
            num_generations=16,
            max_completion_length=12,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=10,
            seed=seed,
            **options,
            **COMMON,
        )
        trainer = vf.GRPOTrainer(str(demo / "start"), env, args, callbacks=[StopsWhenReached()])
        trainer.train()
    rewards = [log["eval_reward"] for log in trainer.state.log_history if "eval_reward" in log]
    if rewards[-1] < REACHED:
        sys.exit(f"{side}, seed {seed}: {rewards[-1]} of the words are right after {MOST_STEPS} steps, not {REACHED}")
    return float(trainer.state.global_step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=SIDES, default=None, help="one of them; all when left out")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        train = play_game if options.side in SIDES["turns"] else spell_backward
        print(json.dumps(train(options.side, options.seed)))
        return
    for part in [options.part] if options.part else SIDES:
        compare(part, options.seeds)


def compare(part: str, seeds: int) -> None:
    found: dict[str, list[float]] = {side: [] for side in SIDES[part]}
    for seed in range(seeds):
        for side in found:
            command = [sys.executable, *sys.argv, "--side", side, "--seed", str(seed)]
            answered = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[side].append(json.loads(answered.stdout.splitlines()[-1]))
            print(side, seed, round(found[side][-1], 3), flush=True)
    from verifiers.evals.statistics import t_quantile

    name = "turn_credit_gain" if part == "turns" else f"{part}_steps_ratio"
    combine = operator.sub if part == "turns" else operator.truediv
    each = list(map(combine, *found.values()))
    mean, half = fmean(each), math.inf
    if seeds > 1:
        half = t_quantile(0.975, seeds - 1) * stdev(each) / seeds**0.5
    line = {name: round(mean, 3), "interval": [round(mean - half, 3), round(mean + half, 3)]}
    print(json.dumps({**line, **{side: [round(one, 3) for one in values] for side, values in found.items()}}))


if __name__ == "__main__":
    main()
