"""Settings that cannot work where the policy is sharded over the ranks."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType

from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig

__all__ = ["refuse_unworkable_sharding"]


def refuse_unworkable_sharding(accelerator: Any, args: GRPOConfig) -> None:
    """Refuse what needs whole weights on one rank, or another kind of sharding than is known here.

    Raises:
        ConfigError: with what to set instead.
    """
    kind = accelerator.distributed_type
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigError(
            "FSDP's first version is on its way out of transformers and is not supported; set fsdp_version: 2 in the "
            "file that accelerate launch reads (examples/accelerate/fsdp.yaml)."
        )
    plugin = accelerator.state.deepspeed_plugin if kind == DistributedType.DEEPSPEED else None
    splits_parameters = kind == DistributedType.FSDP or (plugin is not None and plugin.zero_stage == 3)
    if args.rollout_device is not None and splits_parameters:
        raise ConfigError(
            f"rollout_device={args.rollout_device!r} copies weights inside of one process, and here each holds "
            "a part of them; leave it out and start a rollout server (vf-vllm, vf-serve)."
        )
