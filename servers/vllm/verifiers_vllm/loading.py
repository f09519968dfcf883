"""vLLM's plugin, which it calls in each of its processes: loads that break off, and what the CPU packs of weights.

A load of weights that breaks off leaves no layer half loaded: the next one is whole. vLLM gathers the tensors of a
layer until all have come. Where a load breaks off, those of the open layers stay, and the next load counts its own on
top of them: a layer that is made of several tensors is closed too early, without an error.

On the CPU vLLM packs weights for its kernels when a model is first loaded. A reload packs linear layers again, but
neither experts nor a head that is tied to the embeddings: these then read plain weights as packed ones, or old ones.
Its rotation by position takes heads that stand apart for one.

While new weights are loaded nothing is sampled. Copying and packing a model's weights is memory's work,
which one thread alone cannot keep busy; for sampling the server keeps the threads that it was given.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Register with vLLM, which calls this in each of its processes."""
    wrap_reload_weights()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_worker import CPUWorker

    if not hasattr(CPUWorker.reload_weights, "__wrapped__"):
        CPUWorker.reload_weights = load_with_every_core(pack_tied_again(CPUWorker.reload_weights))
    wrap_experts()
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if not hasattr(RotaryEmbedding.forward_cpu, "__wrapped__"):
        RotaryEmbedding.forward_cpu = turn_every_head(RotaryEmbedding.forward_cpu)


def turn_every_head(turn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the CPU's rotation by position, whose kernel turns one head alone of (T, heads, D), as LFM2 gives them."""

    @functools.wraps(turn)
    def turns(layer: Any, positions: Any, query: Any, key: Any = None) -> Any:
        parts = [one if one is None else one.flatten(1) for one in (query, key)]
        turned = turn(layer, positions, *parts)
        return tuple(one if one is None else one.view(of.shape) for one, of in zip(turned, (query, key), strict=True))

    return turns


def wrap_experts() -> None:
    try:
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    except ImportError:
        # a vLLM that keeps its experts elsewhere
        return
    set_up = getattr(UnquantizedFusedMoEMethod, "_setup_kernel", None)
    if set_up is not None and not hasattr(set_up, "__wrapped__"):
        UnquantizedFusedMoEMethod._setup_kernel = pack_experts_again(set_up)


def pack_experts_again(set_up: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what sets up a layer of experts, and packs them at the first load alone, to pack them at each."""

    @functools.wraps(set_up)
    def sets_up(method: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        was_set_up = method.moe_kernel is not None
        result = set_up(method, layer, *args, **kwargs)
        if was_set_up:
            method.moe_kernel.fused_experts.process_weights_after_loading(layer)
        return result

    return sets_up


def pack_tied_again(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a worker's `reload_weights` to pack what shares its weight with another layer, which alone was loaded."""

    @functools.wraps(load)
    def loads(worker: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(worker, *args, **kwargs)
        layers_of: dict[int, list[Any]] = {}
        for layer in worker.model_runner.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layers_of.setdefault(layer.weight.data_ptr(), []).append(layer)
        for layer in (layer for layers in layers_of.values() if len(layers) > 1 for layer in layers):
            layer.quant_method.process_weights_after_loading(layer)
        return result

    return loads


def wrap_reload_weights() -> None:
    try:
        from vllm.v1.worker.worker_base import WorkerWrapperBase
    except ImportError:
        # a vLLM that calls its workers otherwise
        return
    if "reload_weights" not in vars(WorkerWrapperBase):
        WorkerWrapperBase.reload_weights = reload_weights


def reload_weights(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the worker's method of this name; where it fails, close the layers that it left open."""
    try:
        return wrapper.worker.reload_weights(*args, **kwargs)
    except Exception:
        runner = wrapper.worker.model_runner
        close_layers(runner.get_model(), runner.model_config)
        raise


def close_layers(model: Any, model_config: Any) -> None:
    """Give the layers that a load left open the tensors that they had before it.

    Layers that were loaded whole keep their new tensors.
    """
    import torch

    try:
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError:
        # a vLLM that loads tensor by tensor
        return
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    with torch.no_grad():
        layerwise.finalize_layerwise_reload(model, model_config)


def load_with_every_core(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load` so that torch has as many threads as cores while it runs."""

    @functools.wraps(load)
    def loads(*args: Any, **kwargs: Any) -> Any:
        import torch

        threads = torch.get_num_threads()
        # the public name is replaced by one that does nothing, in vLLM's CPU worker
        torch._C.set_num_threads(cores())
        try:
            return load(*args, **kwargs)
        finally:
            torch._C.set_num_threads(threads)

    return loads


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
