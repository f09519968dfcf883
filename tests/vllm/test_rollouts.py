"""Rollouts of several turns, with and without tools, against a real vLLM: trained on exactly what was sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import tool_world
import torch
import vllm_world
from transformers import Qwen3Config, Qwen3ForCausalLM


def run(model: Path, env: Any, url: str, directory: Path, **overrides: Any) -> tiny_world.ObservedTrainer:
    args = tiny_world.config(directory, url, **{"max_steps": 2, "server_wait": 30.0, **overrides})
    client = tiny_world.RecordingBackend(url)
    trainer = tiny_world.ObservedTrainer(str(model), env, args, client=client)
    trainer.keeps_logps = True
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.8, "top_k": 5, "min_p": 0.05, "temperature": 1.3}], ids=["", "cut"])
@pytest.mark.parametrize("generation", ["messages", "auto"])
def test_turns_are_trained_as_they_were_sampled(
    server: vllm_world.Server, models: dict[str, Path], tmp_path: Path, generation: str, cut: dict[str, float]
) -> None:
    trainer = run(models["policy"], tiny_world.Dialogue(), server.url, tmp_path, generation=generation, **cut)
    assert all(("kept_ids" in batch) == bool(cut) for batch in trainer.seen)
    answers = trainer.client.sampled()
    assert len(answers) == 2 * 8 * 3
    assert trainer.trained_spans() == sorted((prompt, ids, logps) for prompt, ids, logps in answers)
    assert trainer.logged("rollouts/fork_rate") == [0.0, 0.0]
    assert trainer.largest_difference() < 1e-3


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the policy of `tool_world` with its heads padded to a size that vLLM's CPU attention takes."""
    directory = tool_world.make_model(tmp_path_factory.mktemp("tools") / "policy")
    small = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = Qwen3Config(**{**small.config.to_dict(), "head_dim": 32})
    torch.manual_seed(1)
    wide = Qwen3ForCausalLM(config)
    kept = {name: tensor for name, tensor in small.state_dict().items() if "self_attn" not in name}
    wide.load_state_dict(kept, strict=False)
    with torch.no_grad():
        for layer in wide.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.3)
    wide.save_pretrained(directory)
    return directory


def test_tool_calls_are_trained_as_they_were_sampled(
    launch: Callable[..., Any], tool_model: Path, tmp_path: Path
) -> None:
    server = launch(tool_model, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    turns = 8
    trainer = run(tool_model, tool_world.environment(turns), server.url, tmp_path)
    server.stop()
    answers = trainer.client.sampled()
    assert trainer.trained_spans() == sorted((prompt, ids, logps) for prompt, ids, logps in answers)
    assert trainer.logged("rollouts/fork_rate") == [0.0, 0.0]
    assert min(trainer.logged("rollouts/turns")) > 4
    assert trainer.largest_difference() < 1e-3
