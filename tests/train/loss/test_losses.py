"""Worked numbers of the objective, computed by TRL's real loss on given log-probs."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from verifiers.train.validation.loss_settings import LOSS_TYPES

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 1]])
ADVANTAGES = torch.tensor([1.0, -0.5])
LOGPS = torch.tensor([[-1.0, -0.6, -2.0, 0.0], [-0.7, -9.0, -1.2, -0.3]])
OLD_LOGPS = torch.tensor([[-1.1, -0.9, -1.5, 0.0], [-0.4, -9.0, -1.2, -0.8]])


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loss_plane(loss_type: str, logps: Tensor, epsilon_high: float = 0.2) -> Any:
    """TRL's trainer without a model: just what `_compute_loss` reads, with the log-probs given."""
    from trl import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    given = {
        "loss_type": loss_type,
        "epsilon_low": 0.2,
        "epsilon_high": epsilon_high,
        "beta": 0.0,
        "max_completion_length": 8,
        "current_gradient_accumulation_steps": 1,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "aux_loss_enabled": False,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
        "_metrics": {"train": defaultdict(list)},
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            num_processes=1, is_main_process=False, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        "args": SimpleNamespace(
            delta=None,
            report_to=[],
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logps, torch.zeros_like(logps.detach()), None),
    }
    vars(trainer).update(given)
    return trainer


def inputs(mask: Tensor, advantages: Tensor, old: Tensor | None) -> dict[str, Tensor]:
    rows = len(mask)
    batch = {
        "prompt_ids": torch.ones(rows, 2, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": torch.ones(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    return batch if old is None else {**batch, "old_per_token_logps": old}


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "is_clipped"),
    [
        (1.0, 1.5, -1.2, True),
        (1.0, 0.5, -0.5, False),
        (-1.0, 1.5, 1.5, False),
        (-1.0, 0.5, 0.8, True),
        (0.7, 1.0, -0.7, False),
        (-0.7, 1.0, 0.7, False),
    ],
)
def test_the_clipped_objective_gives_the_worked_numbers(
    advantage: float, ratio: float, expected: float, is_clipped: bool
) -> None:
    logp = torch.tensor([[ratio]]).log().requires_grad_()
    trainer = loss_plane("grpo", logp)
    loss = trainer._compute_loss(None, inputs(torch.ones(1, 1).long(), torch.tensor([advantage]), torch.zeros(1, 1)))
    (gradient,) = torch.autograd.grad(loss, logp)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert (gradient.item() == 0.0) is is_clipped
    assert trainer._metrics["train"]["clip_ratio/region_mean"] == [float(is_clipped)]


@pytest.mark.parametrize(
    ("loss_type", "expected"), [("grpo", -0.179193), ("dapo", -0.337468), ("dr_grpo", -0.105459)]
)
def test_masked_losses_give_the_worked_numbers(loss_type: str, expected: float) -> None:
    loss = loss_plane(loss_type, LOGPS)._compute_loss(None, inputs(MASK, ADVANTAGES, OLD_LOGPS))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_environment_tokens_log_prob_changes_nothing(loss_type: str) -> None:
    # Position (1, 1) is the environment's: attention sees it (completion_mask), the loss must not (tool_mask).
    batch = inputs(torch.ones_like(MASK), ADVANTAGES, OLD_LOGPS)
    batch |= {"tool_mask": MASK, "num_items_in_batch": MASK.sum()}
    gradients, losses = [], []
    for shift in (0.0, 5.0):
        logps = (LOGPS + shift * (1 - MASK)).requires_grad_()
        loss = loss_plane(loss_type, logps)._compute_loss(None, batch)
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, logps)[0])
    assert losses[0] == losses[1]
    assert torch.equal(gradients[0], gradients[1])
    assert (gradients[0][MASK == 0] == 0).all()


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.4076060), (0.7, -0.2601184), (0.5, -0.1429316)])
def test_log_probs_at_each_temperature_are_the_worked_numbers_in_trls_scorer(
    temperature: float, expected: float
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=3,
            hidden_size=4,
            intermediate_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=4,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    ids = torch.tensor([[1, 0]])
    with torch.no_grad():
        # The head reads the last hidden state h; h w = logits for w = logits h / |h|^2.
        hidden = model.base_model(input_ids=ids).last_hidden_state[0, 0]
        logits = torch.tensor([2.0, 1.0, 0.0])
        model.lm_head.weight.copy_(torch.outer(logits, hidden / hidden.square().sum()))
        trainer = loss_plane("grpo", LOGPS)
        del trainer._get_per_token_logps_and_entropies
        trainer.accelerator.autocast = torch.no_grad
        logp, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, torch.ones_like(ids), 1)
    assert logp.item() == pytest.approx(expected, abs=1e-6)


def test_sampler_and_trainer_at_one_temperature_have_ratio_one() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    for temperature in (1.0, 0.7, 0.5):
        logp = (logits / temperature).log_softmax(-1)[:1].view(1, 1)
        loss = loss_plane("grpo", logp)._compute_loss(None, inputs(torch.ones(1, 1).long(), ADVANTAGES[:1], logp))
        assert loss.item() == -1.0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("stored_old", [True, False])
def test_the_first_update_after_generation_is_reinforce_with_baseline(loss_type: str, stored_old: bool) -> None:
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logps = logits.log_softmax(-1)[..., 2]
    trainer = loss_plane(loss_type, logps, epsilon_high=5.0 if loss_type == "cispo" else 0.2)
    batch = inputs(MASK, ADVANTAGES, logps.detach() if stored_old else None)
    (gradient,) = torch.autograd.grad(trainer._compute_loss(None, batch), logits, retain_graph=True)

    reinforce = -ADVANTAGES[:, None] * logps * MASK
    expected = {
        "grpo": (reinforce.sum(1) / MASK.sum(1)).mean(),
        "dr_grpo": reinforce.sum() / (2 * 8),
        "luspo": reinforce.sum(1).mean(),
        "bnpo": reinforce.sum() / MASK.sum(),
    }
    name = {"sapo": "grpo", "dapo": "bnpo", "cispo": "bnpo", "vespo": "bnpo"}.get(loss_type, loss_type)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected[name], logits)[0], atol=1e-6, rtol=1e-5)
    clipped = [value for key, value in trainer._metrics["train"].items() if "clip" in key]
    assert all(value == [0.0] for value in clipped)


def test_clipping_can_engage_from_the_second_update_on() -> None:
    trainer = loss_plane("grpo", OLD_LOGPS + 0.5)
    trainer._compute_loss(None, inputs(MASK, ADVANTAGES, OLD_LOGPS))
    assert trainer._metrics["train"]["clip_ratio/region_mean"] == [pytest.approx(0.6)]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_an_advantage_repeated_for_each_token_is_that_of_the_rollout(loss_type: str) -> None:
    per_token = ADVANTAGES[:, None] * MASK
    one, other = (
        loss_plane(loss_type, LOGPS)._compute_loss(None, inputs(MASK, advantages, OLD_LOGPS))
        for advantages in (ADVANTAGES, per_token)
    )
    torch.testing.assert_close(one, other)
