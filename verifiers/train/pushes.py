"""The trainer's pushes: new weights to the rollout server, and the proof that it samples from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verifiers.envs.dataset_format import row_fields
from verifiers.rollouts.sync import WeightSync
from verifiers.train.loss import CorrectedLoss
from verifiers.train.old_log_probs import log_probs_of_copy
from verifiers.train.weight_sync import DirectorySync, HeldSync, ServerControl, policy_tensors, probe_server

__all__ = ["PushingTrainer"]


class PushingTrainer(CorrectedLoss):
    """The part of the trainer that owns the weights on the rollout server."""

    weight_sync: WeightSync
    _client: Any
    _rows: Any
    _pushes: int = 0

    def _server(self) -> ServerControl:
        server = getattr(self.weight_sync, "server", None)
        if isinstance(server, ServerControl):
            return server
        return DirectorySync(str(getattr(self._client, "base_url", self.args.server_url))).server

    def _push_weights(self, version: int) -> None:
        with policy_tensors(self.accelerator.unwrap_model(self.model)) as tensors:
            self.weight_sync.push(tensors.items(), version)
        due = self._pushes == 0 or (self.args.probe_every > 0 and self._pushes % self.args.probe_every == 0)
        self._pushes += 1
        if due:
            self._probe(version)

    def _probe(self, version: int) -> None:
        """Compare the server's log-probs with ours on a few tokens; see `weight_sync.probe`."""
        half = self.model.dtype in (torch.bfloat16, torch.float16) or self.args.bf16 or self.args.fp16
        tolerance = self.args.probe_tolerance
        result = probe_server(
            self._server(),
            str(self.args.server_model),
            row_fields(self._rows[0])[0],
            self._score_ids,
            temperature=self.temperature,
            version=version,
            tolerance=tolerance if tolerance is not None else (0.1 if half else 1e-3),
        )
        self._metrics["train"]["sampling/probe_difference"].append(result.largest_difference)

    def _score_ids(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
        batch = {
            "prompt_ids": torch.tensor([list(prompt_ids)]),
            "prompt_mask": torch.ones(1, len(prompt_ids), dtype=torch.int64),
            "completion_ids": torch.tensor([list(completion_ids)]),
            "completion_mask": torch.ones(1, len(completion_ids), dtype=torch.int64),
        }
        logps: list[float] = self._logps(self.accelerator.unwrap_model(self.model), batch)[0].float().tolist()
        return logps

    def _old_logps(self, batch: Mapping[str, Tensor], optimizer_step: int) -> Tensor:
        """Old log-probs (R, C) of a micro-batch: by the held copy where that is asked for and has these weights."""
        copy = None
        if self.args.old_logprobs_on_rollout_device and isinstance(self.weight_sync, HeldSync):
            copy = self.weight_sync.copy_of(optimizer_step)
        if copy is None:
            return self._logps(self.model, batch)
        size = self.args.old_logprobs_batch_size or self.args.per_device_train_batch_size
        return log_probs_of_copy(copy, batch, self.temperature, size).to(self.accelerator.device)
