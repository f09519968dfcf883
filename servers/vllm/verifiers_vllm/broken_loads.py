"""A load of weights that breaks off leaves no layer half loaded: the next one is whole.

vLLM gathers the tensors of a layer until all have come. Where a load breaks off, those of the open layers
stay, and the next load counts its own on top of them: a layer that is made of several tensors is closed too
early, without an error.
"""

from __future__ import annotations

from typing import Any

__all__ = ["close_layers", "register", "reload_weights"]


def register() -> None:
    """Register with vLLM, which calls this in each of its processes; every worker's loads go through this class."""
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
