"""The check of updates on its own: ranks that disagree, and the scale of float16."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifiers.errors import NotFiniteError
from verifiers.train.loss.updates import FiniteUpdates


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
