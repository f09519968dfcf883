"""From the rows of a run to everything that a summary shows: means, counts, pass@k, variance, tasks, tokens, cost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.evals.columns import Counts, RolloutColumns
from verifiers.evals.pass_at_k import best_at_k, pass_at_k, pass_hat_k, sizes_up_to
from verifiers.evals.prices import PriceTable
from verifiers.evals.statistics import Estimate, mean_and_stderr_clustered
from verifiers.evals.variance import VarianceSplit, split_variance

__all__ = [
    "RIGHT_FROM",
    "AtK",
    "Measure",
    "RunSummary",
    "at_k",
    "estimate_as_json",
    "rollouts_planned",
    "summarize",
    "value_of_prompt",
]

RIGHT_FROM = 1.0
"""Reward from which a rollout counts as right in pass@k and pass^k."""

# 0.7 + 0.2 + 0.1 is a little less than 1
_ALMOST = 1e-9


@dataclass(frozen=True, slots=True)
class Measure:
    """One column of a run, estimated.

    Attributes:
        estimate: its mean over prompts.
        without: rollouts that have no value for it: failed, or scored by other functions.
    """

    estimate: Estimate
    without: int


@dataclass(frozen=True, slots=True)
class AtK:
    """What k rollouts of a prompt give, each with an interval over prompts.

    All three rest on the prompts with at least k scored rollouts; `pass_at.prompts` says how many those are.

    Attributes:
        pass_at: chance that at least one of k is right.
        pass_hat: chance that all of k are right.
        best: expected best reward of k.
    """

    k: int
    pass_at: Estimate
    pass_hat: Estimate
    best: Estimate


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in numbers.

    Attributes:
        counts: what became of the rollouts.
        measures: "reward", which is avg@n, and each reward function.
        at_k: for k in powers of two up to the most rollouts of a prompt, and that.
        right_from: reward from which a rollout counted as right.
        variance: of the reward, between prompts and within.
        tasks: reward and counts of each task, where there are several.
        prompt_tokens, completion_tokens: spent on all rollouts, also on failed ones.
        cost: by the price table; None without one, or where it does not have the model.
        currency: of `cost`.
    """

    counts: Counts
    measures: Mapping[str, Measure]
    at_k: Sequence[AtK]
    right_from: float
    variance: VarianceSplit
    tasks: Mapping[str, tuple[Measure, Counts]]
    prompt_tokens: int
    completion_tokens: int
    cost: float | None
    currency: str | None

    def as_json(self) -> dict[str, Any]:
        """For metadata.json and `--json`; None stands for what cannot be told."""
        counts = dataclasses.asdict(self.counts)
        variance = self.variance
        return {
            "rewards": {name: _measure_as_json(measure) for name, measure in self.measures.items()},
            **counts,
            "right_from": self.right_from,
            "pass_at_k": {str(row.k): estimate_as_json(row.pass_at) for row in self.at_k},
            "pass_hat_k": {str(row.k): estimate_as_json(row.pass_hat) for row in self.at_k},
            "best_at_k": {str(row.k): estimate_as_json(row.best) for row in self.at_k},
            "variance": {
                "between": _finite(variance.between),
                "within": _finite(variance.within),
                "share_between": _finite(variance.share_between),
                "design_effect": _finite(variance.design_effect),
                "stderr_with_twice_the_rollouts": _finite(variance.stderr_with_twice_the_rollouts),
                "advice": variance.advice,
            },
            "tasks": {
                task: {"reward": _measure_as_json(measure), **dataclasses.asdict(of_task)}
                for task, (measure, of_task) in self.tasks.items()
            },
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost": self.cost,
            "currency": self.currency,
        }


def summarize(
    rows: Iterable[Mapping[str, Any]] | RolloutColumns,
    metadata: Mapping[str, Any] | None = None,
    *,
    right_from: float = RIGHT_FROM,
    confidence: float = 0.95,
    prices: PriceTable | None = None,
) -> RunSummary:
    """Sum up a run, finished or not. A failed rollout is counted and never averaged.

    Args:
        rows: of results.jsonl, read once and not kept; or their numbers.
        metadata: of metadata.json; its plan gives the missing rollouts, its model the price.
        right_from: reward from which a rollout counts as right in pass@k and pass^k; a rounding error below counts
            too.
        confidence: coverage of all intervals.
        prices: what tokens cost.
    """
    columns = rows if isinstance(rows, RolloutColumns) else RolloutColumns(rows)
    metadata = metadata or {}
    counts = columns.counts(planned=rollouts_planned(metadata))
    rewards = list(columns.values().values())
    price = None if prices is None else prices.prices.get(str(metadata.get("model")))
    tasks = columns.tasks
    by_task = {task: columns.counts(task=task) for task in (tasks if len(tasks) > 1 else ())}
    return RunSummary(
        counts=counts,
        measures={name: _measure(columns.values(name), counts.rollouts, confidence) for name in columns.metrics},
        at_k=at_k(rewards, right_from=right_from, confidence=confidence),
        right_from=right_from,
        variance=split_variance(rewards),
        tasks={
            task: (_measure(columns.values(task=task), of_task.rollouts, confidence), of_task)
            for task, of_task in by_task.items()
        },
        prompt_tokens=columns.prompt_tokens,
        completion_tokens=columns.completion_tokens,
        cost=None if price is None else price.cost(columns.prompt_tokens, columns.completion_tokens),
        currency=None if price is None or prices is None else prices.currency,
    )


