"""Importance weights and estimators of the KL, by numbers worked out by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verifiers.train.config import GRPOConfig
from verifiers.train.conflicts import CHOICES
from verifiers.train.loss.policy_loss import importance_weights, kl_terms, measure_mismatch, policy_loss

MODES = CHOICES["vllm_importance_sampling_mode"]

RATIOS = [[2.0, 0.5, 4.0], [0.25, 8.0, 1.0]]
"""pi_old / mu of each token; the third of row one and the second of row two are the environment's."""

MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])
SAMPLING = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -0.7]])
OLD = SAMPLING + torch.tensor(RATIOS).log()


def bounds(mode: str, high: float | None, low: float | None = None) -> Any:
    """Return the settings of the importance weights."""
    prefix = "vllm_importance_sampling_"
    return SimpleNamespace(**{f"{prefix}mode": mode, f"{prefix}clip_max": high, f"{prefix}clip_min": low})


@pytest.mark.parametrize("mode", MODES)
def test_what_is_recorded_of_environment_tokens_does_not_matter(mode: str) -> None:
    usual = importance_weights(OLD, SAMPLING, MASK, bounds(mode, 3.0))
    for value in (0.0, -50.0, float("nan"), float("inf")):
        odd = torch.where(MASK.bool(), SAMPLING, value)
        assert torch.equal(importance_weights(OLD, odd, MASK, bounds(mode, 3.0)), usual)


def test_the_mismatch_is_measured_at_each_sampled_token() -> None:
    args = bounds("token_truncate", 1.5)
    found = measure_mismatch(OLD, SAMPLING, MASK, importance_weights(OLD, SAMPLING, MASK, args), args)
    ratios = torch.tensor([2.0, 0.5, 0.25, 1.0], dtype=torch.float64)
    assert torch.allclose(found["mismatch_kl"], ratios - 1 - ratios.log(), atol=1e-6)
    for name in ("mean", "min", "max"):
        assert torch.allclose(found[f"sampling/importance_sampling_ratio/{name}"], ratios, atol=1e-6)
    assert torch.allclose(found["sampling/sampling_logp_difference/max"], ratios.log().abs(), atol=1e-6)
    assert found["sampling/clipped_share"].tolist() == [1.0, 0.0, 0.0, 0.0]
    without = measure_mismatch(OLD, SAMPLING, MASK, None, args)
    assert not without["sampling/clipped_share"].any()


@pytest.mark.parametrize("ahead", [0, 1])
def test_without_weights_the_mismatch_is_the_proximal_policys_wherever_that_is_known(ahead: int) -> None:
    args = GRPOConfig(
        "unused", use_cpu=True, bf16=False, vllm_importance_sampling_correction=False, num_batches_ahead=ahead
    )
    # the old log-probs of tokens that may be stale are the sampler's
    batch = {"loss_mask": MASK, "sampler_logps": SAMPLING, "old_logps": SAMPLING if ahead else OLD}
    batch |= {"advantages": torch.zeros(2, 3), "token_weights": torch.ones(2)}
    _, measured = policy_loss(OLD if ahead else OLD - 5.0, torch.zeros(2, 3), batch, args)
    ratios = torch.tensor([2.0, 0.5, 0.25, 1.0], dtype=torch.float64)
    assert torch.allclose(measured.values["mismatch_kl"], ratios - 1 - ratios.log(), atol=1e-6)


def test_the_estimated_divergence_is_never_negative_and_zero_only_where_they_agree() -> None:
    torch.manual_seed(0)
    old, sampling, args = -torch.rand(60, 5), -torch.rand(60, 5), bounds("token_truncate", None)
    assert (measure_mismatch(old, sampling, torch.ones(60, 5), None, args)["mismatch_kl"] > 0).all()
    assert not measure_mismatch(SAMPLING, SAMPLING, MASK, None, args)["mismatch_kl"].any()
    assert all(not len(values) for values in measure_mismatch(OLD, SAMPLING, MASK * 0, None, args).values())


def test_a_sequences_ratio_is_what_sequence_modes_measure_and_clip() -> None:
    old, args = torch.log(torch.tensor([[2.0, 3.0, 9.0], [0.5, 1.0, 1.0]])), bounds("sequence_truncate", 5.0)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    weights = importance_weights(old, torch.zeros(2, 3), mask, args)
    found = measure_mismatch(old, torch.zeros(2, 3), mask, weights, args)
    ratios = torch.tensor([6.0, 6.0, 0.5, 0.5, 0.5], dtype=torch.float64)
    assert torch.allclose(found["sampling/importance_sampling_ratio/mean"], ratios)
    # the ratios of single tokens, of which none is above the bound, do not matter
    assert found["sampling/clipped_share"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert found["sampling/sampling_logp_difference/max"].max() == pytest.approx(math.log(3))


# -- the KL ----------------------------------------------------------------------------------------------------------

REFERENCE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("estimator", "corrected", "on_policy", "has_the_gradient"),
    [
        ("k1", True, True, True),
        ("k1", True, False, True),
        ("k2", True, True, True),
        ("k2", True, False, True),
        ("k2", False, True, True),
        ("k2", False, False, False),
        ("k1", False, True, False),
        ("k3", True, True, True),
        ("k3", True, False, True),
        ("k3", False, True, False),
    ],
)
def test_in_expectation_over_the_sampler_the_gradient_is_that_of_the_kl(
    estimator: str, corrected: bool, on_policy: bool, has_the_gradient: bool
) -> None:
    logits = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    logps = logits.log_softmax(0)
    sampler = logps.detach() if on_policy else torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    (wanted,) = torch.autograd.grad((logps.exp() * (logps - REFERENCE)).sum(), logits, retain_graph=True)
    # each token is a row of its own, as likely as the sampler makes it
    ratio = (logps - sampler).exp()[:, None]
    terms = kl_terms(logps[:, None], REFERENCE[:, None], ratio, estimator, corrected=corrected)
    (found,) = torch.autograd.grad((sampler.exp() * terms.squeeze(1)).sum(), logits)
    assert torch.allclose(found, wanted) is has_the_gradient
    if estimator == "k1" and not corrected:
        torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-12, rtol=0.0)
