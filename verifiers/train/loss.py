"""The loss plane: TRL's `_compute_loss`, pass by pass, rollouts weighted once, the sampler's policy corrected for."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import trl
from accelerate.utils import DistributedType, gather_object
from torch import Tensor

from verifiers.train.config import GRPOConfig
from verifiers.train.correction import (
    Mismatch,
    correction_weights,
    join_mismatches,
    measure_mismatch,
    mismatch_metrics,
)
from verifiers.train.loss_metrics import LossMetrics
from verifiers.train.passes import Pass
from verifiers.train.row_weights import WeightedBeta, WeightedCoefficient

__all__ = ["CorrectedLoss"]


class CorrectedLoss(trl.GRPOTrainer):
    """`trl.GRPOTrainer` whose loss takes batches of `train.block.build_training_block`.

    All of TRL's loss types are inherited. What is added happens through its inputs: advantages come weighted, the
    coefficients of other terms are weighted for the call, and the correction pi_old / mu is multiplied into the
    advantages.
    """

    args: GRPOConfig
    model: Any
    beta: float
    entropy_coef: float
    router_aux_loss_coef: float

    def __init__(self, **kwargs: Any) -> None:
        self._correcting: dict[str, Any] | None = None
        self._mismatch: list[Mismatch] = []
        self._loss_metrics = LossMetrics()
        super().__init__(**kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of a micro-step; of its passes all but the last have had their backward pass by then.

        So each frees its activations before the next begins. What is returned has the value of all passes together,
        and the last one's gradient.

        Args:
            inputs: the `passes`, as `train.passes` makes them, in the order in which they run.
        """
        passes: list[Pass] = inputs["passes"]
        *others, last = [
            {name: value.to(self.accelerator.device) for name, value in batch.items()} for batch in passes
        ]
        before = torch.zeros((), device=self.accelerator.device)
        for batch in others:
            with self._more_to_come(model):
                loss = self._compute_loss(model, batch)
                deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
                # as transformers' training_step does: the loss is scaled already
                self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
            before += loss.detach()
            del loss
        self._loss_metrics.end_micro_step()
        return self._compute_loss(model, last) + before

    @contextlib.contextmanager
    def _more_to_come(self, model: Any) -> Iterator[None]:
        """Put off what belongs to the end of an update: replicas reduce gradients once, DeepSpeed steps once."""
        state = self.accelerator.gradient_state
        if not state.sync_gradients:
            # transformers puts it off for the whole micro-step
            yield
            return
        reduction: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        # sharded gradients are reduced after each pass: whole ones would have to be kept in between
        sharded = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if not sharded and not state.plugin_kwargs.get("sync_each_batch", False):
            reduction = self.accelerator.no_sync(model)
        state._set_sync_gradients(False)
        try:
            with reduction:
                yield
        finally:
            state._set_sync_gradients(True)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        beta, router, share = self.beta, self.router_aux_loss_coef, float(inputs["update_share"])
        if beta != 0.0:
            self.beta = WeightedBeta(beta, inputs["row_weights"])
        self.entropy_coef = WeightedCoefficient(self.entropy_coef, share)
        self.router_aux_loss_coef = WeightedCoefficient(router, share)
        inputs = _without_unsampled(inputs)
        self._correcting = inputs
        mode = "train" if self.model.training else "eval"
        logged, self._metrics[mode] = self._metrics[mode], defaultdict(list)
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self.beta, self.router_aux_loss_coef, self._correcting = beta, router, None
            # adaptive control may have moved it
            self.entropy_coef = float(self.entropy_coef)
            measured, self._metrics[mode] = self._metrics[mode], logged
        self._loss_metrics.add(measured, inputs, per_row=self.importance_sampling_level == "sequence")
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        # called first thing inside _compute_loss: where no old log-probs are stored, these are the old ones,
        # and the correction can be put into the advantages before they are read
        result: tuple[Any, Any, Any] = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        inputs, self._correcting = self._correcting, None
        if inputs is None:
            return result
        logps_RC = torch.where(inputs["tool_mask"].bool(), result[0], 0.0)
        self._correct(inputs, logps_RC.detach())
        return logps_RC, *result[1:]

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
        """As TRL's; what passes measured is joined first, and the mismatch of sampler and trainer over ranks too."""
        if self.model.training:
            for name, value in self._loss_metrics.take().items():
                self._metrics["train"][name].append(value)
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
        was_training = model.training
        model.eval()
        try:
            logps, _, _ = super()._get_per_token_logps_and_entropies(
                model, ids, mask, batch["completion_ids"].size(1), batch_size=self.args.old_logprobs_batch_size
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


def _without_unsampled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs, with the log-probs of tokens that nobody sampled at 0, where a ratio of them cannot overflow."""
    sampled_RC = inputs["tool_mask"].bool()
    names = {"old_per_token_logps", "ref_per_token_logps"} & inputs.keys()
    return {**inputs, **{name: torch.where(sampled_RC, inputs[name], 0.0) for name in names}}
