"""The interface of a kind of weight sync to the trainer, and the tensors of the policy that a kind pushes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verifiers.errors import ConfigError, NotFiniteError
from verifiers.inference.endpoint import Backend
from verifiers.inference.server_client import ServerClient
from verifiers.inference.server_pool import ServerPool
from verifiers.train.weight_sync.verification import Capabilities


class WeightSync(ABC):
    """Pushes of the policy's weights to rollout servers; each is acknowledged, versioned and bounded in time.

    Subclass it for a kind of your own.

    Attributes:
        pool: the servers that get the weights; None before `connect`, or where the kind has none.
        policy_name: the policy's name in requests; None for the name of the model that is served.
        keeps_requests: requests in flight continue under the new weights; otherwise they must end before a push.
        sends_adapter: an adapter's tensors are sent, not the merged weights.
        probe_every: pushes from one check by log-probs to the next, where the run does not say it.
    """

    pool: ServerPool | None = None
    policy_name: str | None = None
    keeps_requests: bool = True
    sends_adapter: bool = False
    probe_every: int = 1

    @abstractmethod
    def connect(self, deadline_s: float) -> None:
        """Wait for the servers and verify that they can take weights.

        Raises:
            WeightSyncError: one did not answer within `deadline_s`, or lacks a route; the message names it.
        """

    @abstractmethod
    def push(self, named_parameters: Iterable[tuple[str, Any]], version: int) -> None:
        """Send the parameters and return once the servers sample from them, stamped with `version`.

        Requests in flight are paused, not lost; no token after the push comes from keys and values of before.

        Raises:
            WeightSyncError: not acknowledged within the deadline.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the pushes used. May be called twice."""

    @property
    def own_url(self) -> str | None:
        """Base URL of a server that the kind holds in this process; None without one, or before `connect`."""
        return None

    def missing_at(self, found: Capabilities, adapter_rank: int) -> list[str]:
        """Return what a server lacks for pushes of this kind, each with what gives it; no adapter has rank 0."""
        return []

    def route(self, backend: Backend) -> Backend:
        """Return the backend for rollouts, such that none is answered from weights that were not pushed."""
        return self.pool.route(backend) if self.pool is not None else backend

    def tensors_of(self, model: Any, whole: dict[str, Any] | None = None) -> Mapping[str, Any]:
        """Return the tensors of a model that are to be pushed, under the names that they have in memory.

        `whole` are those that were gathered from all ranks, where the model is sharded.
        """
        return policy_tensors(model) if whole is None else whole_policy(model, whole)

    def copy_of(self, version: int) -> Any:
        """Return a frozen copy of the policy with the weights of `version` in this process, or None."""
        return None


class ServerSync(WeightSync):
    """A kind that pushes to servers through a `ServerPool`.

    Args:
        timeout_s: deadline for one push, in seconds; a single server may be restarted within it.
    """

    pool: ServerPool

    def __init__(self, base_url: str | Sequence[str], timeout_s: float = 120.0, api_key: str = "EMPTY") -> None:
        urls = [base_url] if isinstance(base_url, str) else list(base_url)
        self.pool = ServerPool([ServerClient(url).url for url in urls], api_key=api_key, timeout_s=timeout_s)

    def tensors_of(self, model: Any, whole: dict[str, Any] | None = None) -> Mapping[str, Any]:
        """Return the tensors under a checkpoint's names and in its layout, by which every server loads them."""
        return checkpoint_tensors(model, super().tensors_of(model, whole))

    def connect(self, deadline_s: float) -> None:
        self.pool.run(self.pool.connect(deadline_s), deadline_s + 2 * self.pool.timeout_s)

    def close(self) -> None:
        self.pool.stop()


# -- the policy's tensors, by name ---------------------------------------------------------------------------------


def checkpoint_tensors(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a policy's tensors as `save_pretrained` writes them: a checkpoint may name and split them otherwise."""
    from transformers import PreTrainedModel
    from transformers.core_model_loading import revert_weight_conversion

    base = model.get_base_model() if hasattr(model, "merge_adapter") else model
    if not isinstance(base, PreTrainedModel):
        return dict(tensors)
    converted: dict[str, Tensor] = revert_weight_conversion(base, dict(tensors))
    return converted


@torch.no_grad()
def policy_tensors(model: Any) -> dict[str, Tensor]:
    """Return every parameter and saved buffer of the policy by its name in memory.

    Adapters (PEFT) are merged into copies of the weights below them, so that the server gets plain weights. Tied
    weights come once, under their first name.
    """
    if not hasattr(model, "merge_adapter"):
        return _detached(model.state_dict())
    weights = [weight for name, weight in model.named_parameters() if ".base_layer." in name]
    before = [weight.data for weight in weights]
    try:
        # into copies: taking an adapter out again takes as long, and leaves rounding behind
        for weight in weights:
            weight.data = weight.data.clone()
        model.merge_adapter()
        state = model.get_base_model().state_dict()
        return _detached({_served_name(name, model.active_adapters): one for name, one in state.items()})
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"the policy's adapter cannot be merged ({error}); give plain LoRA.") from error
    finally:
        for weight, data in zip(weights, before, strict=True):
            weight.data = data
        for layer in model.modules():
            if hasattr(layer, "merged_adapters"):
                layer.merged_adapters.clear()


