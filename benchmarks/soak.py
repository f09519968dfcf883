"""A long run in fast motion: does a trainer's memory, or its number of threads or open files, grow with its steps?

    python benchmarks/soak.py [--steps 20000] [--logging-steps 1] [--save-steps 500] [--ahead 2]

A real `GRPOTrainer` (plan, generator, collation, loss, optimizer, weight push and probe, block log, checkpoints) on a
model of some thousand parameters, against a server in a process of its own that answers at once with token ids and
log-probs; 8 completions a step, one update a block. So an hour holds the steps of a day or more of real training.

Resident memory of the trainer's process is read 200 times. The slope is that of a least-squares line through all
readings after the first tenth of the run, in which allocators and caches fill. The part of it that transformers' log
takes (`log_history`, which is in every checkpoint too) is measured at both ends.

Ends with one line of JSON: steps, minutes, rss_slope_mb_per_10k, log_history_mb_per_10k, rss_mb, threads, fds (each
first, last; of the readings after the first tenth), threads_max, fds_max.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap import make_policy, serve_answers, server_of

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

READINGS = 200
MB = 2**20


def serve(port_file: Path) -> None:
    def answer(body: dict[str, Any]) -> str:
        draw = random.Random(body.get("seed"))
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(2, 12)))

    serve_answers(port_file, answer, requests=deque(maxlen=1), weight_calls=deque(maxlen=1))


@dataclass(frozen=True, slots=True)
class Reading:
    step: int
    rss_mb: float
    history_mb: float
    threads: int
    fds: int


def size_mb(history: list[dict[str, float]]) -> float:
    """Return the memory of transformers' log, whose keys are shared."""
    return sum(sys.getsizeof(line) + sum(map(sys.getsizeof, line.values())) for line in history) / MB


def soak(scratch: Path, url: str, steps: int, logging_steps: int, save_steps: int, ahead: int) -> list[Reading]:
    """Train `steps` steps; gives the readings."""
    import psutil
    from transformers import TrainerCallback

    import verifiers as vf
    from verifiers.train.config import GRPOConfig
    from verifiers.train.trainer import GRPOTrainer

    readings: list[Reading] = []
    process, every = psutil.Process(), max(1, steps // READINGS)

    class Reads(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % every:
                return
            rss = process.memory_info().rss / MB
            # after the reading of memory: it takes some itself
            at_an_end = len(readings) == READINGS // 10 or state.global_step + every > steps
            history = size_mb(state.log_history) if at_an_end else 0.0
            readings.append(Reading(state.global_step, rss, history, process.num_threads(), process.num_fds()))

    def letters(completion: Any, **kwargs: Any) -> float:
        return float(completion[-1]["content"].count("a"))

    policy = scratch / "policy"
    make_policy(policy)
    questions = [{"question": f"question {index}", "answer": "a"} for index in range(512)]
    env = vf.SingleTurnEnv(dataset=questions, rubric=vf.Rubric(funcs=[letters]))
    args = GRPOConfig(
        str(scratch / "run"),
        server_url=url,
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        num_generations=4,
        num_batches_ahead=ahead,
        max_completion_length=16,
        probe_tolerance=1e9,
        logging_steps=logging_steps,
        save_strategy="steps",
        save_steps=save_steps,
        save_total_limit=2,
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(str(policy), env, args, callbacks=[Reads()])
    trainer.train()
    return readings


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="Optimizer steps.")
    parser.add_argument("--logging-steps", type=int, default=1, help="Steps between two lines of the log.")
    parser.add_argument("--save-steps", type=int, default=500, help="Steps between two checkpoints.")
    parser.add_argument("--ahead", type=int, default=2, help="num_batches_ahead.")
    args = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
        scratch = Path(directory)
        with server_of(__file__) as url:
            readings = soak(scratch, url, args.steps, args.logging_steps, args.save_steps, args.ahead)
    minutes = (time.perf_counter() - started) / 60
    steady = readings[len(readings) // 10 :]
    first, last = steady[0], steady[-1]
    steps, memory = [reading.step for reading in steady], [reading.rss_mb for reading in steady]
    total = statistics.linear_regression(steps, memory).slope * 10_000
    with_size = [reading for reading in readings if reading.history_mb]
    grown, over = with_size[-1].history_mb - with_size[0].history_mb, with_size[-1].step - with_size[0].step
    history = grown / max(1, over) * 10_000
    for reading in steady[:: max(1, len(steady) // 10)]:
        print(reading, file=sys.stderr)
    result: dict[str, Any] = {
        "steps": args.steps,
        "minutes": round(minutes, 1),
        "rss_slope_mb_per_10k": round(total, 2),
        "log_history_mb_per_10k": round(history, 2),
        "rss_mb": [round(first.rss_mb, 1), round(last.rss_mb, 1)],
        "threads": [first.threads, last.threads],
        "fds": [first.fds, last.fds],
        "threads_max": max(reading.threads for reading in steady),
        "fds_max": max(reading.fds for reading in steady),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
