"""What transformers counts a run's epochs by: a loader of empty items, for the trainer feeds itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from verifiers.data.plan import BatchPlan

__all__ = ["empty_epoch"]


def empty_epoch(plan: BatchPlan, begins_at: int) -> DataLoader[Any]:
    """One empty item a micro-step of an epoch, so that nothing is read and skipped.

    Args:
        begins_at: the optimizer step that the run goes on from.
    """
    # a curriculum may have fewer rows than a block
    updates = max(1, plan.blocks_per_epoch) * plan.updates_per_block
    if begins_at >= plan.max_steps:
        # transformers looks at max_steps only after a step, and begins no epoch where all are done
        updates = plan.max_steps
    # a generator of its own: a new epoch must not draw from the one that dropout draws from
    return DataLoader(
        _EmptySteps(updates * plan.gradient_accumulation_steps),
        batch_size=1,
        collate_fn=_first,
        generator=torch.Generator(),
    )


class _EmptySteps(Dataset[Any]):
    def __init__(self, steps: int) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {}


def _first(items: list[Any]) -> Any:
    return items[0]
