"""From the rows of a run to everything that a summary shows: means, counts, pass@k, variance, tasks, tokens, cost."""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verifiers.data.sampler import Shard
from verifiers.errors import ConfigError
from verifiers.evals.results import Counts, RolloutResults
from verifiers.evals.statistics import (
    UNBOUNDED,
    Bounds,
    Estimate,
    best_at_k,
    keeps,
    mean_and_stderr_clustered,
    mean_over_prompts,
    pass_at_k,
    pass_hat_k,
    sizes_up_to,
)
from verifiers.evals.store import finite, plain

Advice = Literal["more prompts", "more rollouts", ""]


@dataclass(frozen=True, slots=True)
class VarianceSplit:
    """Variance of rewards between prompts and within, and what it means. NaN stands for what cannot be told.

    Attributes:
        between: variance of the prompts' true means; 0 where the estimate would be negative.
        within: variance of rewards around their prompt's mean.
        rollouts_per_prompt: the size of a prompt's group; where they differ, that of ANOVA (see `split_variance`).
    """

    between: float
    within: float
    rollouts_per_prompt: float

    @property
    def share_between(self) -> float:
        """Part of the variance of one reward that is the prompt's: the intraclass correlation, 0 to 1."""
        total = self.between + self.within
        return self.between / total if total > 0 else math.nan

    @property
    def advice(self) -> Advice:
        """Advice on how to narrow the interval; "" where the data cannot tell.

        "more prompts" where most of the error comes from the choice of prompts, "more rollouts" where most of it is
        the chance of each rollout (new prompts would serve as well).
        """
        per_prompt = self.within / self.rollouts_per_prompt
        if math.isnan(self.between) or self.between + per_prompt <= 0:
            return ""
        return "more prompts" if self.between >= per_prompt else "more rollouts"


def split_variance(rewards_by_prompt: Sequence[Sequence[float]]) -> VarianceSplit:
    """Estimate the variance between prompts and within them by one-way analysis of variance.

    between = (MSB - MSW) / n0, where MSB and MSW are the mean squares between and within a prompts with n_i rollouts
    each, N in all, and n0 = (N - sum n_i^2 / N) / (a - 1) (Searle, Casella and McCulloch, Variance Components,
    section 3.6). A negative estimate is set to 0. Prompts without rewards are skipped; all fields are NaN with fewer
    than two prompts, or where no prompt has two rollouts.
    """
    groups = [rewards for rewards in rewards_by_prompt if len(rewards)]
    prompts, total = len(groups), sum(map(len, groups))
    if prompts < 2 or total == prompts:
        return VarianceSplit(math.nan, math.nan, math.nan)
    size = (total - sum(len(rewards) ** 2 for rewards in groups) / total) / (prompts - 1)
    try:
        return _split(groups, prompts, total, size)
    except OverflowError:
        return VarianceSplit(math.nan, math.nan, math.nan)


def _split(groups: Sequence[Sequence[float]], prompts: int, total: int, size: float) -> VarianceSplit:
    means = [math.fsum(rewards) / len(rewards) for rewards in groups]
    overall = math.fsum(reward for rewards in groups for reward in rewards) / total
    squares = math.fsum(
        (reward - mean) ** 2 for rewards, mean in zip(groups, means, strict=True) for reward in rewards
    )
    within = squares / (total - prompts)
    spread = math.fsum(len(rewards) * (mean - overall) ** 2 for rewards, mean in zip(groups, means, strict=True))
    return VarianceSplit(max(0.0, (spread / (prompts - 1) - within) / size), within, size)


@dataclass(frozen=True, slots=True)
class Price:
    """The price of a model's tokens, per million of each kind."""

    prompt: float
    completion: float

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (self.prompt * prompt_tokens + self.completion * completion_tokens) / 1e6


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices by model name, all in one currency."""

    prices: Mapping[str, Price]
    currency: str = "USD"


def load_prices(path: str | os.PathLike[str]) -> PriceTable:
    """Read a price table: a TOML file with a table a model, and optionally `currency` at the top.

        currency = "USD"

        ["org/some-model"]
        prompt = 0.40
        completion = 1.60

    Prices are per million tokens.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the price table {os.fspath(path)!r} cannot be read: {error}.") from error
    currency = found.pop("currency", "USD")
    if not isinstance(currency, str):
        raise ConfigError(f"currency in {os.fspath(path)!r} is {currency!r}; give a text such as 'USD'.")
    return PriceTable({model: _price(model, entry) for model, entry in found.items()}, currency)


