"""The coefficient of the entropy bonus from update to update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifiers.train.loss.policy_loss import MeasuredLoss
from verifiers.train.loss.updates import EntropyBonus, LossMetrics


def run_updates(updates: list[list[list[float]]], **settings: Any) -> tuple[list[float], dict[str, float]]:
    """Return the coefficient that applies in each update, and what is logged of all, on two ranks.

    Args:
        updates: the entropies of each update: of this rank's two micro-batches and the other rank's one.
    """
    bounds = {"entropy_coef_min": 0.0, "entropy_coef_max": 0.02, "entropy_coef_delta": 0.008, "entropy_target": 1.0}
    args = SimpleNamespace(**{"entropy_coef": 0.01, "use_adaptive_entropy": False, **bounds, **settings})
    trainer = SimpleNamespace(args=args, entropy_coef=args.entropy_coef, _last_world_entropy=float("inf"))
    metrics, others = LossMetrics(), iter(updates)

    def gather(own: tuple[float, float, float]) -> list[tuple[float, float, float]]:
        other = next(others)[-1]
        return [own, (sum(other), len(other), 0.25)]

    ranks: Any = SimpleNamespace(gather=gather)
    bonus, applied = EntropyBonus(trainer, ranks, metrics), []
    for *micro_batches, _ in updates:
        for entropies in micro_batches:
            applied.append(bonus.coefficient)
            values = {"entropy": torch.tensor(entropies)}
            bonus.note(MeasuredLoss(torch.tensor(0.5), values, torch.ones(1).bool()))
        bonus.end_update()
    return applied[::2], metrics.take(SimpleNamespace(gather=lambda own: [own]))


def test_a_fixed_coefficient_applies_in_every_update_and_is_logged() -> None:
    applied, logged = run_updates([[[0.1], [9.0], [1.0]]] * 3)
    assert applied == [0.01] * 3
    assert logged == pytest.approx({"policy_loss": 1.25, "entropy_coef": 0.01})


def test_without_a_bonus_nothing_is_logged() -> None:
    assert run_updates([[[0.1], [9.0], [1.0]]], entropy_coef=0.0)[1] == {}


def test_an_adapted_coefficient_rises_and_applies_after_an_update_below_the_target() -> None:
    # means over the tokens of all ranks and micro-batches: 0.9, 0.9, 0.9, 1.1, 0.9
    low, high = [[0.0], [0.9, 0.9], [1.8]], [[1.1], [1.1], [1.1, 1.1]]
    applied, logged = run_updates([low, low, low, high, low], use_adaptive_entropy=True)
    assert applied == pytest.approx([0.0, 0.018, 0.02, 0.02, 0.0])
    assert logged["entropy_coef"] == pytest.approx((0.018 + 0.02 + 0.02 + 0.012 + 0.02) / 5)
