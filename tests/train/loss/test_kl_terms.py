"""Estimators of the KL as terms of a loss: their values, and the gradient that they have in expectation."""

from __future__ import annotations

import pytest
import torch

from verifiers.train.loss.policy_loss import kl_terms

REFERENCE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.6931472), ("k2", 0.2402265), ("k3", 0.1931472)])
def test_a_token_twice_as_likely_as_under_the_reference_gives_the_worked_numbers(
    estimator: str, expected: float
) -> None:
    logps, reference = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    for corrected in (False, True):
        found = kl_terms(logps, reference, torch.ones(1, 1), estimator, corrected=corrected)
        assert found.item() == pytest.approx(expected)
    # sampled at 0.4, the token counts 0.5 / 0.4 times
    ratio = torch.tensor([[1.25]])
    assert kl_terms(logps, reference, ratio, estimator, corrected=True).item() == pytest.approx(1.25 * expected)


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
