"""Updates whose loss or gradient norm is not finite: not applied, named and counted; three in a row end the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verifiers.errors import NotFiniteError
from verifiers.train.processes.distributed import Ranks

__all__ = ["FiniteUpdates"]

logger = logging.getLogger("verifiers.train")

_MOST_IN_A_ROW = 3


class FiniteUpdates:
    """The check of each update between its gradient and its optimizer step; every rank has one.

    DeepSpeed takes that step with the last backward pass: there the first update that is not finite ends the run.

    Args:
        accelerator: of accelerate.
        ranks: of the run.
        drop: called on rank 0 with the optimizer step before an update that is not applied, and the places in the
            block of the rollouts that made it so; records all of the update as dropped, and returns names of these.
    """

    def __init__(self, accelerator: Any, ranks: Ranks, drop: Callable[[int, list[int]], str]) -> None:
        self._accelerator, self._ranks, self._drop = accelerator, ranks, drop
        self.reset()

    def reset(self) -> None:
        """Forget what was counted: a new run begins."""
        self._calls: list[tuple[Tensor, Tensor, Tensor]] = []
        self._losses: list[Tensor] = []
        self._loss: float | None = None
        # since the last log: updates, those without a finite loss, those that were not applied
        self._updates = self._without_loss = self._not_applied = 0
        self._in_a_row = 0

    def note_call(self, loss: Tensor, rollout_index_R: Tensor, is_finite_R: Tensor) -> None:
        """Keep the loss of a micro-batch, the places of its rollouts, and which of its rows are finite themselves."""
        self._calls.append((loss.detach(), rollout_index_R, is_finite_R))

    def end_micro_step(self, loss: Tensor, scale: float = 1.0) -> Tensor:
        """Return the loss of the whole update with its last micro-step, for transformers to log; 0 until then.

        A loss that is not finite on any rank is 0 as well: `correct` leaves it out.

        Args:
            scale: with the last micro-step, the factor for the loss of all.
        """
        self._losses.append(loss)
        if not self._accelerator.sync_gradients:
            return torch.zeros_like(loss)
        total, self._losses = torch.stack(self._losses).sum() * scale, []
        found = [one for one in self._ranks.gather(float(total)) if not math.isfinite(one)]
        self._loss = found[0] if found else None
        return torch.zeros_like(total) if found else total

    def end_update(self, model: Any, optimizer: Any, optimizer_step: int, norm: Any) -> None:
        """Drop the gradient of an update that is not finite; every rank calls it right before the optimizer's step.

        Without gradients that step does nothing.

        Args:
            model: whose gradients they are.
            optimizer: accelerate's. It reports the step as skipped where it is, so that the learning rate stays.
            optimizer_step: steps before the update.
            norm: of the gradient; None where it is not known.

        Raises:
            NotFiniteError: no more updates are left out.
        """
        norm = float(getattr(norm, "full_tensor", lambda: norm)() or 0.0)
        is_applied = self._loss is None and math.isfinite(norm)
        self._updates += 1
        self._without_loss += self._loss is not None
        if self._accelerator.scaler is None:
            optimizer._is_overflow = not is_applied
        if is_applied:
            self._in_a_row = 0
        else:
            self._not_applied += 1
            self._refuse(optimizer, optimizer_step, norm)
            model.zero_grad()
        self._calls = []

    def _refuse(self, optimizer: Any, optimizer_step: int, norm: float) -> None:
        scaler, is_deepspeed = self._accelerator.scaler, "DEEPSPEED" in str(self._accelerator.distributed_type)
        # gradients overflow while the scale of float16 is looked for
        is_search = (is_deepspeed and optimizer.step_was_skipped) or (scaler is not None and scaler.get_scale() > 1.0)
        self._in_a_row += not is_search or self._loss is not None
        places = {place for own in self._ranks.gather(self._places_not_finite()) for place in own}
        named = self._ranks.on_rank_0(lambda: self._drop(optimizer_step, sorted(places)))
        values = f"gradient norm {norm}" if self._loss is None else f"loss {self._loss}, gradient norm {norm}"
        text = f"the update of step {optimizer_step + 1} is not finite ({values}) by rollouts of {named}"
        if self._in_a_row >= _MOST_IN_A_ROW or (is_deepspeed and not is_search):
            raise NotFiniteError(
                f"{text}; the run ends with {self._in_a_row} such updates in a row. Look at rewards and advantages "
                "there, or lower learning_rate, and give the same command again: it resumes from the last checkpoint."
            )
        if self._ranks.is_main:
            logger.warning("%s. It is not applied, and its rollouts are recorded as dropped.", text)

    def _places_not_finite(self) -> list[int]:
        """Return the rollouts of rows that are not finite; where none is known, those of the micro-batches."""
        calls = [call for call in self._calls if not math.isfinite(call[0])]
        if self._loss is None:
            calls = self._calls
        rows = [index_R if is_finite_R.all() else index_R[~is_finite_R] for _, index_R, is_finite_R in calls]
        return [place for index_R in rows for place in index_R.tolist() if place >= 0]

    def correct(self, logs: dict[str, float]) -> None:
        """Make the loss of a log a mean over the updates that have one; add the count of those not applied."""
        if "loss" in logs:
            with_loss = self._updates - self._without_loss
            logs["loss"] *= self._updates / with_loss if with_loss else math.nan
            logs["updates/not_finite"] = float(self._not_applied)
            self._updates = self._without_loss = self._not_applied = 0
