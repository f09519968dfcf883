"""vLLM's plugin, which it calls in each of its processes; and loading by every core on the CPU.

While new weights are loaded nothing is sampled. Copying and packing a model's weights is memory's work,
which one thread alone cannot keep busy; for sampling the server keeps the threads that it was given.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from verifiers_vllm import broken_loads

__all__ = ["load_with_every_core", "register"]


def register() -> None:
    """Register with vLLM, which calls this in each of its processes."""
    broken_loads.register()
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_worker import CPUWorker

    if not hasattr(CPUWorker.reload_weights, "__wrapped__"):
        CPUWorker.reload_weights = load_with_every_core(CPUWorker.reload_weights)


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
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
