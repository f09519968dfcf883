"""Peak memory and time of the log-probs of sampled tokens, by our fused head beside TRL's own.

    python benchmarks/log_probs.py [--vocabulary 151936] [--rows 4] [--completion 256] [--hidden 128]

A Qwen3 of one layer in float32 on one thread, so that nearly all memory is the head's; prompts are half as long as
completions. Each side runs in a process of its own: without gradient, as old and reference log-probs are computed,
and with forward and backward pass, entropies included, as a micro-batch is trained. Memory is the process's peak
during the pass less what it held when the pass began; gradients of the parameters are part of it. Linux only. Values
and gradients of both are compared.

Ends with one line of JSON: our peak over TRL's without gradient and with it, and the same of seconds.
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

SIDES = ("trl", "ours")
MEASURES = ("without_gradient", "with_gradient")


def make_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    size: dict[str, Any] = {"hidden_size": options.hidden, "intermediate_size": options.hidden, "head_dim": 32}
    size |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**size, vocab_size=options.vocabulary, tie_word_embeddings=True))


def run_side(options: argparse.Namespace) -> dict[str, float]:
    """Return megabytes, seconds, and two numbers to compare, of one pass."""
    import torch
    from trl.trainer.utils import add_fused_lm_head

    from verifiers.monitoring.stage_timer import peak_memory
    from verifiers.train.loss.logprobs import fuse_head

    model = make_model(options)
    outputs = ("log_probs", "entropy") if options.measure == "with_gradient" else ("log_probs",)
    if options.side == "trl":
        add_fused_lm_head(model, 0.7, outputs=outputs)
    else:
        fuse_head(model, 0.7, outputs=outputs)
    prompt = options.completion // 2
    ids = torch.randint(options.vocabulary, (options.rows, prompt + options.completion))
    labels = ids.clone()
    labels[:, :prompt] = -100
    # what libraries allocate once is not of the pass
    with torch.no_grad():
        model(input_ids=ids[:1, -4:], labels=labels[:1, -4:], fused_lm_head=True)
    peak = peak_memory(model.device)
    if peak is None:
        sys.exit("log_probs.py: peak memory is read from /proc, as Linux has it")
    # a peak since just before is what is held now; the process's own may be higher, of memory that was freed
    peak.take()
    before, started = peak.take(), time.perf_counter()
    with torch.set_grad_enabled(options.measure == "with_gradient"):
        found = model(input_ids=ids, labels=labels, fused_lm_head=True)
    if options.measure == "with_gradient":
        (found.log_probs.mean() + 0.1 * found.entropy.mean()).backward()
    seconds, grown = time.perf_counter() - started, peak.take() - before
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item() if gradients else 0.0
    total = found.log_probs.sum().item()
    return {"mb": grown / 2**20, "seconds": seconds, "log_probs": total, "gradient": norm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--completion", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(run_side(options)))
        return
    line = {}
    for measure in MEASURES:
        found = {}
        for side in SIDES:
            command = [sys.executable, *sys.argv, "--side", side, "--measure", measure]
            answered = subprocess.run(command, check=True, capture_output=True, text=True)
            found[side] = json.loads(answered.stdout)
            print(measure, side, {name: round(value, 4) for name, value in found[side].items()}, flush=True)
        for name in ("log_probs", "gradient"):
            assert abs(found["ours"][name] - found["trl"][name]) <= 1e-4 * abs(found["trl"][name]), name
        line[f"peak_memory_ratio_{measure}"] = round(found["ours"]["mb"] / found["trl"]["mb"], 3)
        line[f"seconds_ratio_{measure}"] = round(found["ours"]["seconds"] / found["trl"]["seconds"], 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
