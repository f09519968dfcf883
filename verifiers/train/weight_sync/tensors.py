"""The policy's tensors as a rollout server names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verifiers.errors import ConfigError

__all__ = ["gathered_tensors", "has_tied_tensors", "is_sharded", "policy_tensors", "whole_policy"]


@contextmanager
def policy_tensors(model: Any, *, tied: bool = False) -> Iterator[dict[str, Tensor]]:
    """Give every parameter and saved buffer of the policy by its name in the checkpoint format.

    Adapters (PEFT) are merged for the time of the context and taken out again to the last bit, so that the server
    gets plain weights.

    Args:
        model: the policy.
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
    """Return True if two names of the checkpoint format stand for the same tensor, such as a tied head."""
    state = model.state_dict(keep_vars=True)
    return len({id(tensor) for tensor in state.values()}) < len(state)


def is_sharded(model: Any) -> bool:
    """Return True if the ranks hold only parts of the parameters: FSDP, or DeepSpeed's ZeRO-3."""
    return any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())


def gathered_tensors(
    model: Any, *, keep: bool, tied: bool = False, only: Callable[[str], bool] | None = None
) -> dict[str, Tensor]:
    """Gather every parameter and saved buffer of a sharded model in host memory; all ranks must call it.

    Tensor after tensor is gathered and copied, so a device holds one whole tensor at a time beside its shards.

    Args:
        model: the sharded model.
        keep: give the tensors; other ranks take part, and get an empty dict.
        tied: give tied weights under each of their names.
        only: which names are wanted; all when left out.
    """
    # what the last forward pass left gathered goes back to shards with this
    state = model.state_dict(keep_vars=True)
    gathered: dict[str, Tensor] = {}
    first_names: dict[int, str] = {}
    for name, tensor in state.items():
        if only is not None and not only(name):
            continue
        # by identity, which is the same on every rank; some ranks may hold nothing of a small tensor
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            if tied and keep:
                gathered[_plain(name)] = gathered[_plain(first)]
            continue
        with _whole(tensor) as whole:
            if keep:
                gathered[_plain(name)] = whole.detach().to("cpu", copy=True)
    return gathered


def whole_policy(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gathered tensors as a server names them: with adapters merged into the base weights.

    Args:
        model: the sharded model that they are of.
        tensors: as `gathered_tensors` gave them; base weights are changed in place.

    Raises:
        ConfigError: an adapter that is not plain LoRA on linear layers.
    """
    if not hasattr(model, "merge_adapter"):
        return tensors
    from peft.tuners.lora import Linear, LoraLayer

    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        for adapter in layer.active_adapters:
            if adapter not in layer.lora_A:
                continue
            if not isinstance(layer, Linear) or layer.lora_variant.get(adapter) is not None:
                raise ConfigError(
                    f"{path} has an adapter that cannot be merged while the model is sharded; use plain LoRA on "
                    "linear layers, weight_sync='lora', or ranks that hold the whole model."
                )
            path = _plain(path)
            down = tensors[f"{path}.lora_A.{adapter}.weight"].float()
            up = tensors[f"{path}.lora_B.{adapter}.weight"].float()
            weight = tensors[f"{path}.base_layer.weight"]
            delta = (up @ down) * layer.scaling[adapter]
            weight += (delta.T if layer.fan_in_fan_out else delta).to(weight.dtype)
    return {
        name.removeprefix("base_model.model.")
        .replace(".base_layer", "")
        .replace(".modules_to_save.default", ""): tensor
        for name, tensor in tensors.items()
        if "lora_" not in name and ".original_module." not in name
    }


@contextmanager
def _whole(tensor: Any) -> Iterator[Tensor]:
    """Give a tensor without shards; all ranks must ask for it."""
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            yield tensor
    elif isinstance(tensor, DTensor):
        # parameters that are offloaded lie on the host, where the ranks of a GPU run have no collectives
        on_device: Any = tensor.detach().to(tensor.device_mesh.device_type)
        yield on_device.full_tensor()
    else:
        yield tensor


def _plain(name: str) -> str:
    """Return a name without the parts that wrappers for recomputation and compilation add."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


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