@torch.no_grad()
def require_finite(
    tensors: Mapping[str, Any], purpose: str, gather: Callable[[Any], list[Any]] | None = None
) -> None:
    """Refuse weights that are infinite or not a number; reads them once, in a tenth of the time of a copy.

    Of a sharded tensor the local part is looked at, and `gather` gives what each rank found in its own. The message
    names one of them, and the `purpose` that they are not for.
    """
    parts = {name: getattr(tensor, "ds_tensor", tensor) for name, tensor in tensors.items()}
    parts = {name: part.to_local() if isinstance(part, DTensor) else part for name, part in parts.items()}
    parts = {name: part for name, part in parts.items() if part.dtype.itemsize > 1 and part.is_floating_point()}
    found = None
    # the squares of large weights overflow too
    if not torch.nn.utils.get_total_norm(list(parts.values())).isfinite():
        found = next((name for name, part in parts.items() if not part.isfinite().all()), None)
    found = next((name for name in (gather(found) if gather else [found]) if name), None)
    if found is not None:
        raise NotFiniteError(
            f"{found} has values that are infinite or not a number, so the weights are not {purpose}; lower "
            "learning_rate, or choose another precision, and resume from the newest complete checkpoint."
        )


def refuse_untied(model: Any) -> None:
    """Refuse an adapter that trains one of a model's tied embeddings without the other: servers hold both as one."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else None
    if base is None or not getattr(base.config.get_text_config(), "tie_word_embeddings", False):
        return
    ends = base.get_input_embeddings(), base.get_output_embeddings()
    if any(hasattr(end, "lora_A") for end in ends) or ends[0].weight is not ends[1].weight:
        raise ConfigError(
            "the adapter trains one of the model's tied embeddings, and servers hold both as one; give "
            "modules_to_save=['embed_tokens'] with ensure_weight_tying=True, or leave embeddings and head out."
        )


def is_sharded(model: Any) -> bool:
    """Return whether the ranks hold only parts of the parameters: FSDP, or DeepSpeed's ZeRO-3."""
    return any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())


def gathered_tensors(
    model: Any,
    *,
    keep: bool,
    tied: bool = False,
    only: Callable[[str], bool] | None = None,
    take: Callable[[Tensor], Any] = lambda whole: whole.detach().to("cpu", copy=True),
) -> dict[str, Any]:
    """Gather every parameter and saved buffer of a sharded model in host memory; all ranks must call it.

    Tensor after tensor is gathered and taken, so a device holds one whole tensor at a time beside its shards. Ranks
    that do not `keep` them take part, and get an empty dict. `take` makes of a whole tensor what is kept of it.
    """
    # what the last forward pass left gathered goes back to shards with this
    state = model.state_dict(keep_vars=True)
    gathered: dict[str, Any] = {}
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
                gathered[_plain(name)] = take(whole)
    return gathered


def whole_policy(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gathered tensors as a server names them: with adapters merged into the base weights, in place."""
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
    return {served: one for name, one in tensors.items() if (served := _served_name(name, model.active_adapters))}


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


def _served_name(name: str, active: Sequence[str]) -> str | None:
    """Return the name by which a server loads a tensor of a PEFT model; None for those of adapters alone."""
    before, saved, rest = name.partition(".modules_to_save.")
    adapter, _, attribute = rest.partition(".")
    if "lora_" in name or ".original_module." in name or (saved and adapter not in active):
        return None
    return (f"{before}.{attribute}" if saved else name).removeprefix("base_model.model.").replace(".base_layer", "")


def _detached(state: Mapping[str | None, Tensor] | Mapping[str, Tensor]) -> dict[str, Tensor]:
    seen: set[tuple[int, torch.Size, tuple[int, ...]]] = set()
    kept = {}
    for name, tensor in state.items():
        if name is None:
            continue
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor.detach()
    return kept
