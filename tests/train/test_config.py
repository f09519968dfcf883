"""GRPOConfig: TRL's names mean here what they mean there, and the classic defaults are the classic ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
