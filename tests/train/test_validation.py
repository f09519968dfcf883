"""Settings that cannot work on several ranks, or with a sharded policy, are refused before a run starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.utils import DistributedType

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig
from verifiers.train.evaluation.eval_sets import choose_eval_sets
from verifiers.train.validation.eval_settings import check_eval_sets
from verifiers.train.validation.process_settings import check_processes, refuse_short_ddp_timeout


def settings(tmp_path: Path, **given: Any) -> GRPOConfig:
    return GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **given)


def ranks(kind: DistributedType, *, is_fsdp2: bool = True, zero_stage: int = 2) -> Any:
    plugin = SimpleNamespace(zero_stage=zero_stage)
    state = SimpleNamespace(deepspeed_plugin=plugin)
    return SimpleNamespace(num_processes=1, distributed_type=kind, is_fsdp2=is_fsdp2, state=state)


def test_the_first_version_of_fsdp_is_refused_with_the_setting_of_the_second(tmp_path: Path) -> None:
    check_processes(ranks(DistributedType.FSDP), settings(tmp_path))
    with pytest.raises(ConfigError, match="fsdp_version: 2"):
        check_processes(ranks(DistributedType.FSDP, is_fsdp2=False), settings(tmp_path))


def test_a_copy_of_the_policy_in_this_process_is_refused_where_no_process_holds_all_of_it(tmp_path: Path) -> None:
    copying = settings(tmp_path, rollout_device="cpu")
    check_processes(ranks(DistributedType.MULTI_CPU), copying)
    check_processes(ranks(DistributedType.DEEPSPEED, zero_stage=2), copying)
    for sharded in (ranks(DistributedType.FSDP), ranks(DistributedType.DEEPSPEED, zero_stage=3)):
        with pytest.raises(ConfigError, match="rollout_device='cpu'"):
            check_processes(sharded, copying)


def test_an_eval_set_without_rows_is_refused_before_the_run(tmp_path: Path) -> None:
    rows = [{"question": "1?", "answer": "1"}]
    env = vf.SingleTurnEnv(dataset=rows, eval_dataset=[], rubric=vf.Rubric([len]))
    args = settings(tmp_path, eval_strategy="steps", eval_steps=1)
    check_eval_sets(args, choose_eval_sets(env, rows))
    for sets in (choose_eval_sets(env), choose_eval_sets(env, {"a": []})):
        with pytest.raises(
            ConfigError, match=r"eval_strategy is 'steps', but the eval set.* has 0 rows; give it rows"
        ):
            check_eval_sets(args, sets)


def test_deadlines_that_outlast_the_other_ranks_wait_are_refused_with_their_sum(tmp_path: Path) -> None:
    several = settings(tmp_path, async_generation_timeout=1500.0, ddp_timeout=1799)
    # one process, whatever it waits for, keeps no other
    refuse_short_ddp_timeout(several, 1)
    with pytest.raises(ConfigError, match=r"ddp_timeout=1799, .* 3840 s \(server_wait=300 \+ weight_sync_t"):
        refuse_short_ddp_timeout(several, 2)
    several.ddp_timeout = 3841
    refuse_short_ddp_timeout(several, 2)
    several.eval_timeout = 3900.0
    refuse_short_ddp_timeout(several, 2)
    several.eval_strategy = "steps"
    with pytest.raises(ConfigError, match="eval_timeout=3900"):
        refuse_short_ddp_timeout(several, 2)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({}, 2040),
        ({"drain_before_sync": True}, 2640),
        ({"weight_sync": "lora"}, 2640),
        ({"rollout_timeout": 900.0}, 2340),
    ],
)
def test_the_wait_for_rank_0_is_as_long_as_all_that_it_may_wait_for_unless_it_is_set(
    tmp_path: Path, given: dict[str, Any], seconds: int
) -> None:
    args = settings(tmp_path, **given)
    assert args.ddp_timeout == seconds + 300
    assert args.ddp_timeout_delta.total_seconds() == seconds + 300
    refuse_short_ddp_timeout(args, 2)
    with pytest.raises(ConfigError, match=f"may wait {seconds} s"):
        refuse_short_ddp_timeout(settings(tmp_path, ddp_timeout=seconds, **given), 2)


def test_a_wait_that_is_never_too_short_stays_and_one_that_nobody_can_count_is_refused(tmp_path: Path) -> None:
    short = {"async_generation_timeout": 5.0, "rollout_timeout": 5.0, "weight_sync_timeout": 5.0}
    assert settings(tmp_path, **short).ddp_timeout == 1800
    endless = settings(tmp_path, async_generation_timeout=float("inf"))
    with pytest.raises(ConfigError, match="async_generation_timeout=inf"):
        refuse_short_ddp_timeout(endless, 2)
