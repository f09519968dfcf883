"""GPU decoding without waiting for Python: uploads from pinned memory, and the pass of one token a row, recorded.

On the CPU uploads are plain tensors, and a pass runs as it is unless a test gives another way to record it.
"""

from __future__ import annotations

from collections.abc import Callable
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


def cuda_graph(run: Run, device: torch.device) -> Run:
    """Record a pass as a CUDA graph: its kernels are launched at once, without the Python between them.

    Fails where the pass waits for the device, as some mixtures of experts do.
    """
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # a trainer in this process may use the device meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = run()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


class FixedPass:
    """A pass of one token for every row, filled or not, recorded once for each place that its tensors have.

    Args:
        run: takes ids, places and positions, (3, rows), and returns logits (rows, vocabulary); all else that it reads
            stays where it is, with one `place`.
    """

    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor], record: Record) -> None:
        self._run, self._record = run, record
        self._recorded: tuple[int, torch.Tensor, Run] | None = None

    def __call__(self, last: torch.Tensor, place: int) -> torch.Tensor:
        """Return the logits, until the next call; `place` changes with the addresses of what the pass uses."""
        if self._recorded is None or self._recorded[0] != place:
            # the old recording's memory first
            self._recorded = None
            held = last.clone()
            self._recorded = (place, held, self._record(lambda: self._run(held), last.device))
        _, held, replay = self._recorded
        held.copy_(last)
        return replay()