def _price(model: str, entry: Any) -> Price:
    names = ("prompt", "completion")
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise ConfigError(
            f"the price of {model!r} is {entry!r}; give a table with prompt and completion, per million tokens"
            " (a model name with dots needs quotes)."
        )
    for name in names:
        value = entry[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"the {name} price of {model!r} is {value!r}; give a number of at least 0.")
    return Price(*(float(entry[name]) for name in names))


RIGHT_FROM = 1.0
"""Reward from which a rollout counts as right in pass@k and pass^k."""

# 0.7 + 0.2 + 0.1 is a little less than 1
_ALMOST = 1e-9


@dataclass(frozen=True, slots=True)
class AtK:
    """The chances that at least one and all of k rollouts of a prompt are right, and the expected best reward of k.

    All three rest on the prompts with at least k scored rollouts; `pass_at.prompts` says how many those are.
    """

    k: int
    pass_at: Estimate
    pass_hat: Estimate
    best: Estimate


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run in numbers.

    Attributes:
        measures: "reward", which is avg@n, and each reward function.
        at_k: for k in powers of two up to the most rollouts of a prompt, and that.
        tasks: reward and counts of each task, where there are several.
        prompt_tokens, completion_tokens: spent on all rollouts, also on failed ones.
        without_usage: rollouts of which the tokens are not known; `completion_tokens` is that of the others.
        cost: by the price table; None without one, or where it does not have the model or tokens are not known.
    """

    counts: Counts
    measures: Mapping[str, Estimate]
    at_k: Sequence[AtK]
    right_from: float
    variance: VarianceSplit
    tasks: Mapping[str, tuple[Estimate, Counts]]
    prompt_tokens: int
    completion_tokens: int
    without_usage: int
    cost: float | None
    currency: str | None

    def as_json(self) -> dict[str, Any]:
        """Return the fields of metadata.json and `--json`; None stands for what cannot be told."""
        shares = ("between", "within", "share_between", "advice")
        rates = {"pass_at_k": "pass_at", "pass_hat_k": "pass_hat", "best_at_k": "best"}
        tokens = ("prompt_tokens", "completion_tokens", "without_usage", "cost", "currency")
        found: dict[str, Any] = plain(
            {
                "rewards": {name: _measure_as_json(one, self.counts) for name, one in self.measures.items()},
                **dataclasses.asdict(self.counts),
                "right_from": self.right_from,
                **{
                    name: {row.k: dataclasses.asdict(getattr(row, rate)) for row in self.at_k}
                    for name, rate in rates.items()
                },
                "variance": {name: getattr(self.variance, name) for name in shares},
                "tasks": {
                    task: {"reward": _measure_as_json(reward, of_task), **dataclasses.asdict(of_task)}
                    for task, (reward, of_task) in self.tasks.items()
                },
                **{name: getattr(self, name) for name in tokens},
            }
        )
        return found


def summarize(
    rows: Iterable[Mapping[str, Any]] | RolloutResults,
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
        prices: None leaves the cost out.
    """
    results = rows if isinstance(rows, RolloutResults) else RolloutResults(rows)
    metadata = metadata or {}
    rewards = list(results.values().values())
    price = None if prices is None else prices.prices.get(str(metadata.get("model")))

    def estimated(name: str = "reward", task: str | None = None) -> Estimate:
        values = list(results.values(name, task=task).values())
        bounds = metric_bounds(name, [metadata], values)
        return mean_and_stderr_clustered(values, confidence=confidence, bounds=bounds)

    tasks = results.tasks if len(results.tasks) > 1 else ()
    cost = None
    if price is not None and not results.without_usage:
        cost = price.cost(results.prompt_tokens, results.completion_tokens)
    return RunSummary(
        counts=results.counts(planned=rollouts_planned(metadata)),
        measures={name: estimated(name) for name in results.metrics},
        at_k=at_k(rewards, metadata, right_from=right_from, confidence=confidence),
        right_from=right_from,
        variance=split_variance(rewards),
        tasks={task: (estimated(task=task), results.counts(task=task)) for task in tasks},
        prompt_tokens=results.prompt_tokens,
        completion_tokens=results.completion_tokens,
        without_usage=results.without_usage,
        cost=cost,
        currency=None if price is None or prices is None else prices.currency,
    )


