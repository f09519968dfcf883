"""95 % intervals over seeds, by Student's t; rounds of one seed count as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.evals.statistics import Bounds, Estimate, mean_and_stderr_clustered, paired_difference

Seeds = Mapping[int, Sequence[float]]
"""The values of each seed, one a round."""

_ANY: Bounds = (-math.inf, math.inf)


def mean_over_seeds(values: Seeds, bounds: Bounds = _ANY) -> dict[str, Any]:
    """Return mean and interval over seeds.

    The interval is None with fewer than two seeds, and where all of them agree and there are no bounds.
    """
    return _as_json(mean_and_stderr_clustered(list(values.values()), bounds=bounds))


def ratio_over_seeds(ours: Seeds, theirs: Seeds) -> dict[str, Any]:
    """Return the geometric mean of ours over theirs, paired by seed, with its interval."""
    before, after = (
        {seed: [math.log(value) for value in values] for seed, values in side.items()} for side in (theirs, ours)
    )
    return _as_json(paired_difference(before, after, bounds=_ANY), math.exp)


def _as_json(estimate: Estimate, scale: Any = float) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return float(f"{scale(value):.4g}") if math.isfinite(value) else None

    return {
        "mean": number(estimate.mean),
        "low": number(estimate.low),
        "high": number(estimate.high),
        "seeds": estimate.prompts,
    }
