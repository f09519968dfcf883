"""Parts around TRL's `_compute_loss`: rollouts count once, and the sampler's policy is corrected for.

All of TRL's loss types are kept. What is added happens through the inputs: advantages come weighted, the coefficients
of other terms are weighted for the call, and the weight pi_old / mu is multiplied into the advantages.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import trl
from accelerate.utils import DistributedType, gather_object
from torch import Tensor

from verifiers.train.batching.packing import MicroBatch
from verifiers.train.batching.weighting import WeightedBeta, WeightedCoefficient
from verifiers.train.config import GRPOConfig
from verifiers.train.loss.importance_sampling import (
    Mismatch,
    geometric_ratios,
    importance_weights,
    join_mismatches,
    measure_mismatch,
    mismatch_metrics,
)
from verifiers.train.loss.kl_penalty import kl_terms
from verifiers.train.loss.loss_metrics import LossMetrics
from verifiers.train.validation.loss_settings import LOSS_TYPES

__all__ = [
    "CorrectedLoss",
    "micro_step_loss",
    "only_advantages_matter",
    "sequence_token_reference",
    "weighted_coefficients",
]


class CorrectedLoss:
    """The work around each call of TRL's loss: the inputs before, the importance weights within, the metrics after.

    Args:
        args: mode and bounds of the importance sampling, level of the ratio, and estimator of the KL term.

    Attributes:
        metrics: what TRL measured.
        is_finite_R: False where a row's log-probs or weighted advantages of the newest call are not finite.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self._args = args
        self.reset()

    def reset(self) -> None:
        """Forget what was measured, and a call that was cut off."""
        self._inputs: dict[str, Any] | None = None
        self._beta: WeightedBeta | None = None
        self._mismatches: list[Mismatch] = []
        self.is_finite_R = torch.ones(0, dtype=torch.bool)
        self.metrics = LossMetrics()

    @contextlib.contextmanager
    def call(self, trainer: Any, inputs: Mapping[str, Any], logged: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Surround one call of TRL's loss; gives the inputs for it.

        Args:
            trainer: TRL's, whose loss it is.
            inputs: the micro-batch.
            logged: TRL's metrics by mode. They do not get what the call measures, which is joined over micro-batches.
        """
        mode = "train" if trainer.model.training else "eval"
        prepared = self.prepare(inputs)
        before, logged[mode] = logged[mode], defaultdict(list)
        try:
            with weighted_coefficients(trainer, inputs):
                self._beta = trainer.beta if isinstance(trainer.beta, WeightedBeta) else None
                yield prepared
        finally:
            self.end()
            measured, logged[mode] = logged[mode], before
        self.metrics.add(measured, prepared, per_row=trainer.importance_sampling_level == "sequence")

    def prepare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs for TRL's loss; the next log-probs that are computed are corrected against them."""
        sampled_RC = inputs["tool_mask"].bool()
        # log-probs of tokens that nobody sampled are 0, where a ratio of them cannot overflow
        names = {"old_per_token_logps", "ref_per_token_logps"} & inputs.keys()
        self._inputs = {**inputs, **{name: torch.where(sampled_RC, inputs[name], 0.0) for name in names}}
        return self._inputs

    def end(self) -> None:
        """End a call of TRL's loss, however it ended."""
        self._inputs = None

    def correct(self, logps_RC: Tensor, *, training: bool) -> Tensor:
        """Take the log-probs that TRL's loss has computed, and correct its advantages before it reads them.

        The loss computes them first of all: where no old log-probs are stored, these are the old ones.

        Args:
            training: the mismatch is measured.

        Returns:
            The log-probs, 0 on tokens that nobody sampled; unchanged outside of a call of the loss.
        """
        inputs, self._inputs = self._inputs, None
        if inputs is None:
            return logps_RC
        logps_RC = torch.where(inputs["tool_mask"].bool(), logps_RC, 0.0)
        old_RC = inputs.get("old_per_token_logps")
        if self._beta is not None and self._args.kl_estimator in ("k1", "k2"):
            self._beta.kl_RC = kl_terms(
                logps_RC,
                inputs["ref_per_token_logps"],
                old_RC,
                self._args.kl_estimator,
                corrected=self._args.use_bias_correction_kl,
            )
        mismatch = self._weight_advantages(inputs, logps_RC.detach())
        advantages = inputs["advantages"].reshape(len(logps_RC), -1)
        self.is_finite_R = (logps_RC.detach() + advantages).isfinite().all(dim=1)
        if self._args.importance_sampling_level == "sequence_token" and old_RC is not None:
            inputs["old_per_token_logps"] = sequence_token_reference(logps_RC.detach(), old_RC, inputs["tool_mask"])
        if mismatch is not None and training:
            self._mismatches.append(mismatch)
        return logps_RC

    def _weight_advantages(self, inputs: dict[str, Any], current_RC: Tensor) -> Mismatch | None:
        """Multiply the advantages by the truncated weight pi_old / mu; return how far the two policies are apart."""
        args, old_RC = self._args, inputs.get("old_per_token_logps")
        old_RC = current_RC if old_RC is None else old_RC
        sampling_RC, mask_RC = inputs["sampling_per_token_logps"], inputs["tool_mask"]
        mode = args.vllm_importance_sampling_mode
        if not args.vllm_importance_sampling_correction:
            # the old log-probs may be the sampler's own then
            return measure_mismatch(current_RC, sampling_RC, mask_RC, None, mode)
        weights_RC = importance_weights(
            old_RC,
            sampling_RC,
            mask_RC,
            mode=mode,
            clip_max=args.vllm_importance_sampling_clip_max,
            clip_min=args.vllm_importance_sampling_clip_min,
            geometric_max=args.geometric_mask_max,
            geometric_min=args.geometric_mask_min,
        )
        if LOSS_TYPES[args.loss_type].multiplies_ratios:
            inputs["importance_sampling_ratio"] = weights_RC
        else:
            advantages = inputs["advantages"]
            inputs["advantages"] = (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages) * weights_RC
        return measure_mismatch(old_RC, sampling_RC, mask_RC, weights_RC, mode)

    def take_metrics(self, num_ranks: int) -> dict[str, float]:
        """Return what was measured since the last call, joined over micro-batches; the mismatch over ranks too.

        Args:
            num_ranks: every one of which calls this.
        """
        parts, self._mismatches = self._mismatches, []
        mismatch = join_mismatches(parts)
        if num_ranks > 1:
            mismatch = join_mismatches([part for part in gather_object([mismatch]) if part is not None])
        return {**self.metrics.take(), **(mismatch_metrics(mismatch) if mismatch is not None else {})}


def sequence_token_reference(logps_RC: Tensor, old_logps_RC: Tensor, loss_mask_RC: Tensor) -> Tensor:
    """Return log-probs (R, C) in place of the old ones, under which a token's ratio is that of GSPO-token.

    The ratio is sg[s] pi / sg[pi], with s the geometric mean of pi / pi_old over the row and sg[] without gradient
    (Zheng et al., "Group sequence policy optimization", arXiv:2507.18071). So a token's advantage may be its own,
    and the clipping is that of the row's ratio.

    Args:
        logps_RC: log pi, without gradient.
        old_logps_RC: log pi_old.
        loss_mask_RC: 1 on sampled tokens.
    """
    sequence_R1 = geometric_ratios(logps_RC, old_logps_RC, loss_mask_RC).log()
    return torch.where(loss_mask_RC.bool(), logps_RC - sequence_R1, old_logps_RC)


@contextlib.contextmanager
def weighted_coefficients(trainer: trl.GRPOTrainer, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Weight the coefficients of the loss terms that advantages do not reach, for one call of TRL's loss.

    Args:
        trainer: whose coefficients they are.
        inputs: the micro-batch, with `row_weights` and `update_share`.
    """
    beta, router, share = trainer.beta, trainer.router_aux_loss_coef, float(inputs["update_share"])
    level = trainer.importance_sampling_level
    if level == "sequence_token":
        # TRL knows tokens' ratios, which are relative to what `sequence_token_reference` puts in
        trainer.importance_sampling_level = "token"
    if beta != 0.0:
        trainer.beta = WeightedBeta(beta, inputs["row_weights"])
    trainer.entropy_coef = WeightedCoefficient(trainer.entropy_coef, share)
    trainer.router_aux_loss_coef = WeightedCoefficient(router, share)
    try:
        yield
    finally:
        trainer.beta, trainer.router_aux_loss_coef = beta, router
        trainer.importance_sampling_level = level
        # adaptive control may have moved it
        trainer.entropy_coef = float(trainer.entropy_coef)


def micro_step_loss(
    accelerator: Any, model: Any, micro_batches: Sequence[MicroBatch], loss_of: Callable[[Any, MicroBatch], Tensor]
) -> Tensor:
    """Return the loss of a micro-step; of its micro-batches all but the last have had their backward pass by then.

    So each frees its activations before the next begins. What is returned has the value of all micro-batches
    together, and the last one's gradient.

    Args:
        micro_batches: in the order in which they run.
        loss_of: the loss of one.
    """
    device = accelerator.device
    *others, last = [{name: value.to(device) for name, value in batch.items()} for batch in micro_batches]
    before = torch.zeros((), device=device)
    for batch in others:
        with _more_to_come(accelerator, model):
            loss = loss_of(model, batch)
            deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
            # as transformers' training_step does: the loss is scaled already
            accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
        before += loss.detach()
        del loss
    return loss_of(model, last) + before


@contextlib.contextmanager
def _more_to_come(accelerator: Any, model: Any) -> Iterator[None]:
    """Put off what belongs to the end of an update: replicas reduce gradients once, DeepSpeed steps once."""
    state = accelerator.gradient_state
    if not state.sync_gradients:
        # transformers puts it off for the whole micro-step
        yield
        return
    reduction: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    # sharded gradients are reduced after each micro-batch: whole ones would have to be kept in between
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if not sharded and not state.plugin_kwargs.get("sync_each_batch", False):
        reduction = accelerator.no_sync(model)
    state._set_sync_gradients(False)
    try:
        with reduction:
            yield
    finally:
        state._set_sync_gradients(True)


def only_advantages_matter(args: GRPOConfig, beta: float, experts: bool) -> bool:
    """Return whether a row whose advantage is 0 adds nothing to the loss, so that it can be left out.

    Args:
        args: settings of the run.
        beta: coefficient of the KL term.
        experts: the loss has the router's term of a mixture of experts.
    """
    return (
        args.skip_zero_advantage_rows
        and beta == 0.0
        and args.entropy_coef == 0.0
        and not args.use_adaptive_entropy
        and args.top_entropy_quantile >= 1.0
        and not experts
        # a mean over a micro-batch's own tokens counts every row of it
        and LOSS_TYPES[args.loss_type].mean_over != "micro-batch tokens"
    )
