"""Our loss is TRL's own where every row is a rollout, with the importance weights that TRL has for vLLM."""

from __future__ import annotations

import itertools
import os
import random
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
import torch
import trl
from torch import Tensor

from verifiers.train.loss.grpo_loss import CorrectedLoss
from verifiers.train.trainer import GRPOTrainer
from verifiers.train.validation.loss_settings import IMPORTANCE_SAMPLING_MODES, LOSS_TYPES

ROWS, COLUMNS, CAP = 5, 7, 1.4

CHOICES: dict[str, tuple[Any, ...]] = {
    "loss_type": tuple(LOSS_TYPES),
    "importance_sampling_level": ("token", "sequence"),
    "mode": IMPORTANCE_SAMPLING_MODES,
    "beta": (0.0, 0.3),
    "top_entropy_quantile": (1.0, 0.5),
    "off_policy_mask_threshold": (None, 0.1),
    "delta": (None, 1.3),
}


def cases() -> list[dict[str, Any]]:
    """Return some of all combinations: every loss type with every mode, and the rest by chance."""
    draw = random.Random(0)
    found = []
    for loss_type, mode in itertools.product(LOSS_TYPES, IMPORTANCE_SAMPLING_MODES):
        if loss_type == "vespo" and mode.startswith("sequence"):
            continue
        for _ in range(2):
            rest = {name: draw.choice(values) for name, values in CHOICES.items()}
            found.append({**rest, "loss_type": loss_type, "mode": mode})
    return found


class Accelerator:
    num_processes = 1
    sync_gradients = True
    device = "cpu"

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str = "sum") -> Tensor:
        return value

    def pad_across_processes(self, value: Tensor, **options: Any) -> Tensor:
        return value


def plane(kind: type[Any], case: dict[str, Any]) -> Any:
    """Return a trainer without a model: what `_compute_loss` reads, with vLLM said to have sampled."""
    settings = {name: value for name, value in case.items() if name not in ("mode", "delta", "kl_estimator")}
    made = object.__new__(kind)
    given = {
        "epsilon_low": 0.2,
        "epsilon_high": 1.5 if case["loss_type"] == "cispo" else 0.2,
        "use_vllm": kind is trl.GRPOTrainer,
        "vllm_importance_sampling_correction": True,
        "aux_loss_enabled": False,
        # an entropy bonus over some tokens of a micro-batch is refused
        "entropy_coef": 0.1 if case["top_entropy_quantile"] == 1.0 else 0.0,
        "_entropy_bonus_enabled": case["top_entropy_quantile"] == 1.0,
        "use_adaptive_entropy": False,
        "router_aux_loss_coef": 0.0,
        "max_completion_length": 9,
        "current_gradient_accumulation_steps": 1,
        "accelerator": Accelerator(),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "args": SimpleNamespace(
            loss_type=case["loss_type"],
            delta=case["delta"],
            use_bias_correction_kl=True,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=case["mode"],
            vllm_importance_sampling_clip_max=CAP,
            vllm_importance_sampling_clip_min=None,
            geometric_mask_max=None,
            geometric_mask_min=None,
            importance_sampling_level=case["importance_sampling_level"],
            kl_estimator=case.get("kl_estimator"),
        ),
    }
    vars(made).update({**settings, **given})
    if kind is GRPOTrainer:
        made.corrected_loss = CorrectedLoss(made.args)
        made.updates = SimpleNamespace(note_call=lambda *_: None)
    return made


def a_batch() -> dict[str, Tensor]:
    """Rows of which some tokens are the environment's, with log-probs of four policies that are near one another."""
    draw = torch.Generator().manual_seed(3)
    shape = (ROWS, COLUMNS)
    mask = (torch.rand(shape, generator=draw) > 0.3).long()
    mask[:, 0] = 1
    current = -2 * torch.rand(shape, generator=draw)
    old, ref = (current + 0.3 * torch.randn(shape, generator=draw) for _ in range(2))
    sampled = old + 0.2 * torch.randn(shape, generator=draw)
    return {
        "rollout_index": torch.arange(ROWS),
        "prompt_ids": torch.ones(ROWS, 1).long(),
        "prompt_mask": torch.ones(ROWS, 1).long(),
        "completion_ids": torch.ones(shape).long(),
        "completion_mask": torch.ones(shape).long(),
        "tool_mask": mask,
        "advantages": torch.randn(ROWS, generator=draw),
        "current": current,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "sampling_per_token_logps": torch.where(mask.bool(), sampled, 0.0),
        "entropies": torch.rand(shape, generator=draw),
        "num_items_in_batch": mask.sum().float(),
    }


def one_weight_a_row(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "row_weights": torch.ones(ROWS),
        "update_share": torch.tensor(1.0),
        "call_tokens": batch["tool_mask"].sum(),
        "call_rows": torch.tensor(ROWS),
        "call_padding_rows": torch.tensor(0),
        "sampled_tokens": batch["tool_mask"].sum(1),
    }


def trls_ratio(batch: dict[str, Tensor], mode: str) -> Tensor:
    """Return the factor that TRL makes of vLLM's log-probs when it generates, written down from its documentation."""
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]) * batch["tool_mask"]
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=CAP) if mode.endswith("truncate") else ratio.masked_fill(ratio > CAP, 0.0)


