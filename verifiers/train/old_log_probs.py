"""Old log-probs from elsewhere: computed by a frozen copy of the policy, or given as lists.

`assemble_old_log_probs` is public: for whoever trains on rollouts that were sampled and scored somewhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verifiers.errors import ConfigError

__all__ = ["assemble_old_log_probs", "log_probs_of_copy"]


_TILE = 4_096 * 32_768
"""Logits held at once, as many as TRL holds in its loss."""


@torch.no_grad()
def log_probs_of_copy(copy: Any, batch: Mapping[str, Tensor], temperature: float, batch_size: int) -> Tensor:
    """Log-probs (R, C) of a micro-batch's completions by a plain causal language model, on its device.

    Args:
        copy: a frozen model of transformers, whose forward gives logits. Where these are its head's alone, they are
            made tile by tile, and never of all tokens at once.
        batch: prompt_ids and prompt_mask (R, P), completion_ids and completion_mask (R, C).
        temperature: divides the logits.
        batch_size: rows in one forward pass.
    """
    ids_RT = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1).to(copy.device)
    mask_RT = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1).to(copy.device)
    width = batch["completion_ids"].size(1)
    head = _plain_head(copy, ids_RT[:1])
    found = []
    for ids, mask in zip(ids_RT.split(batch_size), mask_RT.split(batch_size), strict=True):
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        if head is None:
            states, to_logits = copy(**given, logits_to_keep=width + 1).logits[:, :-1], torch.nn.Identity()
        else:
            states, to_logits = copy.base_model(**given).last_hidden_state[:, -width - 1 : -1], head
        flat_ids = ids[:, -width:].reshape(-1)
        tokens = max(1, _TILE // copy.config.get_text_config().vocab_size)
        tiles = zip(states.flatten(0, 1).split(tokens), flat_ids.split(tokens), strict=True)
        logps = [_log_probs(to_logits(tile), tile_ids, temperature) for tile, tile_ids in tiles]
        found.append(torch.cat(logps).view(len(ids), width))
    return torch.cat(found)


def _log_probs(logits_NV: Tensor, ids_N: Tensor, temperature: float) -> Tensor:
    scaled = logits_NV.float() / temperature
    return scaled.gather(1, ids_N[:, None]).squeeze(1) - scaled.logsumexp(dim=-1)


def _plain_head(copy: Any, ids_1T: Tensor) -> Any:
    """The model's last layer, where its logits are what that makes of the last states; some models scale or cap them.

    Asked of the model itself, by two tokens.
    """
    head = copy.get_output_embeddings()
    few = ids_1T[:, :2]
    states = getattr(copy.base_model(input_ids=few, use_cache=False), "last_hidden_state", None)
    if head is None or states is None:
        return None
    logits = copy(input_ids=few, use_cache=False).logits
    made = head(states)
    return head if made.shape == logits.shape and torch.equal(made, logits) else None


def assemble_old_log_probs(
    log_probs: Sequence[Sequence[float]], attention_mask_RT: Tensor, loss_mask_RT: Tensor
) -> Tensor:
    """Old log-probs against training tensors, shifted as log-probs are: position t is that of token t.

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
