"""Whole runs with the policy's server on the trainer's own device. Stages `resume`, `overlap` and `reward`.

The task is to spell words backward, one letter a token. For `reward` the suite makes the model itself: random
weights, a supervised start until a third of the words is right (on the CPU, about a minute), then GRPO to a mean
reward over ten steps, by our trainer and by TRL's with its own generation, on the same device, with the same sizes
and learning rate.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import QWEN3_600M, Asked, Report, run_stage

WINDOW = 10
TARGET = 0.55
STEPS = 80


def words(count: int) -> list[dict[str, Any]]:
    from verifiers.train.tiny_model.warm_start import spelling_pairs

    return [{"question": question, "answer": untagged(answer)} for question, answer in spelling_pairs(count, 7)]


def untagged(text: str) -> str:
    return re.sub("</?answer>", "", text).strip()


def exact(completion: Any, answer: str) -> float:
    return float(untagged(completion[-1]["content"]) == answer)


def settings(given: dict[str, Any]) -> dict[str, Any]:
    device, size = given["device"], given["batch"]
    return {
        "output_dir": given["output_dir"],
        "seed": given["seed"],
        "max_steps": given["steps"],
        "learning_rate": 3e-4,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "max_completion_length": given["tokens"],
        "beta": 0.0,
        "logging_steps": 1,
        "save_strategy": "steps" if given["save_steps"] else "no",
        "save_steps": given["save_steps"] or 500,
        "use_cpu": device == "cpu",
        "bf16": False,
        "model_init_kwargs": {"dtype": given["dtype"]},
        "activation_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
    }


def make_callback(target: float) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        """A callback that prints a line a step, and ends the run at the target."""

        def __init__(self) -> None:
            self.rewards: list[float] = []
            self.started = time.perf_counter()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if not logs or "reward" not in logs:
                return
            self.rewards.append(logs["reward"])
            line = {
                "step": state.global_step,
                "seconds": time.perf_counter() - self.started,
                "reward": logs["reward"],
            }
            print(json.dumps(line), flush=True)
            newest = self.rewards[-WINDOW:]
            if len(newest) == WINDOW and sum(newest) / WINDOW >= target:
                control.should_training_stop = True

    return Steps()


def run_ours(given: dict[str, Any]) -> Any:
    import verifiers as vf

    env = vf.SingleTurnEnv(dataset=words(2000), rubric=vf.Rubric(funcs=[exact]))
    device = "cpu" if given["device"] == "cpu" else "cuda:0"
    args = vf.GRPOConfig(
        rollout_device=device, num_batches_ahead=given["ahead"], rollout_chunk_size=256, **settings(given)
    )
    trainer = vf.GRPOTrainer(given["model"], env, args, callbacks=[make_callback(given["target"])])
    trainer.train(resume_from_checkpoint=given["resume"])
    return trainer


def run_trl(given: dict[str, Any]) -> None:
    import datasets
    import trl
    from transformers import AutoTokenizer, PrinterCallback

    def rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [exact(completion, right) for completion, right in zip(completions, answer, strict=True)]

    rows = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in words(2000)
    ]
    trainer = trl.GRPOTrainer(
        given["model"],
        rewards,
        args=trl.GRPOConfig(**settings(given)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(given["model"], padding_side="left"),
        callbacks=[make_callback(given["target"])],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def run_side(given: dict[str, Any]) -> None:
    if given["side"] == "trl":
        run_trl(given)
        return
    trainer = run_ours(given)
    if given["save_steps"]:
        trainer.save_model(given["output_dir"])


def start(asked: Asked, **given: Any) -> subprocess.Popen[str]:
    """Begin a run in a process of its own; its steps are lines of JSON on its standard output."""
    base: dict[str, Any] = {"side": "ours", "device": asked.device, "seed": 0, "ahead": 0, "target": math.inf}
    base |= {"save_steps": 0, "resume": False, "tokens": 16, "batch": 16 if asked.tiny else 256, "dtype": "float32"}
    base |= given
    command = [sys.executable, __file__, json.dumps({"run": base})]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def steps_of(process: subprocess.Popen[str]) -> Any:
    """Yield what the process says of its steps; raise where it breaks off."""
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if line.startswith('{"step"'):
                yield json.loads(line)
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a run ended with exit code {process.returncode}")


def make_letters(asked: Asked, out: Path, *, large: bool) -> str:
    """Write a model of letters: small and untrained, or of the size of Qwen3-0.6B but for its vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from verifiers.train.tiny_model.char_model import make_model, make_tokenizer

    make_model(out, seed=0)
    if large and not asked.tiny:
        tokenizer = make_tokenizer()
        size = {**QWEN3_600M, "vocab_size": len(tokenizer), "max_position_embeddings": 2048}
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        Qwen3ForCausalLM(Qwen3Config(**size, **ends)).to(torch.bfloat16).save_pretrained(out)
    return str(out)


