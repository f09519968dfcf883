"""Kinds of weight sync; the protocol they follow is `verifiers.rollouts.sync.WeightSync`."""

from verifiers.train.weight_sync.choice import WEIGHT_SYNCS, choose_sync
from verifiers.train.weight_sync.directory import DirectorySync
from verifiers.train.weight_sync.fleet import Fleet
from verifiers.train.weight_sync.held import HeldSync
from verifiers.train.weight_sync.lora import LoraSync
from verifiers.train.weight_sync.nccl import NcclSync
from verifiers.train.weight_sync.parameters import has_tied_tensors, policy_tensors
from verifiers.train.weight_sync.probe import ProbeResult
from verifiers.train.weight_sync.server import NoAnswerError, ServerControl

__all__ = [
    "WEIGHT_SYNCS",
    "DirectorySync",
    "Fleet",
    "HeldSync",
    "LoraSync",
    "NcclSync",
    "NoAnswerError",
    "ProbeResult",
    "ServerControl",
    "choose_sync",
    "has_tied_tensors",
    "policy_tensors",
]
