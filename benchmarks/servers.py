"""Tokens per second of vLLM and of the embedded server over HTTP: the same model, the same requests, the same CPU.

    python benchmarks/servers.py [--requests 256] [--rounds 5] [--model small|large]

Both hold the same random model in float32 on one CPU thread, and take turns round by round; rates are medians over
rounds. The requests are those of `benchmarks/embedded_server.py`: prompts of 16 to 96 tokens, completions of 16 to
96, drawn by seed, 64 in flight, none ends early, answered with token ids and log-probs. Neither reuses prefixes. vLLM
runs from `.venv-vllm`, or the interpreter that VERIFIERS_VLLM_PYTHON names (see servers/vllm/install.sh).

It says nothing of GPUs, where vLLM is the server to use. Ends with one line of JSON: embedded_ratio_to_vllm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from embedded_server import SIZES, Served, compare, embedded, make_model, workload

from verifiers.train.processes.launch import launched_server

os.environ.setdefault("VERIFIERS_VLLM_PYTHON", str(Path(__file__).parents[1] / ".venv-vllm/bin/python"))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

FIELDS = {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}


@contextlib.contextmanager
def vllm(directory: Path) -> Iterator[str]:
    """Start vLLM in float32, without prefix cache."""
    args = ["--served-model-name", "m", "--threads", "1", "--dtype", "float32", "--max-model-len", "1024"]
    args += ["--no-enable-prefix-caching", "--max-num-seqs", "64"]
    with launched_server("vllm", str(directory), args=args, start_timeout_s=300.0) as url:
        yield url.removesuffix("/v1")


def benchmark(size: str, count: int, rounds: int) -> dict[str, float]:
    requests = workload(count, 16, 96)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        directory = Path(scratch) / "model"
        make_model(directory, size)
        theirs = stack.enter_context(vllm(directory))
        ours = stack.enter_context(embedded(directory, 0))
        load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
        print(f"{size}: {count} requests a round, {rounds} rounds{load}")
        medians = compare(
            {
                "vLLM": (Served(theirs, "m", FIELDS).run, requests),
                "embedded server": (Served(ours, "m", FIELDS).run, requests),
            },
            rounds,
        )
    return {"embedded_ratio_to_vllm": round(medians["embedded server"] / medians["vLLM"], 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=tuple(SIZES), default="small")
    args = parser.parse_args()
    print(json.dumps(benchmark(args.model, args.requests, args.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
