"""GRPOConfig: TRL's names mean here what they mean there, and the classic defaults are the classic ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig, grpo_defaults


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "http://127.0.0.1:8000/v1"),
        ({"vllm_server_port": 9001}, "http://127.0.0.1:9001/v1"),
        ({"vllm_server_host": "gpu-box", "vllm_server_port": 9001}, "http://gpu-box:9001/v1"),
        ({"vllm_server_base_url": "http://gpu-box:7000/"}, "http://gpu-box:7000/v1"),
        ({"server_url": "http://there:1/v1", "vllm_server_port": 9001}, "http://there:1/v1"),
    ],
)
def test_the_rollout_server_is_where_trls_settings_say(tmp_path: Path, given: dict[str, Any], url: str) -> None:
    assert GRPOConfig(str(tmp_path), **given).server_url == url


def test_the_classic_defaults_mask_truncated_completions_and_can_be_resumed(tmp_path: Path) -> None:
    classic = grpo_defaults("a-run", output_dir=str(tmp_path))
    assert classic.mask_truncated_completions
    assert not classic.save_only_model
    assert classic.run_name == "a-run"
    assert not grpo_defaults(output_dir=str(tmp_path), mask_truncated_completions=False).mask_truncated_completions


def test_without_an_accelerator_half_precision_and_recomputation_are_off_unless_asked_for(tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), use_cpu=True)
    assert (args.use_cpu, args.bf16, args.activation_checkpointing) == (True, False, False)
    assert GRPOConfig(str(tmp_path), use_cpu=True, gradient_checkpointing=True).activation_checkpointing


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_staleness", -1, "max_staleness is -1; give 0 or more"),
        ("rollout_retries", -2, "rollout_retries is -2; give 0 or more"),
        ("dynamic_sampling_max_groups", -1, "dynamic_sampling_max_groups is -1"),
        ("drop_stragglers_after", 0.0, "drop_stragglers_after is 0; give seconds above 0, or None to wait"),
        ("num_batches_ahead", -1, "num_batches_ahead is -1"),
    ],
)
def test_asynchrony_that_cannot_be_is_refused(tmp_path: Path, name: str, value: float, message: str) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError, match=message):
        GRPOConfig(str(tmp_path), use_cpu=True, **options)


def test_replacement_groups_are_bounded_and_off_unless_asked_for(tmp_path: Path) -> None:
    def config(**options: Any) -> GRPOConfig:
        return GRPOConfig(str(tmp_path), use_cpu=True, **options)

    assert config().spare_groups(8) == 0
    assert config(dynamic_sampling=True).spare_groups(8) == 16
    assert config(dynamic_sampling=True, dynamic_sampling_max_groups=3).spare_groups(8) == 3


@pytest.mark.parametrize(
    ("options", "stale"),
    [
        ({"num_batches_ahead": 0}, False),
        ({"num_batches_ahead": 1}, True),
        ({"num_batches_ahead": 0, "streaming": True}, False),
        ({"num_batches_ahead": 0, "streaming": True, "steps_per_generation": 2}, True),
        ({"num_batches_ahead": 0, "steps_per_generation": 2}, False),
    ],
    ids=str,
)
def test_it_is_known_when_tokens_may_be_older_than_the_weights_that_first_train_them(
    tmp_path: Path, options: dict[str, Any], stale: bool
) -> None:
    assert GRPOConfig(str(tmp_path), use_cpu=True, **options).may_be_stale is stale
