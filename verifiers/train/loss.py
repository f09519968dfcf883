"""The loss plane: TRL's `_compute_loss` with rollouts weighted once and the sampler's policy corrected for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import trl
from accelerate.utils import gather_object
from torch import Tensor

from verifiers.train.config import GRPOConfig
from verifiers.train.correction import (
    Mismatch,
    correction_weights,
    join_mismatches,
    measure_mismatch,
    mismatch_metrics,
)
from verifiers.train.row_weights import WeightedBeta

__all__ = ["CorrectedLoss"]


class CorrectedLoss(trl.GRPOTrainer):
    """`trl.GRPOTrainer` whose loss takes batches of `train.block.build_training_block`.

    All of TRL's loss types are inherited. What is added happens through its inputs: advantages come weighted, the
    KL coefficient is weighted for the call, and the correction pi_old / mu is multiplied into the advantages.
    """

    args: GRPOConfig
    model: Any
    beta: float

    def __init__(self, **kwargs: Any) -> None:
        self._correcting: dict[str, Any] | None = None
        self._mismatch: list[Mismatch] = []
        super().__init__(**kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        beta = self.beta
        if beta != 0.0:
            self.beta = WeightedBeta(beta, inputs["row_weights"])
        self._correcting = inputs
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self.beta, self._correcting = beta, None
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        # called first thing inside _compute_loss: where no old log-probs are stored, these are the old ones,
        # and the correction can be put into the advantages before they are read
        result: tuple[Any, Any, Any] = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        inputs, self._correcting = self._correcting, None
        if inputs is not None:
            self._correct(inputs, result[0].detach())
        return result

    def _correct(self, inputs: dict[str, Any], current_logps_RC: Tensor) -> None:
        """Multiply the advantages by the truncated weight pi_old / mu, and measure how far the two are apart."""
        old_RC = inputs.get("old_per_token_logps")
        old_RC = current_logps_RC if old_RC is None else old_RC
        sampling_RC, mask_RC = inputs["sampling_per_token_logps"], inputs["tool_mask"]
        weights_RC = None
        if self.args.importance_correction:
            weights_RC = correction_weights(
                old_RC,
                sampling_RC,
                mask_RC,
                mode=self.args.vllm_importance_sampling_mode,
                clip_max=self.args.vllm_importance_sampling_clip_max,
                clip_min=self.args.vllm_importance_sampling_clip_min,
            )
            if self.loss_type == "vespo":
                inputs["importance_sampling_ratio"] = weights_RC
            else:
                advantages = inputs["advantages"]
                inputs["advantages"] = (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages) * weights_RC
        # without the correction the old log-probs may be the sampler's own
        proximal_RC = old_RC if self.args.importance_correction else current_logps_RC
        mismatch = measure_mismatch(
            proximal_RC, sampling_RC, mask_RC, weights_RC, self.args.vllm_importance_sampling_mode
        )
        if mismatch is not None and self.model.training:
            self._mismatch.append(mismatch)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's; how far sampler and trainer are apart is summed up over micro-batches and ranks first."""
        if self.model.training:
            parts, self._mismatch = self._mismatch, []
            mismatch = join_mismatches(parts)
            if self.accelerator.num_processes > 1:
                mismatch = join_mismatches([part for part in gather_object([mismatch]) if part is not None])
            if mismatch is not None:
                for name, value in mismatch_metrics(mismatch).items():
                    self._metrics["train"][name].append(value)
        super().log(logs, start_time)

    @torch.no_grad()
    def _logps(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Log-probs (R, C) of a micro-batch's completions at the training temperature, without gradient."""
        device = self.accelerator.device
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1).to(device)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).to(device)
        size = self.args.old_logprobs_batch_size or self.args.per_device_train_batch_size
        was_training = model.training
        model.eval()
        try:
            logps, _, _ = super()._get_per_token_logps_and_entropies(
                model, ids, mask, batch["completion_ids"].size(1), batch_size=size
            )
        finally:
            model.train(was_training)
        return logps

    def _reference_logps(self, batch: Mapping[str, Tensor]) -> Tensor:
        if self.ref_model is not None:
            return self._logps(self.ref_model, batch)
        model = self.accelerator.unwrap_model(self.model)
        adapter = "ref" if "ref" in model.peft_config else None
        with trl.trainer.utils.use_adapter(model, adapter_name=adapter):
            return self._logps(self.model, batch)
