"""The measurements of a run of the GSM8K benchmark, read from its directory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verifiers.evals.comparison import read_compared_run
from verifiers.evals.statistics import Estimate, mean_and_stderr_clustered
from verifiers.monitoring.run_log import METRICS

Lines = Sequence[dict[str, Any]]


def read_lines(directory: Path) -> list[dict[str, Any]]:
    """Return the logs of a run; none where it has none yet, and without a last one that is half written."""
    path = directory / METRICS
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def newest_step(directory: Path) -> int:
    """Return the newest step that was logged; 0 before the first."""
    return max((int(line["step"]) for line in read_lines(directory) if "reward" in line), default=0)


def trainer_seconds(lines: Lines, step: int | None = None) -> float:
    """Return the trainer's seconds up to a step, or of the whole run, waits for evaluations included."""
    return math.fsum(
        line["steps"] * line["time/step_s"]
        for line in lines
        if "time/step_s" in line and (step is None or line["step"] <= step)
    )


def seconds_to(lines: Lines, threshold: float) -> float | None:
    """Return the trainer's seconds up to the first evaluation at the threshold; None where none was."""
    found = [line["step"] for line in lines if line.get("eval_reward", -math.inf) >= threshold]
    return trainer_seconds(lines, min(found)) if found else None


def last_eval(directory: Path) -> tuple[Estimate, dict[Any, list[float]]]:
    """Return the score of the last evaluation, clustered by problem, and the rewards of each problem."""
    evaluations = [path for path in (directory / "evals").iterdir() if re.fullmatch(r"step-\d+", path.name)]
    last = max(evaluations, key=lambda path: int(path.name.removeprefix("step-")))
    rewards = read_compared_run(last).results.values("reward")
    return mean_and_stderr_clustered(list(rewards.values()), bounds=(0.0, 1.0)), rewards


def read_measurements(
    directory: Path,
    thresholds: Sequence[float],
    *,
    gpus: int,
    parameters: float | None,
    peak: float | None,
    operations: int = 6,
) -> dict[str, Any]:
    """Return the measurements of a finished run.

    Args:
        directory: of the run.
        thresholds: eval scores, the seconds to which are wanted.
        gpus: GPUs of the run, those of the server too; 0 on the CPU.
        parameters: of the model.
        peak: floating point operations a second of one GPU.
        operations: of training, for each parameter and token.

    Returns:
        `mfu` counts `operations` for each parameter and token of a rollout, prompt and completion; sampling counts
        nothing. It and the rates are over all GPUs and the whole clock, the waits for evaluations included: the
        block ahead is generated meanwhile. None stands for what cannot be told.
    """
    lines = read_lines(directory)
    seconds = trainer_seconds(lines)
    logs = [line for line in lines if "time/step_s" in line]
    sampled = math.fsum(line["tokens/sampled_per_s"] * line["time/step_s"] * line["steps"] for line in logs)
    tokens = max((line["num_tokens"] for line in logs), default=0)
    memory = [value for line in logs for name, value in line.items() if re.fullmatch("memory/.+_gib", name)]
    rate = sampled / seconds if seconds else math.nan
    mfu = None
    if parameters is not None and peak is not None and gpus and seconds:
        mfu = round(operations * parameters * tokens / seconds / gpus / peak, 4)
    score, _ = last_eval(directory)
    return {
        "seconds": round(seconds, 2),
        "steps": newest_step(directory),
        "seconds_to": {str(threshold): seconds_to(lines, threshold) for threshold in thresholds},
        "tokens_per_s": round(rate, 1),
        "tokens_per_s_and_gpu": round(rate / gpus, 1) if gpus else None,
        "mfu": mfu,
        "peak_memory_gib": max(memory, default=None),
        "eval_score": score.mean,
        "eval_score_stderr": score.stderr if math.isfinite(score.stderr) else None,
        "problems": score.prompts,
    }
