"""One update: what its micro-batches measure, its entropy bonus, and the check that it is finite."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifiers.errors import NotFiniteError
from verifiers.train.loss.policy_loss import MeasuredLoss
from verifiers.train.loss.updates import EntropyBonus, FiniteUpdates, LossMetrics


def an_update(
    updates: FiniteUpdates, loss: float, norm: float | None, step: int, *, was_skipped: bool = False
) -> SimpleNamespace:
    """Take an update of one micro-step; return the optimizer that it was given."""
    model, optimizer = torch.nn.Linear(1, 1), SimpleNamespace(step_was_skipped=was_skipped)
    model(torch.ones(1)).sum().backward()
    updates.note_call(torch.tensor(loss), torch.tensor([0, 1]), torch.tensor([True, math.isfinite(loss)]))
    updates.end_micro_step(torch.tensor(loss))
    updates.end_update(model, optimizer, step, norm)
    optimizer.has_gradient = model.weight.grad is not None
    return optimizer


def checks(dropped: list[Any], others: list[float] | None = None, **accelerator: Any) -> FiniteUpdates:
    """Return the check of rank 0, beside ranks with other losses."""

    def gather(own: Any) -> list[Any]:
        return [own, *(others or [])] if isinstance(own, float) else [own]

    def drop(step: int, places: list[int]) -> str:
        dropped.append((step, places))
        return "block 0"

    ranks: Any = SimpleNamespace(gather=gather, on_rank_0=lambda work: work(), is_main=True)
    defaults = {"sync_gradients": True, "scaler": None, "distributed_type": "NO"}
    return FiniteUpdates(SimpleNamespace(**{**defaults, **accelerator}), ranks, drop)


def test_a_loss_of_another_rank_is_enough_and_the_row_is_named_by_its_rank() -> None:
    dropped: list[Any] = []
    assert not an_update(checks(dropped, [math.nan]), 0.5, 1.0, 4).has_gradient
    assert not an_update(checks(dropped, [0.5]), math.inf, 1.0, 5).has_gradient
    assert an_update(checks(dropped, [0.5]), 0.5, 1.0, 6).has_gradient
    assert dropped == [(4, []), (5, [1])]


def test_while_the_scale_of_float16_is_looked_for_gradients_may_overflow() -> None:
    dropped: list[Any] = []
    scale = [65536.0]
    updates = checks(dropped, scaler=SimpleNamespace(get_scale=lambda: scale[0]))
    for step in range(5):
        assert not an_update(updates, 0.5, math.inf, step).has_gradient
    scale[0] = 1.0
    an_update(updates, 0.5, math.inf, 5)
    an_update(updates, 0.5, math.inf, 6)
    with pytest.raises(NotFiniteError, match="3 such updates in a row"):
        an_update(updates, 0.5, math.inf, 7)
    assert len(dropped) == 8


def test_under_deepspeed_an_update_that_was_taken_ends_the_run_and_one_that_was_skipped_does_not() -> None:
    updates = checks([], distributed_type="DistributedType.DEEPSPEED")
    an_update(updates, 0.5, None, 0)
    an_update(updates, 0.5, math.inf, 1, was_skipped=True)
    with pytest.raises(NotFiniteError, match="update of step 3 is not finite"):
        an_update(updates, math.nan, math.nan, 2)


# -- metrics ---------------------------------------------------------------------------------------------------------

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


# -- the entropy bonus -----------------------------------------------------------------------------------------------


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
