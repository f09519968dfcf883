"""The KL to the reference model: as terms of the loss, or subtracted from the rewards.

TRL's own term of the loss is k3 of Schulman ("Approximating KL divergence", 2020). Here are the estimators that it
lacks, k1 and k2, and the penalty in the reward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verifiers.monitoring.stage_timer import StageTimer, in_stage
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.train.batching.collate import MicroBatch
from verifiers.train.loss.logprobs import PolicyLogprobs
from verifiers.train.processes.distributed import Ranks
from verifiers.types import RolloutKey

__all__ = ["RewardPenalty", "kl_terms"]


def kl_terms(
    logps_RC: Tensor, ref_logps_RC: Tensor, old_logps_RC: Tensor | None, estimator: str, *, corrected: bool
) -> Tensor:
    """Return an estimate (R, C) of KL(pi || pi_ref) at each token, in nats, to be put into the loss.

    With d = log pi - log pi_ref, k1 is d and k2 is d^2 / 2. As a term of a loss k2 has the gradient of the KL in
    expectation, and k1 none. The factor pi / pi_old, with gradient for k1 and without for k2, gives both that of the
    KL, off policy too (Liu et al., arXiv:2510.01555).

    Args:
        logps_RC: log pi, with gradient.
        ref_logps_RC, old_logps_RC: log pi_ref, and log pi_old; None for pi itself.
        estimator: "k1" or "k2".
        corrected: multiply by that factor.
    """
    difference_RC = logps_RC - ref_logps_RC
    kl_RC = difference_RC if estimator == "k1" else difference_RC.square() / 2
    if not corrected:
        return kl_RC
    ratio_RC = (logps_RC - (logps_RC.detach() if old_logps_RC is None else old_logps_RC)).exp()
    return kl_RC * (ratio_RC if estimator == "k1" else ratio_RC.detach())


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
    def measure(self, micro_batches: Sequence[MicroBatch]) -> dict[int, tuple[float, int]]:
        """Return the KL (sum in nats, tokens) of each rollout of a block, over all ranks.

        Args:
            micro_batches: this rank's, as many as every other rank has.
        """
        own = [self._of_rows(batch) for batch in micro_batches]
        sums: dict[int, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for index, kl, tokens in (row for found in self.ranks.gather(own) for batch in found for row in batch):
            sums[index] = (sums[index][0] + kl, sums[index][1] + tokens)
        return dict(sums)

    def _of_rows(self, batch: MicroBatch) -> list[tuple[int, float, int]]:
        ref_RC = self.logprobs.of_reference(batch).to(batch["tool_mask"].device)
        sampled_RC = batch["tool_mask"].bool()
        kl_R = torch.where(sampled_RC, batch["sampling_per_token_logps"] - ref_RC, 0.0).double().sum(1)
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
