"""Checks of a run's settings with its processes: deadlines of rank 0, and sharding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.train.weight_sync import SYNC_TYPES

if TYPE_CHECKING:
    from verifiers.train.config import GRPOConfig

__all__ = ["adjust_ddp_timeout", "check_processes", "refuse_short_ddp_timeout"]

_DEFAULT_DDP_TIMEOUT_S = 1800
# writing weights and environments' own code have no deadline and take seconds
_MARGIN_S = 300
# the longest timeout that torch can represent
_LONGEST_S = 30 * 86400.0


def adjust_ddp_timeout(args: GRPOConfig) -> None:
    """Raise `ddp_timeout`, where it is transformers' default, to what the other ranks may wait for rank 0."""
    needed_s = max(sum(seconds for _, seconds in waits) for waits in _waits_of_rank_0(args))
    if args.ddp_timeout == _DEFAULT_DDP_TIMEOUT_S and needed_s < _LONGEST_S:
        args.ddp_timeout = max(_DEFAULT_DDP_TIMEOUT_S, math.ceil(needed_s) + _MARGIN_S)


def refuse_short_ddp_timeout(args: GRPOConfig, processes: int) -> None:
    """Refuse deadlines of rank 0 that end after the other ranks' wait for it, which would hide what was wrong.

    Raises:
        ConfigError: with what to set instead.
    """
    if processes == 1:
        return
    for waits in _waits_of_rank_0(args):
        needed_s = sum(seconds for _, seconds in waits)
        if needed_s >= args.ddp_timeout:
            listed = " + ".join(f"{name}={seconds:g}" for name, seconds in waits)
            raise ConfigError(
                f"ddp_timeout={args.ddp_timeout:g}, but rank 0 may wait {needed_s:g} s ({listed}) while the other "
                f"processes wait for it; set ddp_timeout above {needed_s:g}, leave it out, or lower the others."
            )


def _waits_of_rank_0(args: GRPOConfig) -> list[list[tuple[str, float]]]:
    """Return the deadlines of rank 0's waits while the other ranks wait in one collective: settings and seconds.

    A block is the longest: the server, rollouts that end before the push, the update of another server, servers that
    are away, the push, its probe, and the block itself.
    """
    block = ["server_wait"]
    sync = SYNC_TYPES.get(args.weight_sync)
    if args.drain_before_sync or (args.drain_before_sync is None and sync is not None and not sync.keeps_requests):
        block.append("async_generation_timeout")
    evaluation = "async_generation_timeout" if args.eval_timeout is None else "eval_timeout"
    evaluates = getattr(args.eval_strategy, "value", args.eval_strategy) != "no"
    probe = max(
        ("async_generation_timeout", "rollout_timeout", "weight_sync_timeout"), key=lambda name: getattr(args, name)
    )
    block += [
        "weight_sync_timeout",
        "server_restart_timeout",
        "weight_sync_timeout",
        probe,
        "async_generation_timeout",
    ]
    found = [block, [evaluation]] if evaluates else [block]
    return [[(name, float(getattr(args, name))) for name in names] for names in found]


def check_processes(accelerator: Any, args: GRPOConfig) -> None:
    """Refuse deadlines and sharding under which the processes of a run cannot work together.

    Raises:
        ConfigError: with what to set instead.
    """
    from accelerate.utils import DistributedType

    refuse_short_ddp_timeout(args, accelerator.num_processes)
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
