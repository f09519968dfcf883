"""The inputs of both trainers: the task, the sizes, and the reports of their steps.

Two tasks: the demo of letters, and, where `asked["real"]` is "full" or "lora", the real model's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from grades import Grades
from transformers import TrainerCallback

SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 10,
    "per_device_train_batch_size": 128,
    "gradient_accumulation_steps": 2,
    "num_generations": 16,
    "max_completion_length": 12,
    "temperature": 1.0,
    "beta": 0.0,
    "logging_steps": 1,
    "save_strategy": "no",
    "eval_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "activation_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
}
"""16 prompts x 16 completions a step, one update each: the demo's, but for the schedule, which knows no last step."""

REAL: dict[str, Any] = {
    "learning_rate": 1e-5,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "max_grad_norm": 0.2,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 4,
    "num_generations": 4,
    "max_completion_length": 48,
}
"""8 prompts x 4 completions a step: `make demo`'s, but for the schedule."""

LORA: dict[str, Any] = {"r": 16, "alpha": 32, "learning_rate": 6e-4}


def settings(asked: dict[str, Any]) -> dict[str, Any]:
    """Return SETTINGS with what this run is asked: its directory, seed, steps, and a checkpoint every so many."""
    saves = {"save_strategy": "steps", "save_steps": asked["save_steps"]} if asked.get("save_steps") else {}
    own = {"output_dir": asked["output_dir"], "seed": asked["seed"], "max_steps": asked["max_steps"]}
    real = REAL if asked.get("real") else {}
    adapter = {"learning_rate": LORA["learning_rate"]} if asked.get("real") == "lora" else {}
    return {**SETTINGS, **real, **adapter, **own, **saves}


def peft_config(asked: dict[str, Any]) -> Any:
    """Return the adapter that is trained; None for all weights."""
    import verifiers as vf

    return vf.lora_defaults(LORA["r"], LORA["alpha"]) if asked.get("real") == "lora" else None


def graded(text: str, answer: str, asked: dict[str, Any]) -> float:
    """Return the reward: exact letters, or the share of the real model's fields that are right."""
    if not asked.get("real"):
        return float(text.strip() == answer.strip())
    from structured_output import fields

    found, wanted = fields(text), fields(answer)
    return sum(found.get(path) == value for path, value in wanted.items()) / max(len(found), len(wanted))


def grades_of(asked: dict[str, Any]) -> Grades | None:
    """Return where a run with faults notes its grades; None for a run without."""
    if "fail_share" not in asked:
        return None
    path = Path(asked["output_dir"]) / "grades.jsonl"
    return Grades(path, fail_share=asked["fail_share"], seed=asked["seed"])


def environment(asked: dict[str, Any]) -> Any:
    """Return the words of the demo, each right or wrong; or the real model's texts."""
    import verifiers as vf

    if asked.get("real"):
        return vf.load_environment("structured-output", level=1, num_eval=64)
    return vf.load_environment(
        "reasoning-gym-env",
        task="spell_backward",
        task_config={"min_word_len": 3, "max_word_len": 5},
        question_pattern=": [a-z]+$",
        num_train=8000,
        num_eval=1,
        reward="exact",
    )


class Told(TrainerCallback):
    """A callback that prints a line of JSON a step; ends the run at a mean reward of `target` over `window` steps."""

    def __init__(self, target: float, window: int) -> None:
        self._target, self._window = target, window
        self._rewards: list[float] = []
        self._started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not logs or "reward" not in logs:
            return
        self._rewards.append(logs["reward"])
        line = {
            "step": state.global_step,
            "seconds": time.perf_counter() - self._started,
            "reward": logs["reward"],
            "tokens": logs.get("completions/mean_length", 0.0)
            * args.per_device_train_batch_size
            * args.gradient_accumulation_steps,
        }
        print(json.dumps(line), flush=True)
        newest = self._rewards[-self._window :]
        if len(newest) == self._window and sum(newest) / self._window >= self._target:
            control.should_training_stop = True


def arguments() -> dict[str, Any]:
    """Return what the benchmark asks of a side, as JSON in the first argument."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    Path(asked["output_dir"]).mkdir(parents=True, exist_ok=True)
    return asked
