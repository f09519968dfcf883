"""Kinds of weight sync; the protocol they follow is `verifiers.rollouts.sync.WeightSync`."""

from verifiers.train.weight_sync.directory import DirectorySync
from verifiers.train.weight_sync.held import HeldSync
from verifiers.train.weight_sync.parameters import policy_tensors
from verifiers.train.weight_sync.probe import ProbeResult, probe_server
from verifiers.train.weight_sync.server import ServerControl

__all__ = ["DirectorySync", "HeldSync", "ProbeResult", "ServerControl", "policy_tensors", "probe_server"]
