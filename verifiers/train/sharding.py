"""Settings that cannot work on several processes, or where the policy is sharded over them."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DistributedType

from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig

__all__ = ["refuse_short_ddp_timeout", "refuse_unworkable_sharding"]

# while rank 0 does one of these, the others wait in a collective
_WAITS_OF_RANK_0 = (
    ("server_wait",),
    ("async_generation_timeout", "server_restart_timeout", "weight_sync_timeout"),
    ("eval_timeout", "server_restart_timeout", "weight_sync_timeout"),
)


def refuse_short_ddp_timeout(args: GRPOConfig, processes: int) -> None:
    """Refuse deadlines of rank 0 that end after the other ranks' wait for it, which would hide what was wrong.

    Raises:
        ConfigError: with what to set instead.
    """
    if processes == 1:
        return
    for names in _WAITS_OF_RANK_0:
        waits = {name: getattr(args, name) for name in names}
        if None in waits.values() or (names[0] == "eval_timeout" and args.eval_strategy == "no"):
            continue
        needed_s = sum(waits.values())
        if needed_s >= args.ddp_timeout:
            listed = " + ".join(f"{name}={value:g}" for name, value in waits.items())
            raise ConfigError(
                f"ddp_timeout={args.ddp_timeout:g}, but rank 0 may wait {needed_s:g} s ({listed}) while the other "
                f"processes wait for it; set ddp_timeout above {needed_s:g}, or lower the others."
            )


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
