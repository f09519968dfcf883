"""One prompt and its completions as rows of their own, and with the prompt computed once, beside TRL's rows.

    python benchmarks/prefixes.py [--prompt 512] [--completions 16] [--length 64] [--hidden 384] [--layers 8]
        [--rounds 3]

A Qwen3 in float32 on one thread. Every pass is forward and backward with log-probs and entropies of the completions,
in a process of its own; the sides take turns, and each counts with its fastest pass. Memory is the process's peak
during the pass less what it held when the pass began; gradients are part of it. Log-probs and gradients of the sides
are compared. The same again with prompts of 32 tokens. Linux only.

Ends with one line of JSON: `tokens_ratio`, `wall_ratio` and `memory_ratio` of shared over separate rows, `trl_ratio`
of seconds over TRL's own call, and `short_ratio` of seconds with the short prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# benchmarks/trl.py stands beside this file and would be taken for the library
sys.path.remove(str(Path(__file__).resolve().parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SIDES = ("trl", "separate", "shared")
SHORT = 32


def make_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "head_dim": 64}
    size |= {"num_hidden_layers": options.layers, "num_attention_heads": 6, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**size, vocab_size=8192, tie_word_embeddings=True))


def run_side(options: argparse.Namespace) -> dict[str, float]:
    """Return tokens, seconds and megabytes of one pass, and two numbers to compare."""
    import torch
    from trl.trainer.utils import add_fused_lm_head

    from verifiers.monitoring.stage_timer import peak_memory
    from verifiers.train.cpu_linear import use_onednn
    from verifiers.train.loss.logprobs import fuse_head
    from verifiers.train.loss.prefixes import share_prefixes

    model, outputs = make_model(options), ("log_probs", "entropy")
    if options.side == "trl":
        add_fused_lm_head(model, 0.7, outputs=outputs)
    else:
        fuse_head(model, 0.7, outputs=outputs)
        use_onednn(model)
    prompt = torch.randint(8192, (1, options.prompt)).expand(options.completions, -1)
    ids = torch.cat([prompt, torch.randint(8192, (options.completions, options.length))], 1)
    mask, labels = torch.ones_like(ids), ids.clone()
    labels[:, : options.prompt] = -100
    # what libraries allocate once is not of the pass
    with torch.no_grad():
        model(input_ids=ids[:1, -4:], labels=labels[:1, -4:], fused_lm_head=True)
    peak = peak_memory(model.device)
    if peak is None:
        sys.exit("prefixes.py: peak memory is read from /proc, as Linux has it")
    peak.take()
    before, started = peak.take(), time.perf_counter()
    shared = share_prefixes(ids, mask, least_saved=0.0) if options.side == "shared" else None
    inputs = {"input_ids": ids, "attention_mask": mask} if shared is None else shared.inputs()
    found = model(**inputs, labels=labels, fused_lm_head=True)
    (found.log_probs.mean() + 0.1 * found.entropy.mean()).backward()
    seconds, grown = time.perf_counter() - started, peak.take() - before
    norm = torch.stack([one.grad.norm() for one in model.parameters() if one.grad is not None]).norm().item()
    tokens = inputs["input_ids"].numel()
    total = found.log_probs.sum().item()
    return {"tokens": tokens, "seconds": seconds, "mb": grown / 2**20, "log_probs": total, "gradient": norm}


def compare(prompt: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return what each side measured with prompts of so many tokens: of its passes the fastest."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for side in SIDES:
            command = [sys.executable, *sys.argv, "--side", side, "--prompt", str(prompt)]
            answered = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(answered.stdout)
            print(f"prompts of {prompt}", side, {name: round(value, 4) for name, value in found.items()}, flush=True)
            best[side] = min(best.get(side, found), found, key=lambda one: one["seconds"])
    for name in ("log_probs", "gradient"):
        for side in ("trl", "shared"):
            assert abs(best[side][name] - best["separate"][name]) <= 1e-4 * abs(best["separate"][name]), name
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options)))
        return
    line = {}
    long, short = compare(options.prompt, options.rounds), compare(SHORT, options.rounds)
    for name, measure in (("tokens_ratio", "tokens"), ("wall_ratio", "seconds"), ("memory_ratio", "mb")):
        line[name] = round(long["shared"][measure] / long["separate"][measure], 3)
    line["trl_ratio"] = round(long["shared"]["seconds"] / long["trl"]["seconds"], 3)
    line["short_ratio"] = round(short["shared"]["seconds"] / short["separate"]["seconds"], 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
