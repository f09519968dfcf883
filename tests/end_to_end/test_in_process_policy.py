"""The server in the trainer's process: the same promises, with no file between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch

import verifiers as vf
from verifiers.cli import train
from verifiers.errors import WeightSyncError
from verifiers.monitoring.run_log import read_run


@pytest.fixture
def make(
    new_trainer: Callable[..., tiny_world.ObservedTrainer], model_dir: Path
) -> Callable[..., tiny_world.ObservedTrainer]:
    """Make trainers that hold their own server."""
    return lambda env, **options: new_trainer(model_dir, env, "", rollout_device="cpu", **options)


def test_training_needs_no_other_server_and_stays_on_policy(make: Callable[..., Any]) -> None:
    trainer = make(tiny_world.Dialogue(), max_steps=3)
    trainer.keeps_logps = True
    before = tiny_world.weights(trainer)
    trainer.train()
    assert any(not torch.equal(before[name], now) for name, now in tiny_world.weights(trainer).items())
    assert trainer.largest_difference() < 1e-4
    assert max(trainer.logged("sampling/probe_difference")) < 1e-4


def test_a_run_file_that_names_no_server_trains_in_one_process(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train.main([str(tiny_world.write_run(tmp_path, model_dir))]) == 0
    run = read_run(Path("outputs/letters_env"))
    assert run["status"] == "finished"
    assert (run["settings"]["rollout_device"], run["settings"]["num_batches_ahead"]) == ("cpu", 0)
    assert Path("outputs/letters_env/model.safetensors").exists()


def test_the_in_process_copy_follows_pushes_and_nothing_else(make: Callable[..., Any]) -> None:
    trainer = make(tiny_world.single_turn())
    with tiny_world.closing(trainer):
        trainer.open()
        trainer.session.push(0)
        copy = trainer.weight_sync.copy_of(0)
        ids = torch.tensor([[3, 4, 5]])
        with torch.no_grad():
            logits = copy(input_ids=ids).logits.clone()
            for parameter in trainer.model.parameters():
                parameter.add_(0.05)
            assert torch.equal(copy(input_ids=ids).logits, logits)
            trainer.session.push(1)
            assert trainer.weight_sync.copy_of(0) is None
            pushed = copy.state_dict()
            assert all(torch.equal(pushed[name], value) for name, value in tiny_world.weights(trainer).items())


@pytest.mark.parametrize(("asked", "checked"), [({}, [0, 1, 8]), ({"probe_every": 3}, [0, 1, 3, 6, 9])])
def test_a_copy_of_the_policy_is_checked_at_first_and_then_now_and_then(
    asked: dict[str, int], checked: list[int], make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tiny_world.single_turn(), **asked)
    found: list[int] = []
    with tiny_world.closing(trainer):
        trainer.open()
        for name in ("run", "begin"):
            monkeypatch.setattr(trainer.check, name, lambda version, pool: found.append(version))
        for version in range(10):
            trainer.session.push(version)
    assert found == checked


@pytest.mark.parametrize("bf16", [False, True])
def test_old_log_probs_on_the_copy_are_the_trainers_own(
    bf16: bool, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    trainer = make(
        tiny_world.Dialogue(), num_iterations=2, temperature=0.7, bf16=bf16, old_logprobs_on_rollout_device=True
    )
    old = trainer.logprobs.old

    def comparing(batch: Any, copy: Any) -> torch.Tensor:
        assert copy is not None
        there = old(batch, copy)
        compared.append((there, trainer.logprobs.of_model(trainer.model, batch), batch["loss_mask"].bool()))
        return there

    monkeypatch.setattr(trainer.logprobs, "old", comparing)
    trainer.train()
    assert compared
    for there, here, real in compared:
        assert torch.allclose(there[real], here[real], atol=1e-5)


# peft 0.21 reads a property that transformers 5.23 has renamed
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_pushed_merged(make: Callable[..., Any]) -> None:
    trainer = make(tiny_world.single_turn(), peft_config=vf.lora_defaults(4, 8))
    trainer.train()
    assert max(trainer.logged("sampling/probe_difference")) < 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rollout_device": "cpu", "rollout_cuda_graphs": True}, "rollout_cuda_graphs needs a GPU as rollout_device"),
        ({"old_logprobs_on_rollout_device": True}, "has no effect without rollout_device"),
        (
            {"rollout_device": "cpu", "old_logprobs_on_rollout_device": True, "cast_lm_head_to_fp32": True},
            "cast_lm_head_to_fp32 do not go together",
        ),
    ],
)
def test_settings_of_a_copy_that_cannot_be_are_refused(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(vf.ConfigError, match=message):
        tiny_world.config(tmp_path, "", **settings)


def test_a_copy_on_a_device_that_is_not_there_ends_the_run_with_its_name(
    new_trainer: Callable[..., tiny_world.ObservedTrainer], model_dir: Path
) -> None:
    trainer = new_trainer(model_dir, tiny_world.single_turn(), "", rollout_device="cuda:99")
    with pytest.raises(WeightSyncError, match="no copy of the policy could be made on cuda:99"):
        trainer.train()
