"""The most that a GPU can compute, which the share of it that a model uses (MFU) is measured by."""

from __future__ import annotations

PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense bfloat16, by a part of the GPU's name, from the makers' data sheets; the first part that fits counts."""


def peak_flops_of(gpu: str) -> float | None:
    """Return the floating point operations a second of a GPU by its name; None where it is not known."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in gpu), None)
