"""The highest memory since it was last asked: of the GPU where the model is on one, else of this process.

On Linux the kernel keeps a high-water mark of resident memory that a process may reset for itself (`clear_refs`,
value 5; see proc(5)). Elsewhere there is none that can be reset, and nothing is measured.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

__all__ = ["PeakMemory", "peak_memory"]

_CLEAR = "/proc/self/clear_refs"
_STATUS = "/proc/self/status"


class PeakMemory(Protocol):
    """Measures the highest memory between two questions."""

    where: str

    def take(self) -> int:
        """Bytes at most in use since the last call; begins anew."""
        ...


class ProcessPeak:
    """Resident memory of this process."""

    where = "resident memory of the trainer's process"

    def take(self) -> int:
        with open(_STATUS, "rb") as file:
            text = file.read()
        start = text.index(b"VmHWM:") + 6
        kilobytes = int(text[start : text.index(b"kB", start)])
        descriptor = os.open(_CLEAR, os.O_WRONLY)
        try:
            os.write(descriptor, b"5")
        finally:
            os.close(descriptor)
        return kilobytes * 1024


class CudaPeak:
    """Memory that torch's allocator gave out on one CUDA device."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self.where = f"torch's allocations on {device}"

    def take(self) -> int:
        highest = int(self._cuda.max_memory_allocated(self._device))
        self._cuda.reset_peak_memory_stats(self._device)
        return highest


def peak_memory(device: Any) -> PeakMemory | None:
    """What measures a trainer whose model is on `device`, or None where nothing can."""
    if getattr(device, "type", "cpu") == "cuda":
        return CudaPeak(device)
    process = ProcessPeak()
    try:
        process.take()
    except (OSError, ValueError):
        return None
    return process
