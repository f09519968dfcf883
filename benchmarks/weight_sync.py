"""Seconds of a weight push, by kind and size of the model, beside the cost of writing the same bytes to /dev/shm.

    python benchmarks/weight_sync.py [--sizes 1M 10M 60M 600M] [--servers embedded vllm] [--rounds 7]

A push is all that the trainer waits for: pause, write, load, forget old keys and values, name the version, resume.
The write beside it is one plain file of the same bytes on the same file system, alternating with the pushes; times
are medians. Models are random Qwen3 in bfloat16, so 60M parameters are 120 MB. vLLM also gets a LoRA adapter of rank
8. The NCCL kind needs GPUs, and is not measured.

Ends with one line of JSON: worst_ratio_to_write is the largest (seconds - 0.1) / write of the directory kind over
models of 100 MB and more; at most 3 is wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verifiers.train.processes.launch import launched_server
from verifiers.train.weight_sync.shared_directory import DirectorySync, LoraSync

os.environ.setdefault("VERIFIERS_VLLM_PYTHON", str(Path(__file__).parents[1] / ".venv-vllm/bin/python"))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
NAMES += ("head_dim", "vocab_size")
SIZES = {
    "1M": (128, 256, 4, 4, 2, 32, 2048),
    "10M": (256, 768, 8, 8, 4, 32, 6144),
    "60M": (512, 1536, 12, 8, 4, 64, 20480),
    "600M": (1024, 3072, 28, 16, 8, 128, 78000),
}
LARGE_BYTES = 100e6
FREE_S = 0.1


def make_model(directory: Path, size: str) -> Qwen3ForCausalLM:
    """Return a random model, written where servers can start from it."""
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(1000)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1").save_pretrained(directory)
    shape: dict[str, Any] = dict(zip(NAMES, SIZES[size], strict=True))
    ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    config = Qwen3Config(**shape, **ends, max_position_embeddings=512, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return model


def write_seconds(tensors: Mapping[str, torch.Tensor], directory: Path) -> float:
    """Write one file of the tensors' bytes, in one write for each tensor; return the seconds."""
    path = directory / "plain"
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def measure(
    push: Callable[[int], None], tensors: Mapping[str, torch.Tensor], directory: Path, rounds: int
) -> tuple[float, float]:
    """Push and write plainly, alternately; return the median seconds of each, not counting the first."""
    pushes, writes = [], []
    for version in range(rounds + 1):
        writes.append(write_seconds(tensors, directory))
        started = time.perf_counter()
        push(version)
        pushes.append(time.perf_counter() - started)
    return statistics.median(pushes[1:]), statistics.median(writes[1:])


def show(kind: str, size: str, num_bytes: int, seconds: float, write_s: float) -> float:
    ratio = (seconds - FREE_S) / write_s
    pushed, written = num_bytes / seconds / 1e9, num_bytes / write_s / 1e9
    print(
        f"{kind:<20} {size:>5} {num_bytes / 1e6:>8,.1f} MB  push {seconds:7.3f} s {pushed:6.2f} GB/s  "
        f"write {write_s:6.3f} s {written:6.2f} GB/s  (push - 0.1 s) / write {ratio:6.2f}",
        flush=True,
    )
    return ratio


def measure_size(size: str, servers: list[str], rounds: int, shared: Path) -> list[tuple[int, float]]:
    """Measure the directory kind on each server; return (bytes, ratio) for each."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        model = make_model(directory, size)
        tensors: dict[str, torch.Tensor] = {name: t.detach() for name, t in model.state_dict().items()}
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        for name in servers:
            args = ["--dtype", "bfloat16", "--threads", "1", "--max-model-len", "256"]
            if name == "vllm":
                args += ["--enable-lora", "--max-lora-rank", "8"]
            with launched_server(name, str(directory), args=args, start_timeout_s=300.0) as url:
                sync = DirectorySync(url, str(shared))
                result = measure(partial(sync.push, tensors.items()), tensors, shared, rounds)
                sync.close()
                found.append((num_bytes, show(f"directory, {name}", size, num_bytes, *result)))
                if name == "vllm":
                    measure_adapter(model, url, size, rounds, shared)
    return found


def measure_adapter(model: Qwen3ForCausalLM, url: str, size: str, rounds: int, shared: Path) -> None:
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    policy: Any = get_peft_model(model, config)
    sync = LoraSync(url, str(shared))

    def push(version: int) -> None:
        sync.push(sync.tensors_of(policy).items(), version)

    plain = {name: tensor.detach().contiguous() for name, tensor in sync.tensors_of(policy).items()}
    result = measure(push, plain, shared, rounds)
    sync.close()
    policy.unload()
    show("lora, vllm", size, sum(t.numel() * t.element_size() for t in plain.values()), *result)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--servers", nargs="+", choices=("embedded", "vllm"), default=["embedded", "vllm"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    parent = "/dev/shm" if Path("/dev/shm").is_dir() else None
    ratios = []
    with tempfile.TemporaryDirectory(dir=parent) as shared:
        if hasattr(os, "getloadavg"):
            print(f"in {shared}, load {os.getloadavg()[0]:.1f}")
        for size in args.sizes:
            found = measure_size(size, args.servers, args.rounds, Path(shared))
            ratios += [ratio for num_bytes, ratio in found if num_bytes >= LARGE_BYTES]
    print(json.dumps({"worst_ratio_to_write": round(max(ratios), 3) if ratios else None}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
