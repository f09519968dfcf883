"""What cannot work on several ranks, or where they hold parts of the policy, is refused before a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig
from verifiers.train.sharding import refuse_short_ddp_timeout, refuse_unworkable_sharding


def settings(tmp_path: Path, **given: Any) -> GRPOConfig:
    return GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)


def ranks(kind: DistributedType, *, is_fsdp2: bool = True, zero_stage: int = 2) -> Any:
    plugin = SimpleNamespace(zero_stage=zero_stage)
    return SimpleNamespace(distributed_type=kind, is_fsdp2=is_fsdp2, state=SimpleNamespace(deepspeed_plugin=plugin))


def test_the_first_version_of_fsdp_is_refused_with_the_setting_of_the_second(tmp_path: Path) -> None:
    refuse_unworkable_sharding(ranks(DistributedType.FSDP), settings(tmp_path))
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        refuse_unworkable_sharding(ranks(DistributedType.FSDP, is_fsdp2=False), settings(tmp_path))


def test_a_copy_of_the_policy_in_this_process_is_refused_where_no_process_holds_all_of_it(tmp_path: Path) -> None:
    held = settings(tmp_path, rollout_device="cpu")
    refuse_unworkable_sharding(ranks(DistributedType.MULTI_CPU), held)
    refuse_unworkable_sharding(ranks(DistributedType.DEEPSPEED, zero_stage=2), held)
    for sharded in (ranks(DistributedType.FSDP), ranks(DistributedType.DEEPSPEED, zero_stage=3)):
        with pytest.raises(ConfigError, match="rollout_device='cpu'"):
            refuse_unworkable_sharding(sharded, held)


def test_deadlines_that_outlast_the_other_ranks_wait_are_refused_with_their_sum(tmp_path: Path) -> None:
    several = settings(tmp_path, async_generation_timeout=1500.0)
    # one process, whatever it waits for, keeps no other
    refuse_short_ddp_timeout(several, 1)
    with pytest.raises(ConfigError, match=r"ddp_timeout=1800, .* 1920 s \(async_generation_timeout=1500 \+ server_r"):
        refuse_short_ddp_timeout(several, 2)
    several.ddp_timeout = 1921
    refuse_short_ddp_timeout(several, 2)
    several.eval_timeout = 3600.0
    refuse_short_ddp_timeout(several, 2)
    several.eval_strategy = "steps"
    with pytest.raises(ConfigError, match="eval_timeout=3600"):
        refuse_short_ddp_timeout(several, 2)