def computed(trainer: Any, batch: dict[str, Tensor], patch: pytest.MonkeyPatch) -> tuple[float, Tensor]:
    leaf = batch["current"].clone().requires_grad_()
    given = (leaf, batch["entropies"], None)
    patch.setattr(trl.GRPOTrainer, "_get_per_token_logps_and_entropies", lambda *args, **options: given)
    loss = trainer._compute_loss(None, {name: batch[name] for name in batch if name not in ("current", "entropies")})
    (gradient,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), gradient


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rows_of_equal_weight_have_the_loss_and_the_gradient_of_trl(
    loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = a_batch()
    corrected = 0
    for case in cases():
        if case["loss_type"] != loss_type:
            continue
        ratio = trls_ratio(batch, case["mode"])
        corrected += bool((ratio >= CAP).any() or (ratio == 0.0).any())
        theirs = plane(trl.GRPOTrainer, case)
        loss, gradient = computed(theirs, {**batch, "importance_sampling_ratio": ratio}, monkeypatch)
        ours = plane(GRPOTrainer, case)
        found_loss, found_gradient = computed(ours, {**batch, **one_weight_a_row(batch)}, monkeypatch)
        assert gradient.abs().max() > 1e-4
        assert found_loss == pytest.approx(loss, abs=1e-6), case
        torch.testing.assert_close(found_gradient, gradient, atol=1e-6, rtol=1e-5)
        logged = ours.corrected_loss.metrics.take()
        assert logged["entropy"] == pytest.approx(theirs._metrics["train"]["entropy"][0], abs=1e-6)
    assert corrected > 1


PLAIN: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "mode": "token_truncate",
    "beta": 0.0,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "delta": None,
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "sapo"])
def test_gspo_token_is_gspo_where_every_token_of_a_row_has_its_advantage(
    loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = a_batch()
    batch |= one_weight_a_row(batch)
    found = {}
    # an importance weight for each row: token weights would make the objective's tokens unequal
    case = PLAIN | {"loss_type": loss_type, "mode": "sequence_truncate"}
    for level in ("sequence", "sequence_token"):
        trainer = plane(GRPOTrainer, case | {"importance_sampling_level": level})
        found[level] = computed(trainer, batch, monkeypatch)
        assert trainer.importance_sampling_level == level
    assert found["sequence_token"][0] == pytest.approx(found["sequence"][0], abs=1e-6)
    torch.testing.assert_close(found["sequence_token"][1], found["sequence"][1], atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_gspo_token_gives_the_worked_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    # ratios 2 and 0.5 x 1.1^2, so that their geometric mean is 1.1; advantages 1 and -3
    batch = {
        "rollout_index": torch.arange(1),
        "current": torch.zeros(1, 2),
        "old_per_token_logps": -torch.tensor([[2.0, 0.605]]).log(),
        "entropies": torch.zeros(1, 2),
        "advantages": torch.tensor([[1.0, -3.0]]),
        "tool_mask": torch.ones(1, 2).long(),
        "num_items_in_batch": torch.tensor(2.0),
    }
    batch |= {name: torch.ones(1, 2).long() for name in ("completion_ids", "completion_mask")}
    batch |= {name: torch.ones(1, 1).long() for name in ("prompt_ids", "prompt_mask")}
    batch |= {"sampling_per_token_logps": batch["old_per_token_logps"], **one_weight_a_row(batch)}
    batch["row_weights"] = torch.ones(1)
    token = computed(plane(GRPOTrainer, PLAIN), batch, monkeypatch)
    gspo_token = computed(
        plane(GRPOTrainer, PLAIN | {"importance_sampling_level": "sequence_token"}), batch, monkeypatch
    )
    # token by token min(2 x 1, 1.2 x 1) and min(0.605 x -3, 0.8 x -3), clipped both; as a row 1.1 x 1 and 1.1 x -3
    assert (token[0], gspo_token[0]) == (pytest.approx(0.6), pytest.approx(1.1))
    torch.testing.assert_close(token[1], torch.zeros(1, 2))
    torch.testing.assert_close(gspo_token[1], torch.tensor([[-0.55, 1.65]]))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_named_estimator_is_the_term_that_beta_weighs(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = a_batch()
    batch |= one_weight_a_row(batch)
    mask = batch["tool_mask"]
    leaf = batch["current"].clone().requires_grad_()
    difference = leaf - batch["ref_per_token_logps"]
    ratio = (leaf - batch["old_per_token_logps"]).exp()
    terms = {
        "k1": ratio * difference,
        "k2": ratio.detach() * difference**2 / 2,
        "k3": ratio * ((-difference).exp() - 1 + difference),
    }
    wanted = 0.3 * ((terms[estimator] * mask).sum(1) / mask.sum(1)).mean()
    (gradient,) = torch.autograd.grad(wanted, leaf)
    with_kl = computed(plane(GRPOTrainer, PLAIN | {"beta": 0.3, "kl_estimator": estimator}), batch, monkeypatch)
    without = computed(plane(GRPOTrainer, PLAIN), batch, monkeypatch)
    assert with_kl[0] - without[0] == pytest.approx(wanted.item(), abs=1e-6)
    torch.testing.assert_close(with_kl[1] - without[1], gradient, atol=1e-6, rtol=1e-5)
