"""Runs for tests of reports: stored evaluations, and training runs of lines and samples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from verifiers.monitoring.run_log import METRICS, RUN, SAMPLES

HOSTILE = "</script><script>globalThis.canary = 1</script><img src=x onerror='canary = 2'>\x1b[31m\u202e&"


def store(directory: Path, rows: list[dict[str, Any]], **metadata: Any) -> Path:
    """Write an evaluation."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {"env": "sums", "model": "m", "summary": {"seconds": 1.0}, **metadata}
    (directory / "metadata.json").write_text(json.dumps(known))
    return directory


def line(step: int, **metrics: Any) -> dict[str, Any]:
    known = {
        "step": step,
        "steps": 1,
        "at": 1.79e9 + step,
        "reward": 0.5 + 0.3 * math.sin(step / 50),
        "loss": 0.01 * math.cos(step),
        "staleness": 1.0,
        "mismatch_kl": 0.001,
        "time/step_s": 4.0,
        "time/wait_s": 2.84,
        "time/train_s": 1.16,
        "time/generator_s": 4.0,
        "time/overlapped_s": 1.16,
        "rollouts/server_busy": 1.0,
        "rollouts/in_flight_while_waiting": 60.0,
        "rollouts/most_in_flight": 64.0,
        "memory/train_gib": 11.5,
        "memory/wait_gib": 3.25,
        "rows/dropped/masked_truncated": 2.0,
    }
    return {**known, **metrics}


def sample(step: int, example: int, text: str = "forty", *, followed: bool = False) -> dict[str, Any]:
    rollout = {
        "generation": 0,
        "outcome": "truncated",
        "reward": 0.25,
        "advantage": -1.5,
        "tokens": 7,
        "error": None,
        "completion": [{"role": "assistant", "text": text}],
    }
    return {
        "step": step,
        "example": example,
        "followed": followed,
        "prompt": [{"role": "user", "text": f"question {example}"}],
        "answer": text,
        "generations": 16,
        "mean_reward": 0.25,
        "rollouts": [rollout],
    }


def write_run(directory: Path, lines: list[dict[str, Any]], samples: list[dict[str, Any]], **run: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in ((METRICS, lines), (SAMPLES, samples)):
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    known = {
        "env": "sums",
        "model": "small",
        "max_steps": 100,
        "status": "finished",
        "plan": "batch plan   prompts",
        "settings": {"learning_rate": 1e-6},
        "judged_by": {"num_batches_ahead": 1, "drains": False, "max_concurrent": 64},
        "memory": "torch's allocations on cuda:0",
    }
    (directory / RUN).write_text(json.dumps({**known, **run}))
    return directory
