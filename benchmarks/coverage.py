"""The share of 95 % intervals that cover the truth, by simulation, beside intervals over independent rollouts.

    python benchmarks/coverage.py [--simulations 4000] [--seed 0]

Prompts draw a difficulty from a beta distribution, rollouts are right with that probability. The estimates are those
of verifiers.evals; the naive interval is mean +- 1.96 * sqrt(mean * (1 - mean) / rollouts). Ends with one line of
JSON: coverage by case.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence

import numpy as np

from verifiers.evals.statistics import Estimate, mean_and_stderr_clustered, paired_difference, pass_at_k

CASES = [
    # a, b of the beta distribution, rollouts a prompt
    (2.0, 2.0, 8),
    (2.0, 2.0, 1),
    (0.5, 0.5, 8),
    (8.0, 1.0, 8),
    (0.3, 3.0, 8),
]
PROMPTS = (10, 30, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    found: dict[str, float] = {}
    print("| difficulties | rollouts | prompts | mean | naive | pass@n | pass@n/2 | paired difference |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for a, b, rollouts in CASES:
        for prompts in PROMPTS:
            rates = coverage(random, a, b, prompts, rollouts, args.simulations)
            name = f"Beta({a:g}, {b:g})"
            shown = " | ".join(f"{100 * rate:.1f} %" for rate in rates.values())
            print(f"| {name} | {rollouts} | {prompts} | {shown} |", flush=True)
            found.update({f"{name} {prompts}x{rollouts} {kind}": rate for kind, rate in rates.items()})
    print(json.dumps(found))


def coverage(
    random: np.random.Generator, a: float, b: float, prompts: int, rollouts: int, simulations: int
) -> dict[str, float]:
    """Return the share of simulations in which each kind of interval covered what it estimates."""
    truth = a / (a + b)
    sizes = {"pass@n": rollouts, "pass@n/2": max(1, rollouts // 2)}
    # 1 - E[(1 - p)^k], the chance that some rollout of k is right
    some = {
        name: 1 - math.exp(math.lgamma(b + k) + math.lgamma(a + b) - math.lgamma(b) - math.lgamma(a + b + k))
        for name, k in sizes.items()
    }
    hits = {"mean": 0, "naive": 0, **dict.fromkeys(sizes, 0), "paired difference": 0}
    for _ in range(simulations):
        difficulty = random.beta(a, b, size=(prompts, 1))
        before, after = ((random.random((prompts, rollouts)) < difficulty).astype(float).tolist() for _ in range(2))
        hits["mean"] += covers(mean_and_stderr_clustered(before), truth)
        hits["naive"] += naive_covers(before, truth)
        for name, k in sizes.items():
            tried = [[pass_at_k(rollouts, int(sum(rewards)), k)] for rewards in before]
            hits[name] += covers(mean_and_stderr_clustered(tried), some[name])
        sides = (dict(enumerate(side)) for side in (before, after))
        hits["paired difference"] += covers(paired_difference(*sides), 0.0)
    return {name: count / simulations for name, count in hits.items()}


def covers(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


def naive_covers(rewards_by_prompt: Sequence[Sequence[float]], truth: float) -> bool:
    rewards = [reward for rewards in rewards_by_prompt for reward in rewards]
    mean = sum(rewards) / len(rewards)
    return abs(mean - truth) <= 1.959964 * math.sqrt(mean * (1 - mean) / len(rewards))


if __name__ == "__main__":
    main()
