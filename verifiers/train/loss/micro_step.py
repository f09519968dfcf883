"""Forward and backward passes of a micro-step that is several micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

__all__ = ["micro_step_loss", "scale_gradients"]


_MicroBatch = dict[str, Tensor]


def micro_step_loss(
    accelerator: Any, model: Any, micro_batches: Sequence[_MicroBatch], loss_of: Callable[[Any, _MicroBatch], Tensor]
) -> Tensor:
    """Return the loss of a micro-step; of its micro-batches all but the last have had their backward pass by then.

    So each frees its activations before the next begins. What is returned has the value of all micro-batches
    together, and the last one's gradient.

    Args:
        micro_batches: in the order in which they run.
        loss_of: the loss of one.
    """
    device = accelerator.device
    *others, last = [{name: value.to(device) for name, value in batch.items()} for batch in micro_batches]
    before = torch.zeros((), device=device)
    for batch in others:
        with _more_to_come(accelerator, model):
            loss = loss_of(model, batch)
            deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
            # as transformers' training_step does: the loss is scaled already
            accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))
        before += loss.detach()
        del loss
    return loss_of(model, last) + before


@contextlib.contextmanager
def _more_to_come(accelerator: Any, model: Any) -> Iterator[None]:
    """Put off what belongs to the end of an update: replicas reduce gradients once, DeepSpeed steps once."""
    state = accelerator.gradient_state
    if not state.sync_gradients:
        # transformers puts it off for the whole micro-step
        yield
        return
    reduction: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    # sharded gradients are reduced after each micro-batch: whole ones would have to be kept in between
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if not sharded and not state.plugin_kwargs.get("sync_each_batch", False):
        reduction = accelerator.no_sync(model)
    state._set_sync_gradients(False)
    try:
        with reduction:
            yield
    finally:
        state._set_sync_gradients(True)


def scale_gradients(model: Any, factor: float) -> None:
    """Multiply the gradients of a model, after the last backward pass of an update."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
