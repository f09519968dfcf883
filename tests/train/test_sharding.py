"""What cannot work where ranks hold parts of the policy is refused before anything is trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig
from verifiers.train.sharding import refuse_unworkable_sharding


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
