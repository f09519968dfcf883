"""The intervals do what their name says: by simulation, with the functions that users call."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verifiers.evals.statistics import mean_and_stderr_clustered

SIMULATIONS, ROLLOUTS = 2000, 8


@pytest.mark.parametrize("prompts", [10, 30, 100])
def test_intervals_of_95_percent_cover_the_truth_95_times_in_100(prompts: int) -> None:
    random = np.random.default_rng(prompts)
    covered = covered_naively = 0
    for _ in range(SIMULATIONS):
        difficulties = random.beta(2, 2, size=(prompts, 1))
        rewards = (random.random((prompts, ROLLOUTS)) < difficulties).astype(float)
        estimate = mean_and_stderr_clustered(rewards.tolist())
        covered += estimate.low <= 0.5 <= estimate.high
        mean = float(rewards.mean())
        covered_naively += abs(mean - 0.5) <= 1.96 * math.sqrt(mean * (1 - mean) / rewards.size)
    assert 0.93 <= covered / SIMULATIONS <= 0.97
    # independent rollouts would make this 95 % too: the rollouts of a prompt are not independent
    assert covered_naively / SIMULATIONS < 0.85


@pytest.mark.parametrize(("prompts", "chance"), [(5, 0.95), (10, 0.9), (20, 0.02), (10, 0.5)])
def test_intervals_at_the_edges_cover_at_least_what_they_say(prompts: int, chance: float) -> None:
    random = np.random.default_rng(7)
    covered = 0
    for _ in range(SIMULATIONS):
        rewards = (random.random((prompts, 1)) < chance).astype(float).tolist()
        estimate = mean_and_stderr_clustered(rewards)
        covered += estimate.low <= chance <= estimate.high
    assert covered / SIMULATIONS >= 0.945