def at_k(
    rewards_by_prompt: Sequence[Sequence[float]],
    sizes: Sequence[int] | None = None,
    *,
    right_from: float = RIGHT_FROM,
    confidence: float = 0.95,
) -> list[AtK]:
    """pass@k, pass^k and best@k over prompts, each with its interval.

    Args:
        rewards_by_prompt: of the scored rollouts.
        sizes: the k; None stands for powers of two up to the most rollouts of a prompt, and that number.
        right_from, confidence: as in `summarize`.
    """
    most = max(map(len, rewards_by_prompt), default=0)
    rows = []
    for k in sizes_up_to(most) if sizes is None else sizes:
        enough = [rewards for rewards in rewards_by_prompt if len(rewards) >= k]
        parts = []
        for rate in (pass_at_k, pass_hat_k):
            values = [rate(len(rewards), _right(rewards, right_from), k) for rewards in enough]
            parts.append(_over_prompts(values, enough, confidence))
        # bounds are those of the rewards, which a maximum of few may hide
        known = None if _within_unit(enough) else (-math.inf, math.inf)
        best = _over_prompts([best_at_k(rewards, k) for rewards in enough], enough, confidence, known)
        rows.append(AtK(k, parts[0], parts[1], best))
    return rows


def value_of_prompt(metric: str, right_from: float = RIGHT_FROM) -> tuple[str, Callable[[Sequence[float]], float]]:
    """The column that a metric's name asks for, and what makes one number of a prompt's values.

    "pass@4", "pass^4" and "best@4" are made of the reward; any other name is a column, whose mean is taken.
    """
    kind, size = metric[:5], metric[5:]
    if kind not in ("pass@", "pass^", "best@") or not size.isdecimal() or int(size) < 1:
        return metric, lambda values: math.fsum(values) / len(values)
    k = int(size)
    if kind == "best@":
        return "reward", lambda rewards: best_at_k(rewards, k)
    rate = pass_at_k if kind == "pass@" else pass_hat_k
    return "reward", lambda rewards: rate(len(rewards), _right(rewards, right_from), k)


def rollouts_planned(metadata: Mapping[str, Any]) -> int | None:
    """Rollouts that a run should have, by its metadata; None where that does not say."""
    prompts, each = metadata.get("num_examples"), metadata.get("rollouts_per_example")
    return prompts * each if isinstance(prompts, int) and isinstance(each, int) and prompts > 0 else None


def estimate_as_json(estimate: Estimate) -> dict[str, Any]:
    """An estimate's fields; None stands for what cannot be told, which JSON has no number for."""
    return {name: _finite(value) for name, value in dataclasses.asdict(estimate).items()}


def _measure(values: Mapping[Any, Sequence[float]], rollouts: int, confidence: float) -> Measure:
    estimate = mean_and_stderr_clustered(list(values.values()), confidence=confidence)
    return Measure(estimate, rollouts - estimate.rollouts)


def _measure_as_json(measure: Measure) -> dict[str, Any]:
    return {**estimate_as_json(measure.estimate), "without": measure.without}


def _over_prompts(
    values: Sequence[float],
    of: Sequence[Sequence[float]],
    confidence: float,
    bounds: tuple[float, float] | None = None,
) -> Estimate:
    estimate = mean_and_stderr_clustered([[value] for value in values], confidence=confidence, bounds=bounds)
    return dataclasses.replace(estimate, rollouts=sum(map(len, of)))


def _right(rewards: Sequence[float], right_from: float) -> int:
    return sum(reward >= right_from - _ALMOST for reward in rewards)


def _within_unit(rewards_by_prompt: Iterable[Sequence[float]]) -> bool:
    return all(0 <= reward <= 1 for rewards in rewards_by_prompt for reward in rewards)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
