"""The policy's tensors as a rollout server names them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["has_tied_tensors", "policy_tensors"]


@contextmanager
def policy_tensors(model: Any, *, tied: bool = False) -> Iterator[dict[str, Tensor]]:
    """Every parameter and saved buffer of the policy by its name in the checkpoint format.

    Adapters (PEFT) are merged for the time of the context and taken out again to the last bit, so that the server
    gets plain weights.

    Args:
        tied: give tied weights under each of their names; otherwise each tensor comes once, under its first name.
    """
    if not hasattr(model, "merge_adapter"):
        yield _detached(model.state_dict(), tied)
        return
    with torch.no_grad():
        # taking an adapter out again leaves rounding behind, which would grow with every push
        before = {name: weight.clone() for name, weight in model.named_parameters() if ".base_layer." in name}
        model.merge_adapter()
        try:
            state = {}
            for name, tensor in model.get_base_model().state_dict().items():
                if "lora_" not in name and ".original_module." not in name:
                    state[name.replace(".base_layer", "").replace(".modules_to_save.default", "")] = tensor
            yield _detached(state, tied)
        finally:
            model.unmerge_adapter()
            for name, weight in model.named_parameters():
                if name in before:
                    weight.copy_(before[name])


def has_tied_tensors(model: Any) -> bool:
    """Whether two names of the checkpoint format stand for the same tensor, such as a tied head."""
    state = model.state_dict()
    return len(_detached(state, tied=False)) < len(state)


def _detached(state: dict[str, Tensor], tied: bool) -> dict[str, Tensor]:
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    kept = {}
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen and not tied:
            continue
        seen.add(place)
        kept[name] = tensor.detach()
    return kept
