"""What rank 0 does for all ranks, and how its failures reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list

from verifiers.errors import GenerationError

__all__ = ["on_rank_0"]


def on_rank_0(accelerator: Any, work: Callable[[], Any]) -> Any:
    """Do something on rank 0 and give its result to all ranks, or raise its failure on all of them.

    Every rank must call it; that is where an error of rank 0's generator ends the others.
    """
    payload: Any = None
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            payload = work()
        except Exception as error:
            failure = error
    if accelerator.num_processes > 1:
        text = f"{type(failure).__name__}: {failure}" if failure is not None else None
        payload, text = broadcast_object_list([(payload, text)], from_process=0)[0]
        if failure is None and text is not None:
            raise GenerationError(f"rank 0 stopped: {text}")
    if failure is not None:
        raise failure
    return payload
