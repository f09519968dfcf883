"""The KL to the reference model, subtracted from the rewards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifiers.monitoring.stage_timer import StageTimer, in_stage
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.loss.logprobs import PolicyLogprobs
from verifiers.train.processes.distributed import Ranks
from verifiers.types import RolloutKey

__all__ = ["RewardPenalty"]


@dataclass(slots=True)
class RewardPenalty:
    """The KL penalty that is subtracted from rewards before there are advantages.

    A rollout's reward becomes r - beta * sum of (log mu - log pi_ref) over its sampled tokens, with mu the policy
    that sampled them: the penalty of RLHF (Ziegler et al., arXiv:1909.08593; Ouyang et al., arXiv:2203.02155), in the
    form of one reward a rollout (Ahmadian et al., arXiv:2402.14740). Every rank calls it in the same order.

    Args:
        beta: coefficient, in reward per nat.
        ranks: of the run.
        logprobs: of the reference.
        timer: the trainer's time by stage.
    """

    beta: float
    ranks: Ranks
    logprobs: PolicyLogprobs
    timer: StageTimer

    @in_stage("old_logprobs")
    def measure(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> dict[int, tuple[float, int]]:
        """Return the KL (sum in nats, tokens) of each rollout of a block, over all ranks.

        Args:
            micro_batches: this rank's, as many as every other rank has.
        """
        own = [self._of_rows(batch) for batch in micro_batches]
        sums: dict[int, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for index, kl, tokens in (row for found in self.ranks.gather(own) for batch in found for row in batch):
            sums[index] = (sums[index][0] + kl, sums[index][1] + tokens)
        return dict(sums)

    def _of_rows(self, batch: Mapping[str, Tensor]) -> list[tuple[int, float, int]]:
        ref_RC = self.logprobs.of_reference(batch).to(batch["loss_mask"].device)
        sampled_RC = batch["loss_mask"].bool()
        kl_R = torch.where(sampled_RC, batch["sampler_logps"] - ref_RC, 0.0).double().sum(1)
        rows = zip(batch["rollout_index"].tolist(), kl_R.tolist(), sampled_RC.sum(1).tolist(), strict=True)
        return [row for row in rows if row[0] >= 0]

    def of_block(self, block: ScoredBlock, measured: dict[int, tuple[float, int]]) -> dict[RolloutKey, float]:
        """Return what is subtracted from the reward of each rollout."""
        rollouts = block.rollouts
        return {rollouts[index].key: self.beta * kl for index, (kl, _) in measured.items()}

    def metrics(self, measured: dict[int, tuple[float, int]]) -> dict[str, Any]:
        """Return the KL a token (k1), and the mean penalty a rollout; nothing where nothing was sampled."""
        tokens = sum(count for _, count in measured.values())
        if not tokens:
            return {}
        kl = sum(kl for kl, _ in measured.values())
        return {"kl": kl / tokens, "reward/kl_penalty": self.beta * kl / len(measured)}
