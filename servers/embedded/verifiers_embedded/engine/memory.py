"""Memory that this process may still take, on the host or on a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePosixPath

import torch

_GROUPS = {"": ("memory.max", "anon"), "memory": ("memory.limit_in_bytes", "total_rss")}
"""A hierarchy of control groups (version 2, version 1): its file with the limit, and its name for memory in use."""


def available_bytes(device: torch.device) -> int:
    """Return the memory that is free on the device; on the CPU, what its control groups leave of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(free, cgroup_bytes())


def cgroup_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that the control groups of this process leave it; page cache counts as free."""
    left = sys.maxsize
    try:
        entries = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return left
    for entry in entries:
        _, hierarchy, path = entry.split(":", 2)
        if hierarchy not in _GROUPS:
            continue
        limit, used = _GROUPS[hierarchy]
        group = PurePosixPath(path.lstrip("/"))
        # in a container the group is the root of what is mounted, whatever its path
        for folder in (groups / hierarchy / each for each in (group, *group.parents)):
            try:
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                left = min(left, int((folder / limit).read_text()) - int(counts[used]))
            except (OSError, KeyError, ValueError):
                # no such group here, or no limit ("max")
                continue
    return max(left, 0)
