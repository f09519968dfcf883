"""Values of several micro-batches and ranks are joined into those of one micro-batch with all their tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifiers.train.loss.updates import LossMetrics

PARTS = [{"entropy": [1.0, 1.0, 4.0]}, {"entropy": [4.0, math.nan], "kl": []}, {"clip_ratio/low_min": [0.3, 0.1]}]
PARTS += [{"clip_ratio/low_min": [0.2], "clip_ratio/high_max": [math.nan]}, {"clip_ratio/high_max": [0.1, 0.2]}]
WANTED = {"entropy": 2.5, "clip_ratio/low_min": 0.1, "clip_ratio/high_max": 0.2}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_means_count_each_value_once_and_extremes_are_over_all(ranks: int) -> None:
    metrics = [LossMetrics() for _ in range(ranks)]
    for number, part in enumerate(PARTS):
        metrics[number % ranks].add({name: torch.tensor(values) for name, values in part.items()})
    found: list[dict[str, tuple[float, float]]] = []

    def gather(own: dict[str, tuple[float, float]]) -> list[dict[str, tuple[float, float]]]:
        found.append(own)
        return found

    together: Any = SimpleNamespace(gather=gather)
    alone: Any = SimpleNamespace(gather=lambda own: [own])
    # the last rank has what all hold
    assert [one.take(together) for one in metrics][-1] == pytest.approx(WANTED)
    assert metrics[0].take(alone) == {}
