"""The overlap of generation and training, against taking strict turns.

    python benchmarks/overlap.py [--seconds 1.0] [--steps 24] [--sigma 1.0] [--ahead 2]

The rollout server is a process of its own on loopback that answers after an injected latency; the trainer is a real
`GRPOTrainer` (collation, loss, backward, optimizer, weight push and probe) on a model so small that its work is
next to nothing, and sleeps until each micro-step has lasted its part of `--seconds`. So both sides need the same
time, as a server and a trainer on devices of their own may, and neither takes the other's processor. The probe after
each push asks for 8 tokens of the 64 that a rollout may have, and is delayed in that proportion.

Two workloads: every rollout takes `--seconds`; and latencies are log-normal (sigma 1: the slowest of a block of 32
takes some eight times the median), scaled so that a block's slowest takes `--seconds` on average. A rollout's latency
follows from its sampling seed, so both sides see the same draws.

Strict turns are num_batches_ahead=0: generate, train, generate. The other side is num_batches_ahead=2, as it comes.
Rates are taken from the end of the first step to the end of the last; the bound is (g + t) / max(g, t) with g and t
as strict turns measured them.

Ends with one line of JSON: speedup, speedup_lognormal (steps per second over strict turns), efficiency (speedup over
its bound), each of a whole run from its start too, and streaming's alone, on policy (num_batches_ahead=0).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# benchmarks/trl.py would stand before the library of its name
sys.path.remove(str(Path(__file__).resolve().parent))

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROLLOUT_TOKENS = 64
COMPLETIONS = 32
MICRO_STEPS = 8


def slowest(sigma: float) -> float:
    """Return the mean of the slowest of a block's rollouts, in medians."""
    draw = random.Random(0)
    return statistics.fmean(math.exp(max(draw.gauss(0.0, sigma) for _ in range(COMPLETIONS))) for _ in range(2000))


def serve(port_file: Path, seconds: float, sigma: float) -> None:
    scale = slowest(sigma) if sigma else 1.0

    async def answer(body: dict[str, Any]) -> str:
        draw = random.Random(body.get("seed"))
        whole = seconds / scale * math.exp(draw.gauss(0.0, sigma)) if sigma else seconds
        await asyncio.sleep(whole * min(1.0, (body.get("max_tokens") or ROLLOUT_TOKENS) / ROLLOUT_TOKENS))
        return "".join(draw.choice("abcdefgh ") for _ in range(12))

    serve_answers(port_file, answer)


def serve_answers(port_file: Path, answer: Any, **attributes: Any) -> None:
    """Run a rollout server until the process that started this one has ended.

    Args:
        attributes: set on the server, which keeps for tests what would fill the memory of a long run.
    """
    from verifiers.server_process import follow_parent
    from verifiers.testing import FakeOpenAIServer

    follow_parent(os.getppid())
    with FakeOpenAIServer(answer) as server:
        vars(server).update(attributes)
        partial = port_file.with_suffix(".partial")
        partial.write_text(str(server.port))
        partial.rename(port_file)
        threading.Event().wait()


@contextlib.contextmanager
def server_of(script: str, *arguments: object) -> Iterator[str]:
    """Run `script --serve PORT_FILE ...` while the block runs, and return the base URL of its server."""
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "port"
        process = subprocess.Popen([sys.executable, script, "--serve", str(port_file), *map(str, arguments)])
        try:
            while not port_file.exists():
                assert process.poll() is None, "the server did not start"
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port_file.read_text()}/v1"
        finally:
            process.kill()
            process.wait()


