"""Savings of sorting by length and of a token budget: padding, time and memory of training one block.

    python benchmarks/padding.py [--completions 128] [--rounds 3] [--budget 4096]

Three ways to split a block into micro-batches, each in a process of its own, on the same rows, the same
model and one thread:

- shuffled: rows in random order, `per_device_train_batch_size` of them in a micro-batch;
- sorted: what the trainer does as it comes, as many micro-batches, packed by length and padded on the right alone;
- budget: the trainer with `max_tokens_per_micro_batch`.

Two distributions of lengths: log-normal completions from 16 to 512 tokens (median 100, sigma 1) after prompts of 20
to 60; and answers of 3 to 12 tokens after prompts of 80 to 90, as in the demo. One update a block: the trainer's own
loss, forward and backward, of every micro-batch, and an optimizer step. Seconds are the median over rounds, in which
the sides take turns; memory is how far the process's peak grew while it trained.

Ends with one line of JSON: share of padding before (shuffled) and after (sorted), speedup and peak_memory_ratio
against shuffled; `_budget` with the budget, `_demo` for the demo's lengths. Gradients are compared first.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# benchmarks/trl.py stands beside this file and would be taken for the library
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().with_name("gpu")))
from common import make_block

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIDES = ("shuffled", "sorted", "budget")
GENERATIONS = 8
ROWS_PER_PASS = 16
VOCABULARY = 512


def lengths(kind: str, completions: int) -> list[tuple[int, int]]:
    """Return the tokens (prompt, completion) of each rollout; the prompts of a group are equal."""
    draw = random.Random(kind)
    found = []
    for _ in range(completions // GENERATIONS):
        prompt = draw.randint(20, 60) if kind == "lognormal" else draw.randint(80, 90)
        for _ in range(GENERATIONS):
            tokens = round(100 * math.exp(draw.gauss(0.0, 1.0))) if kind == "lognormal" else draw.randint(3, 12)
            found.append((prompt, min(512, max(16, tokens)) if kind == "lognormal" else tokens))
    return found


def make_trainer(scratch: str, completions: int, budget: int | None) -> Any:
    """Return the trainer around a model of 0.9 million parameters; it never meets a server."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    import verifiers as vf
    from verifiers.inference.endpoint import Endpoint
    from verifiers.train.config import GRPOConfig
    from verifiers.train.trainer import GRPOTrainer

    words = {f"w{index}": index for index in range(VOCABULARY)}
    letters = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="w0", eos_token="w0")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
    size |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    policy = Qwen3ForCausalLM(Qwen3Config(**size, pad_token_id=0, eos_token_id=0, bos_token_id=None))
    questions = [{"question": "w1", "answer": "w2"}] * completions
    args = GRPOConfig(
        scratch,
        server_url="http://127.0.0.1:9/v1",
        max_steps=1,
        per_device_train_batch_size=ROWS_PER_PASS,
        gradient_accumulation_steps=completions // ROWS_PER_PASS,
        num_generations=GENERATIONS,
        max_completion_length=512,
        max_tokens_per_micro_batch=budget,
        share_prefixes=False,
        use_cpu=True,
        bf16=False,
    )
    env = vf.SingleTurnEnv(dataset=questions, rubric=vf.Rubric(funcs=[never_called]))
    return GRPOTrainer(policy, env, args, tokenizer, client=Endpoint("http://127.0.0.1:9/v1"))


def never_called(completion: Any) -> float:
    raise AssertionError("the block is scored already")


def cut(trainer: Any, block: Any, side: str) -> Any:
    """Return a block's micro-batches by micro-step and rank."""
    from unittest.mock import patch

    from verifiers.train.batching.micro_batches import MicroBatchLimit, keep_micro_steps
    from verifiers.train.batching.training_block import build_training_block

    def shuffled(lengths: list[int], micro_steps: int, plan: Any, args: Any) -> Any:
        return keep_micro_steps([1] * len(lengths), micro_steps, 1, MicroBatchLimit())

    if side != "shuffled":
        return build_training_block(block, trainer.plan, trainer.args).micro_steps
    with patch("verifiers.train.batching.training_block._packing", shuffled):
        return build_training_block(block, trainer.plan, trainer.args).micro_steps


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def train(side: str, kind: str, completions: int, budget: int) -> dict[str, Any]:
    """Train two updates of a side; the second is timed."""
    import torch

    from verifiers.train.batching.micro_batches import packing_metrics

    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer(scratch, completions, budget if side == "budget" else None)
    batches = cut(trainer, make_block(lengths(kind, completions), GENERATIONS, VOCABULARY), side)
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.model.train()
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.0)
    before, seconds = peak_bytes(), []
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        started = time.perf_counter()
        for (micro_batches,) in batches:
            trainer.compute_loss(trainer.model, {"micro_batches": micro_batches}).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trainer.model.parameters() if p.grad is not None))
    return {
        "seconds": min(seconds),
        "peak_mib": (peak_bytes() - before) / 2**20,
        "gradient_norm": norm,
        **packing_metrics(batches),
    }


def compare(kind: str, completions: int, budget: int, rounds: int) -> dict[str, dict[str, float]]:
    """Run every side in each round; return the medians over rounds, by side."""
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES[number % 3 :] + SIDES[: number % 3]:
            command = [sys.executable, __file__, "--side", side, "--kind", kind, "--completions", str(completions)]
            done = subprocess.run([*command, "--budget", str(budget)], capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            measured[side].append(json.loads(done.stdout.splitlines()[-1]))
    found = {
        side: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        for side, runs in measured.items()
    }
    for side, medians in found.items():
        print(f"{kind:<10}{side:<10}" + "  ".join(f"{k} {v:.4g}" for k, v in medians.items()), file=sys.stderr)
        assert math.isclose(medians["gradient_norm"], found["shuffled"]["gradient_norm"], rel_tol=1e-3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, default=128, help="Completions of the block.")
    parser.add_argument("--rounds", type=int, default=3, help="Runs of each side.")
    parser.add_argument("--budget", type=int, default=4096, help="max_tokens_per_micro_batch of the third side.")
    parser.add_argument("--side", choices=SIDES, help="Measure this side in this process.")
    parser.add_argument("--kind", choices=("lognormal", "demo"), default="lognormal", help="Lengths of that side.")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(train(args.side, args.kind, args.completions, args.budget)))
        return
    result: dict[str, float] = {}
    for kind, suffix in (("lognormal", ""), ("demo", "_demo")):
        found = compare(kind, args.completions, args.budget, args.rounds)
        base = found["shuffled"]
        result[f"padding_before{suffix}"] = base["rows/padding_share"]
        for side, tail in (("sorted", ""), ("budget", "_budget")):
            result[f"padding_after{tail}{suffix}"] = found[side]["rows/padding_share"]
            result[f"speedup{tail}{suffix}"] = base["seconds"] / found[side]["seconds"]
            result[f"peak_memory_ratio{tail}{suffix}"] = found[side]["peak_mib"] / base["peak_mib"]
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
