"""Evaluation on held-out prompts during training, through the same rollouts and the same server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.evals.runner import estimates, evaluation_requests, run_evaluation
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import ScoredBlock

__all__ = ["evaluate_policy", "evaluation_metrics"]


def evaluate_policy(
    generator: AsyncBatchGenerator,
    dataset: Any,
    *,
    num_generations: int,
    sampling_args: Mapping[str, Any],
    seed: int,
    timeout_s: float,
) -> ScoredBlock:
    """Roll out every row of `dataset` `num_generations` times and score it.

    Raises:
        DeadlineError: not done within `timeout_s` seconds.
        NothingScoredError: no rollout got a reward.
    """
    runner = generator.runner(sampling_args=dict(sampling_args), require_tokens=False)
    groups = evaluation_requests(dataset, num_generations, seed)
    block: ScoredBlock = generator.run(run_evaluation(runner, groups), timeout_s)
    return block


def evaluation_metrics(block: ScoredBlock, prefix: str = "eval") -> dict[str, float]:
    """Mean and clustered standard error of the reward and of each reward function, with what failed beside."""
    metrics: dict[str, float] = {}
    for name, estimate in estimates(block).items():
        key = f"{prefix}_reward" if name == "reward" else f"{prefix}_rewards/{name}"
        metrics[key], metrics[f"{key}_stderr"] = estimate.mean, estimate.stderr
    lengths = [rollout.usage.completion_tokens for rollout in block if rollout.usage.completion_tokens]
    metrics[f"{prefix}_completions/mean_length"] = sum(lengths) / max(1, len(lengths))
    metrics[f"{prefix}_prompts"] = float(len(block.groups))
    metrics[f"{prefix}_failed"] = float(sum(rollout.outcome.is_failure for rollout in block))
    return metrics