def make_policy(directory: Path) -> None:
    """Write a model of some thousand parameters with one token a character; the fake server's ids are characters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from verifiers.train.tiny_model.char_model import make_tokenizer

    make_tokenizer().save_pretrained(directory)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": 128}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    Qwen3ForCausalLM(Qwen3Config(**shape, **ends)).save_pretrained(directory)


def run(policy: Path, url: str, seconds: float, steps: int, **settings: Any) -> dict[str, float]:
    """Train `steps` steps; gives seconds a step after the first, of the whole run, and of waiting in each."""
    from transformers import TrainerCallback

    import verifiers as vf
    from verifiers.train.config import GRPOConfig
    from verifiers.train.trainer import GRPOTrainer

    class Paced(GRPOTrainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            # what the micro-step waits for is not training
            self.timer.take()
            started = time.perf_counter()
            loss = super().training_step(model, inputs, num_items_in_batch)
            spent, uses = time.perf_counter() - started, self.timer.take()
            waited = sum(uses[stage].seconds for stage in ("wait", "sync") if stage in uses)
            time.sleep(max(0.0, seconds / MICRO_STEPS - (spent - waited)))
            return loss

    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    questions = [{"question": f"question {index}", "answer": "a"} for index in range(512)]

    def letters(completion: Any, **kwargs: Any) -> float:
        return float(completion[-1]["content"].count("a"))

    env = vf.SingleTurnEnv(dataset=questions, rubric=vf.Rubric(funcs=[letters]))
    with tempfile.TemporaryDirectory() as scratch:
        args = GRPOConfig(
            scratch,
            server_url=url,
            max_steps=steps,
            per_device_train_batch_size=COMPLETIONS // MICRO_STEPS,
            gradient_accumulation_steps=MICRO_STEPS,
            num_generations=4,
            max_completion_length=ROLLOUT_TOKENS,
            probe_tolerance=1e9,
            save_strategy="no",
            logging_strategy="no",
            use_cpu=True,
            bf16=False,
            **settings,
        )
        trainer = Paced(str(policy), env, args, callbacks=[Clock()])
        started = time.perf_counter()
        trainer.train()
    return {
        "step_s": (ends[-1] - ends[0]) / (steps - 1),
        "whole_s": (ends[-1] - started) / steps,
    }


def measure(policy: Path, seconds: float, steps: int, sigma: float, ahead: int) -> dict[str, float]:
    """Measure strict turns, the overlapped side and streaming on one server."""
    with server_of(__file__, seconds, sigma) as url:
        strict = run(policy, url, seconds, steps, num_batches_ahead=0)
        overlapped = run(policy, url, seconds, steps, num_batches_ahead=ahead)
        streamed = run(policy, url, seconds, steps, num_batches_ahead=0, streaming=True)
    # the trainer's part is paced; what strict turns take beyond it is generation with all that belongs to it
    generation_s = strict["step_s"] - seconds
    bound = (generation_s + seconds) / max(generation_s, seconds)
    return {
        "strict_s": strict["step_s"],
        "overlapped_s": overlapped["step_s"],
        "generation_s": generation_s,
        "training_s": seconds,
        "bound": bound,
        "speedup": strict["step_s"] / overlapped["step_s"],
        "whole_run": strict["whole_s"] / overlapped["whole_s"],
        "streaming": strict["step_s"] / streamed["step_s"],
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="Generation and training of a block, each (s).")
    parser.add_argument("--steps", type=int, default=24, help="Optimizer steps of each run.")
    parser.add_argument("--sigma", type=float, default=1.0, help="Of the logarithm of the latencies.")
    parser.add_argument("--ahead", type=int, default=2, help="num_batches_ahead of the overlapped side.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stdout(sys.stderr):
        policy = Path(scratch)
        make_policy(policy)
        equal = measure(policy, args.seconds, args.steps, 0.0, args.ahead)
        spread = measure(policy, args.seconds, args.steps, args.sigma, args.ahead)
    for name, numbers in (("equal", equal), ("log-normal", spread)):
        print(f"{name:<12}" + "  ".join(f"{key} {value:.3f}" for key, value in numbers.items()))
    result = {
        "speedup": equal["speedup"],
        "speedup_lognormal": spread["speedup"],
        "efficiency": equal["speedup"] / equal["bound"],
        "efficiency_lognormal": spread["speedup"] / spread["bound"],
        "whole_run": equal["whole_run"],
        "whole_run_lognormal": spread["whole_run"],
        "streaming_on_policy": equal["streaming"],
        "streaming_on_policy_lognormal": spread["streaming"],
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
