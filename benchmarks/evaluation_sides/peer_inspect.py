"""The side of PyPI's `inspect-ai`: `eval` of a task with its log on, and its display and live view off."""

from __future__ import annotations

import os
from pathlib import Path

import side

os.environ["OPENAI_API_KEY"] = "none-needed"

from inspect_ai import Task, eval  # noqa: A004
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


def evaluate(url: str, rollouts: int, in_flight: int, scratch: Path) -> float:
    """Run one evaluation in this process."""
    samples = [Sample(input=side.question(index), target=side.answer(index)) for index in range(rollouts)]
    [log] = eval(
        Task(dataset=MemoryDataset(samples), solver=[generate()], scorer=includes()),
        model=f"openai/{side.MODEL}",
        model_base_url=url,
        model_args={"responses_api": False},
        display="none",
        log_dir=str(scratch),
        log_realtime=False,
        max_samples=in_flight,
        max_connections=in_flight,
        score_display=False,
    )
    if log.status != "success" or log.results is None:
        raise SystemExit(f"inspect-ai ended with {log.status}: {log.error}")
    return log.results.scores[0].metrics["accuracy"].value


if __name__ == "__main__":
    side.measure(evaluate)
