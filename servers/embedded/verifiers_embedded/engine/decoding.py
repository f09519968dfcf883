"""GPU decoding without waiting for Python: uploads from pinned memory, and the pass of one token a row, recorded.

On the CPU uploads are plain tensors, and a pass runs as it is unless a test gives another way to record it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Run = Callable[[], torch.Tensor]
Record = Callable[[Run, torch.device], Run]
"""Takes what computes a pass from tensors that stay where they are; returns what does it again."""

_WARM_UPS = 3
"""Passes before one is recorded: libraries allocate and choose their kernels in the first ones."""


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return lists of numbers as a tensor on the device; the host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@contextmanager
def refuses_waits() -> Iterator[None]:
    """Raise RuntimeError where anything in this process waits for the GPU, so before other threads use it."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class CudaGraphs:
    """Records passes as CUDA graphs: their kernels are launched at once, without the Python between them.

    The graphs share their memory, so none may be replayed beside another.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[torch.cuda.CUDAGraph] | None = None

    def __call__(self, run: Run, device: torch.device) -> Run:
        """Return what replays the pass, which must not wait for the device: a failure would leave torch recording."""
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # the memory of graphs that are gone is gone, too
            last = None if self._last is None else self._last()
            pool = None if last is None else last.pool()
            # a trainer in this process may use the device meanwhile
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                output = run()
            self._last = weakref.ref(graph)

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class FixedPass:
    """A pass of one token for some rows, recorded once for each number of rows and of columns that they read.

    Args:
        run: takes ids, places and positions, (3, rows), and the columns; returns logits (rows, vocabulary). All else
            that it reads stays where it is, with one `place`.
    """

    def __init__(self, run: Callable[[torch.Tensor, int], torch.Tensor], record: Record) -> None:
        self._run, self._record = run, record
        self._place = 0
        self._recorded: dict[tuple[int, int], tuple[torch.Tensor, Run]] = {}

    def __call__(self, last: torch.Tensor, columns: int, place: int) -> torch.Tensor:
        """Return the logits, until the next call; `place` changes with the addresses of what the pass uses."""
        self.forget_others(place)
        size = last.shape[1], columns
        if size not in self._recorded:
            held = last.clone()
            self._recorded[size] = held, self._record(lambda: self._run(held, columns), last.device)
        held, replay = self._recorded[size]
        held.copy_(last)
        return replay()

    def forget_others(self, place: int) -> None:
        """Free the memory of recordings for another place than this one."""
        if place != self._place:
            self._recorded.clear()
            self._place = place
