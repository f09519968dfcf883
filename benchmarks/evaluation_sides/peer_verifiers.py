"""The side of PyPI's `verifiers`: `Environment.evaluate` with its store on and its progress bar off."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import side
from datasets import Dataset

import verifiers as vf
from verifiers.types import ClientConfig

logging.getLogger("verifiers").setLevel(logging.ERROR)
os.environ["BENCH_KEY"] = "none-needed"


async def _evaluate(url: str, rollouts: int, in_flight: int, scratch: Path) -> float:
    async def correct(completion: list, answer: str) -> float:
        last = completion[-1]
        content = last["content"] if isinstance(last, dict) else last.content
        return float(answer in content)

    questions = [side.question(index) for index in range(rollouts)]
    answers = [side.answer(index) for index in range(rollouts)]
    dataset = Dataset.from_dict({"question": questions, "answer": answers})
    env = vf.SingleTurnEnv(eval_dataset=dataset, rubric=vf.Rubric(funcs=[correct]))
    results = await env.evaluate(
        client=ClientConfig(api_key_var="BENCH_KEY", api_base_url=url),
        model=side.MODEL,
        num_examples=rollouts,
        rollouts_per_example=1,
        max_concurrent=in_flight,
        results_path=scratch / "results",
        save_results=True,
        on_start=lambda *_: None,
        on_progress=[],
    )
    rewards = [output["reward"] for output in results["outputs"]]
    return sum(rewards) / len(rewards)


def evaluate(url: str, rollouts: int, in_flight: int, scratch: Path) -> float:
    """Run one evaluation in this process."""
    return asyncio.run(_evaluate(url, rollouts, in_flight, scratch))


if __name__ == "__main__":
    side.measure(evaluate)
