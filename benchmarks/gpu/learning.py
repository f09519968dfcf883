"""Whole runs, on words to spell backward, with the server on the trainer's device. Stages `resume` and `overlap`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import QWEN3_600M, Asked, Report, run_stage


def words(count: int) -> list[dict[str, Any]]:
    from verifiers.train.tiny_model.warm_start import spelling_pairs

    return [{"question": question, "answer": untagged(answer)} for question, answer in spelling_pairs(count, 7)]


def untagged(text: str) -> str:
    return re.sub("</?answer>", "", text).strip()


def exact(completion: Any, answer: str) -> float:
    return float(untagged(completion[-1]["content"]) == answer)


def run_side(given: dict[str, Any]) -> None:
    """Train as `given` says, and print a line of JSON a step."""
    from transformers import TrainerCallback

    import verifiers as vf

    started = time.perf_counter()

    class Steps(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs:
                line = {"step": state.global_step, "seconds": time.perf_counter() - started}
                print(json.dumps(line), flush=True)

    args = vf.GRPOConfig(
        given["output_dir"],
        rollout_device="cpu" if given["device"] == "cpu" else "cuda:0",
        num_batches_ahead=given["ahead"],
        max_steps=given["steps"],
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        per_device_train_batch_size=given["batch"],
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=given["tokens"],
        beta=0.0,
        logging_steps=1,
        save_strategy="steps" if given["save_steps"] else "no",
        save_steps=given["save_steps"] or 500,
        use_cpu=given["device"] == "cpu",
        bf16=False,
        model_init_kwargs={"dtype": given["dtype"]},
        activation_checkpointing=False,
        report_to="none",
        disable_tqdm=True,
    )
    env = vf.SingleTurnEnv(dataset=words(2000), rubric=vf.Rubric(funcs=[exact]))
    trainer = vf.GRPOTrainer(given["model"], env, args, callbacks=[Steps()])
    trainer.train(resume_from_checkpoint=given["resume"])
    if given["save_steps"]:
        trainer.save_model(given["output_dir"])


def start(asked: Asked, **given: Any) -> subprocess.Popen[str]:
    """Begin a run in a process of its own; its steps are lines of JSON on its standard output."""
    base: dict[str, Any] = {"device": asked.device, "ahead": 0, "save_steps": 0, "resume": False}
    base |= {"tokens": 16, "batch": 16 if asked.tiny else 256, "dtype": "float32", **given}
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
    steps = 4 if asked.tiny else 5
    dtype = str(asked.dtype).removeprefix("torch.")
    for ahead in (0, 1):
        size = {"batch": 16 if asked.tiny else 64, "tokens": 16 if asked.tiny else 128}
        out = str(scratch / f"ahead-{ahead}")
        given = {"model": model, "steps": steps, "ahead": ahead, "output_dir": out, "dtype": dtype, **size}
        found = list(steps_of(start(asked, **given)))
        rates[ahead] = (len(found) - 2) / (found[-1]["seconds"] - found[1]["seconds"])
        report.result(f"steps per second, num_batches_ahead={ahead}", rates[ahead])
    report.result("speedup by a block ahead on one device", rates[1] / rates[0])


def stage(asked: Asked, report: Report) -> None:
    name = json.loads(sys.argv[1])["stage"]
    {"resume": check_resume, "overlap": measure_overlap}[name](asked, report)


if __name__ == "__main__":
    if "run" in json.loads(sys.argv[1]):
        run_side(json.loads(sys.argv[1])["run"])
    else:
        run_stage(stage)
