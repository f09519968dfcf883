"""Log-probs without gradient: of the policy, its reference, a frozen copy of it, or given as lists.

`assemble_old_log_probs` is public: it is for training on rollouts that were sampled and scored somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import trl
from torch import Tensor

from verifiers.errors import ConfigError
from verifiers.train.distributed import Ranks
from verifiers.train.loss.fused_head import head_log_probs

__all__ = ["PolicyLogprobs", "assemble_old_log_probs", "log_probs_of_copy"]


class PolicyLogprobs:
    """Log-probs of completions at the training temperature, without gradient.

    Args:
        forward: TRL's `_get_per_token_logps_and_entropies`.
        accelerator: puts tensors on the model's device.
        ranks: of the run.
        policy: gives the trained model, as the accelerator wraps it.
        reference: gives the reference model; None where the policy without its adapter is the reference.
        copy: gives a frozen copy of the policy on another device that has the present weights, or None.
        batch_size: rows in one forward pass; None for all of a micro-batch.
        temperature: of the training.
    """

    def __init__(
        self,
        forward: Callable[..., tuple[Any, Any, Any]],
        accelerator: Any,
        ranks: Ranks,
        *,
        policy: Callable[[], Any],
        reference: Callable[[], Any],
        copy: Callable[[], Any],
        batch_size: int | None,
        temperature: float,
    ) -> None:
        self._ranks = ranks
        ranks.register("score", self.of_policy)
        self._forward, self._accelerator = forward, accelerator
        self._policy, self._reference, self._copy = policy, reference, copy
        self._batch_size, self._temperature = batch_size, temperature

    @torch.no_grad()
    def of_model(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs (R, C) of a micro-batch's completions under a model."""
        device = self._accelerator.device
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1).to(device)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).to(device)
        was_training = model.training
        model.eval()
        try:
            width = batch["completion_ids"].size(1)
            logps: Tensor = self._forward(model, ids, mask, width, batch_size=self._batch_size)[0]
        finally:
            model.train(was_training)
        return logps

    def of_policy(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs (R, C) under the policy as it is now."""
        return self.of_model(self._policy(), batch)

    def of_reference(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs (R, C) under the reference model."""
        reference = self._reference()
        if reference is not None:
            return self.of_model(reference, batch)
        adapters = self._accelerator.unwrap_model(self._policy())
        adapter = "ref" if "ref" in adapters.peft_config else None
        with trl.trainer.utils.use_adapter(adapters, adapter_name=adapter):
            return self.of_policy(batch)

    def old(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs (R, C) under the present policy, by its frozen copy where there is one."""
        copy = self._copy()
        if copy is None:
            return self.of_policy(batch)
        size = self._batch_size or len(batch["completion_ids"])
        # as the accelerator wraps the policy's forward
        with self._accelerator.autocast():
            logps = log_probs_of_copy(copy, batch, self._temperature, size)
        return logps.to(self._accelerator.device)

    def of_tokens(self, prompt_ids: Sequence[int], ids: Sequence[int], *, together: bool = False) -> list[float]:
        """Return the log-prob of each token of one completion under the policy as it is now.

        Args:
            prompt_ids: token ids of the prompt.
            ids: token ids of the completion.
            together: all ranks compute it, from inside `Ranks.on_rank_0`; for a sharded policy.
        """
        batch = {"prompt_ids": torch.tensor([list(prompt_ids)]), "completion_ids": torch.tensor([list(ids)])}
        batch |= {f"{side}_mask": torch.ones_like(batch[f"{side}_ids"]) for side in ("prompt", "completion")}
        scored: Tensor = self._ranks.together("score", batch) if together else self.of_policy(batch)
        logps: list[float] = scored[0].float().tolist()
        return logps


@torch.no_grad()
def log_probs_of_copy(copy: Any, batch: Mapping[str, Tensor], temperature: float, batch_size: int) -> Tensor:
    """Return the log-probs (R, C) of a micro-batch's completions by a plain causal language model, on its device.

    Args:
        copy: a frozen model of transformers.
        batch: prompt_ids and prompt_mask (R, P), completion_ids and completion_mask (R, C).
        temperature: divides the logits.
        batch_size: rows in one forward pass.
    """
    ids_RT = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1).to(copy.device)
    mask_RT = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).to(copy.device)
    width = batch["completion_ids"].size(1)
    found = []
    for ids, mask in zip(ids_RT.split(batch_size), mask_RT.split(batch_size), strict=True):
        body = copy.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
        states = body.last_hidden_state[:, -width - 1 : -1].flatten(0, 1)
        logps, _ = head_log_probs(copy, states, ids[:, -width:].flatten(), temperature)
        found.append(logps.view(len(ids), width))
    return torch.cat(found)


def assemble_old_log_probs(
    log_probs: Sequence[Sequence[float]], attention_mask_RT: Tensor, loss_mask_RT: Tensor
) -> Tensor:
    """Lay old log-probs over training tensors, shifted as log-probs are: position t is that of token t.

    Args:
        log_probs: for each of R rows the log-prob (nats) of each of its sampled tokens, in order.
        attention_mask_RT: 1 on real tokens, (R, T).
        loss_mask_RT: 1 on sampled tokens, (R, T).

    Returns:
        (R, T - 1): positions 1 .. T - 1, since the first token of a row has no log-prob; 0.0 off the sampled tokens.

    Raises:
        ConfigError: another number of rows or of sampled tokens than the tensors have, or a sampled token that
            is no real one, or is the first.
    """
    if attention_mask_RT.shape != loss_mask_RT.shape or len(log_probs) != len(loss_mask_RT):
        raise ConfigError(
            f"{len(log_probs)} rows of old log-probs against masks of shape {tuple(attention_mask_RT.shape)} and "
            f"{tuple(loss_mask_RT.shape)}: give one row of log-probs for each row of equal masks."
        )
    sampled_RT = loss_mask_RT.bool()
    if bool((sampled_RT & ~attention_mask_RT.bool()).any()) or bool(sampled_RT[:, :1].any()):
        raise ConfigError("the loss mask covers padding or a row's first token, which no policy has sampled.")
    counts = sampled_RT.sum(dim=1).tolist()
    for row, (given, count) in enumerate(zip(log_probs, counts, strict=True)):
        if len(given) != count:
            raise ConfigError(
                f"row {row} has {len(given)} old log-probs and {count} sampled tokens; give one for each token."
            )
    assembled_RT = torch.zeros(loss_mask_RT.shape, dtype=torch.float32, device=loss_mask_RT.device)
    flat = [value for given in log_probs for value in given]
    # a boolean mask is read row by row, in the order of the lists
    assembled_RT[sampled_RT] = torch.tensor(flat, dtype=torch.float32, device=loss_mask_RT.device)
    return assembled_RT[:, 1:]
