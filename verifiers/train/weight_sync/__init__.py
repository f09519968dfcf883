"""Kinds of weight sync, and the choice of a run's; what they have in common is `protocol.WeightSync`."""

from __future__ import annotations

from collections.abc import Sequence

from verifiers.server_process import is_loopback
from verifiers.train.weight_sync.in_process import InProcessSync
from verifiers.train.weight_sync.nccl import NcclSync
from verifiers.train.weight_sync.protocol import WeightSync, policy_tensors
from verifiers.train.weight_sync.shared_directory import DirectorySync, LoraSync

__all__ = [
    "DirectorySync",
    "InProcessSync",
    "LoraSync",
    "NcclSync",
    "WeightSync",
    "choose_sync",
    "policy_tensors",
]


def choose_sync(
    kind: str, urls: Sequence[str], *, directory: str | None, timeout_s: float, api_key: str
) -> DirectorySync | LoraSync | NcclSync:
    """Return the sync that `weight_sync` names.

    "auto" is a shared directory where every server is on this host, or `directory` is given (a file system that
    both sides mount); else NCCL.
    """
    if kind == "lora":
        return LoraSync(urls, directory, timeout_s, api_key)
    if kind == "nccl" or (kind == "auto" and directory is None and not all(map(is_loopback, urls))):
        return NcclSync(urls, timeout_s, api_key)
    return DirectorySync(urls, directory, timeout_s, api_key)