def check_resume(asked: Asked, report: Report) -> None:
    """Check that a run killed by kill -9 continues by the same command from its last checkpoint."""
    from safetensors.torch import load_file

    scratch, last = Path(asked.scratch), 5
    model = make_letters(asked, scratch / "model", large=False)
    common: dict[str, Any] = {"model": model, "steps": last, "save_steps": 2, "resume": True}
    whole = list(steps_of(start(asked, output_dir=str(scratch / "whole"), **common)))
    killed = start(asked, output_dir=str(scratch / "killed"), **common)
    for step in steps_of(killed):
        if step["step"] == 3:
            os.kill(killed.pid, signal.SIGKILL)
    resumed = list(steps_of(start(asked, output_dir=str(scratch / "killed"), **common)))
    steps = [step["step"] for step in resumed]
    report.check("kill -9 and resume", steps in ([3, 4, 5], [4, 5]) and len(whole) == last, steps_after_resume=steps)
    ends = [load_file(scratch / name / "model.safetensors") for name in ("whole", "killed")]
    gap = max((ends[0][name] - ends[1][name]).abs().max().item() for name in ends[0])
    if asked.device == "cpu":
        report.check("the weights are those of a run that was not killed", gap == 0.0, largest_difference=gap)
    else:
        report.result("largest difference to the weights of a run that was not killed", gap)


def measure_overlap(asked: Asked, report: Report) -> None:
    """Report steps per second with a block ahead beside strict turns, trainer and server on one device."""
    scratch, rates = Path(asked.scratch), {}
    model = make_letters(asked, scratch / "model", large=True)
    steps = 4 if asked.tiny else 8
    dtype = str(asked.dtype).removeprefix("torch.")
    for ahead in (0, 1):
        size = {"batch": 16 if asked.tiny else 64, "tokens": 16 if asked.tiny else 256}
        out = str(scratch / f"ahead-{ahead}")
        given = {"model": model, "steps": steps, "ahead": ahead, "output_dir": out, "dtype": dtype, **size}
        found = list(steps_of(start(asked, **given)))
        rates[ahead] = (len(found) - 2) / (found[-1]["seconds"] - found[1]["seconds"])
        report.result(f"steps per second, num_batches_ahead={ahead}", rates[ahead])
    report.result("speedup by a block ahead on one device", rates[1] / rates[0])


def measure_reward(asked: Asked, report: Report) -> None:
    """Report seconds to the target, by seed; null where it was not reached in the steps."""
    from verifiers.train.tiny_model.warm_start import make_tiny_model

    scratch = Path(asked.scratch)
    steps = 3 if asked.tiny else STEPS
    for seed in range(1 if asked.tiny else 3):
        if asked.tiny:
            model = make_letters(asked, scratch / "start-0", large=False)
        else:
            model = str(scratch / f"start-{seed}")
            made = make_tiny_model(model, seed=seed)
            report.result(f"supervised start, seed {seed}, accuracy", made.accuracy, seconds=made.seconds)
        for side in ("ours", "trl"):
            given = {"side": side, "model": model, "seed": seed, "steps": steps, "target": TARGET}
            out = str(scratch / f"{side}-{seed}")
            found = list(steps_of(start(asked, output_dir=out, ahead=1 if side == "ours" else 0, **given)))
            newest = [step["reward"] for step in found[-WINDOW:]]
            reached = len(newest) == WINDOW and sum(newest) / WINDOW >= TARGET
            end = found[-1]
            more = {
                "steps": end["step"],
                "seconds": round(end["seconds"], 2),
                "last_rewards": sum(newest) / len(newest),
            }
            value = end["seconds"] if reached else None
            report.result(f"{side}, seed {seed}, seconds to a reward of {TARGET}", value, **more)


def stage(asked: Asked, report: Report) -> None:
    name = json.loads(sys.argv[1])["stage"]
    {"resume": check_resume, "overlap": measure_overlap, "reward": measure_reward}[name](asked, report)


if __name__ == "__main__":
    if "run" in json.loads(sys.argv[1]):
        run_side(json.loads(sys.argv[1])["run"])
    else:
        run_stage(stage)
