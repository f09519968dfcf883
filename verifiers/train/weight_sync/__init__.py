"""Kinds of weight sync; what they have in common is `verifiers.train.weight_sync.protocol.WeightSync`."""

from verifiers.train.weight_sync.choice import WEIGHT_SYNCS, choose_sync
from verifiers.train.weight_sync.in_process import InProcessSync
from verifiers.train.weight_sync.lora import LoraSync
from verifiers.train.weight_sync.nccl import NcclSync
from verifiers.train.weight_sync.protocol import WeightSync, has_tied_tensors, policy_tensors
from verifiers.train.weight_sync.shared_directory import DirectorySync
from verifiers.train.weight_sync.verification import ProbeResult

__all__ = [
    "WEIGHT_SYNCS",
    "DirectorySync",
    "InProcessSync",
    "LoraSync",
    "NcclSync",
    "ProbeResult",
    "WeightSync",
    "choose_sync",
    "has_tied_tensors",
    "policy_tensors",
]
