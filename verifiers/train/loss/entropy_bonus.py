"""The coefficient of the entropy bonus, fixed or adapted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verifiers.train.loss.loss_metrics import LossMetrics
from verifiers.train.loss.policy_loss import MeasuredLoss
from verifiers.train.processes.distributed import Ranks

__all__ = ["EntropyBonus"]


class EntropyBonus:
    """The coefficient of the mean entropy in the loss.

    With `use_adaptive_entropy` it rises after each update whose entropy is at most `entropy_target`, else it falls,
    and it applies only after the former (Skywork-OR1, arXiv:2505.22312).

    Args:
        trainer: TRL's, which keeps the coefficient and the last entropy, and saves and loads them with checkpoints.
        ranks: of the run.
        metrics: get what is logged of each update.
    """

    def __init__(self, trainer: Any, ranks: Ranks, metrics: LossMetrics) -> None:
        self._trainer, self._args, self._ranks, self._metrics = trainer, trainer.args, ranks, metrics
        self.is_on = self._args.entropy_coef != 0.0 or self._args.use_adaptive_entropy
        self.reset()

    def reset(self) -> None:
        """Forget the update that has begun."""
        self._entropy = self._tokens = self._policy_loss = 0.0

    @property
    def coefficient(self) -> float:
        """What the entropy counts in the present update."""
        if self._args.use_adaptive_entropy and self._trainer._last_world_entropy > self._args.entropy_target:
            return 0.0
        return float(self._trainer.entropy_coef)

    def note(self, measured: MeasuredLoss) -> None:
        """Add a micro-batch of the update."""
        if self.is_on:
            entropies: Tensor = measured.values["entropy"]
            self._entropy += float(entropies.sum())
            self._tokens += len(entropies)
            self._policy_loss += float(measured.policy_loss)

    def end_update(self) -> None:
        """Adapt the coefficient for the next update, where it is not fixed; every rank calls it."""
        if not self.is_on:
            return
        parts = self._ranks.gather((self._entropy, self._tokens, self._policy_loss))
        entropy, tokens, policy_loss = (sum(values) for values in zip(*parts, strict=True))
        if self._args.use_adaptive_entropy:
            self._adapt(entropy / max(tokens, 1.0))
        # every rank has both: means over ranks are these values
        both = {"policy_loss": policy_loss, "entropy_coef": float(self._trainer.entropy_coef)}
        self._metrics.add({name: torch.tensor([value]) for name, value in both.items()})
        self.reset()

    def _adapt(self, entropy: float) -> None:
        args, trainer = self._args, self._trainer
        if entropy <= args.entropy_target:
            trainer.entropy_coef = min(trainer.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
        else:
            trainer.entropy_coef = max(trainer.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)
        trainer._last_world_entropy = entropy