def run_summary(
    results: RolloutResults, metadata: Mapping[str, Any], seconds: float, **options: Any
) -> dict[str, Any]:
    """Return a run in numbers, as metadata.json and `--json` have it; options are those of `summarize`."""
    return {
        **summarize(results, metadata, **options).as_json(),
        "retries": results.retries,
        "tool_call_errors": results.tool_call_errors,
        "first_tool_call_error": results.first_tool_call_error,
        "refusals": results.refusals,
        "first_refusal": results.first_refusal,
        "seconds": seconds,
        "prompts_trained_on": metadata.get("prompts_trained_on"),
    }


def at_k(
    rewards_by_prompt: Sequence[Sequence[float]],
    metadata: Mapping[str, Any] | None = None,
    *,
    right_from: float = RIGHT_FROM,
    confidence: float = 0.95,
) -> list[AtK]:
    """Estimate pass@k, pass^k and best@k over prompts, from the rewards of their scored rollouts.

    The k are powers of two up to the most rollouts of a prompt, and that number.
    """
    rows = []
    for k in sizes_up_to(max(map(len, rewards_by_prompt), default=0)):
        enough = [rewards for rewards in rewards_by_prompt if len(rewards) >= k]
        estimates = []
        for kind in ("pass@", "pass^", "best@"):
            _, value = value_of_prompt(f"{kind}{k}", right_from)
            # the best of a few can look bounded when the rewards are not
            bounds = metric_bounds(f"{kind}{k}", [metadata or {}], enough)
            values, rollouts = list(map(value, enough)), sum(map(len, enough))
            estimates.append(mean_over_prompts(values, rollouts, confidence=confidence, bounds=bounds))
        rows.append(AtK(k, *estimates))
    return rows


def value_of_prompt(metric: str, right_from: float = RIGHT_FROM) -> tuple[str, Callable[[Sequence[float]], float]]:
    """Return the column that a metric's name asks for, and what makes one number of a prompt's values.

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


def metric_bounds(metric: str, runs: Iterable[Mapping[str, Any]], values: Sequence[Sequence[float]]) -> Bounds:
    """Return the bounds of a metric: those that every run's `reward_bounds` has, else 0 and 1, else none.

    Bounds that a value does not keep are not taken; of pass@k and pass^k they are 0 and 1. To cut an interval off at
    them costs no coverage, as the truth cannot lie beyond (Mandelkern, Statistical Science 17, 2002).

    Args:
        runs: metadata of one run, or of those that are compared.
        values: of the column that the metric is made of (`value_of_prompt`).
    """
    if metric.startswith(("pass@", "pass^")):
        return 0.0, 1.0
    declared = [_declared(one.get("reward_bounds"), value_of_prompt(metric)[0]) for one in runs]
    known = [one for one in declared if one is not None]
    shared = [(min(low for low, _ in known), max(high for _, high in known))] if known == declared != [] else []
    return next((bounds for bounds in (*shared, (0.0, 1.0)) if keeps(bounds, values)), UNBOUNDED)


def _declared(found: Any, column: str) -> Bounds | None:
    # a run may be a stranger's
    ends = found.get(column) if isinstance(found, Mapping) else None
    numbers = [finite(end) for end in ends] if isinstance(ends, list | tuple) else []
    match numbers:
        case (float() as low, float() as high) if low < high:
            return low, high
    return None


def rollouts_planned(metadata: Mapping[str, Any]) -> int | None:
    """Return how many rollouts a run should have, by its metadata; None where that does not say."""
    prompts, each = metadata.get("num_examples"), metadata.get("rollouts_per_example")
    if not isinstance(prompts, int) or not isinstance(each, int) or prompts <= 0:
        return None
    shard = Shard.of_run(metadata)
    return each * (prompts if shard is None else len(shard.examples(prompts)))


def _measure_as_json(estimate: Estimate, counts: Counts) -> dict[str, Any]:
    # rollouts that have no value for it: failed, or scored by other functions
    return {**dataclasses.asdict(estimate), "without": counts.rollouts - estimate.rollouts}


def _right(rewards: Sequence[float], right_from: float) -> int:
    return sum(reward >= right_from - _ALMOST for reward in rewards)
