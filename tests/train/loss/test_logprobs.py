"""Old log-probs stand where their tokens are, or nothing is assembled."""

from __future__ import annotations

import pytest
import torch

from verifiers.errors import ConfigError
from verifiers.train.loss.logprobs import assemble_old_log_probs

ATTENTION = torch.ones(2, 5, dtype=torch.int64)
SAMPLED = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]])


def test_log_probs_of_completions_stand_behind_their_prompts() -> None:
    assembled = assemble_old_log_probs([[-0.1, -0.2, -0.3], [-0.4, -0.5]], ATTENTION, SAMPLED)
    assert torch.equal(assembled, torch.tensor([[0, -0.1, -0.2, -0.3], [0, 0, -0.4, -0.5]]))
    assert torch.equal(SAMPLED[:, 1:], torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]]))


def test_tokens_of_the_environment_between_turns_stay_zero() -> None:
    sampled = torch.tensor([[0, 1, 0, 0, 1]])
    assembled = assemble_old_log_probs([[-1.0, -2.0]], torch.ones(1, 5), sampled)
    assert torch.equal(assembled, torch.tensor([[-1.0, 0.0, 0.0, -2.0]]))


@pytest.mark.parametrize(
    ("log_probs", "attention", "sampled", "says"),
    [
        ([[-0.1, -0.2], [-0.4, -0.5]], ATTENTION, SAMPLED, "row 0 has 2 old log-probs and 3 sampled"),
        ([[-0.1] * 3, [-0.4] * 3], ATTENTION, SAMPLED, "row 1 has 3 old log-probs and 2 sampled"),
        ([[-0.1] * 3], ATTENTION, SAMPLED, "1 rows"),
        ([[-0.1] * 3, [-0.4] * 2], ATTENTION[:, :4], SAMPLED, "equal masks"),
        ([[-0.1] * 3, [-0.4] * 2], ATTENTION * torch.tensor([1, 1, 1, 1, 0]), SAMPLED, "padding"),
        ([[-0.1], []], ATTENTION, torch.tensor([[1, 0, 0, 0, 0], [0] * 5]), "first token"),
    ],
)
def test_another_length_is_an_error(
    log_probs: list, attention: torch.Tensor, sampled: torch.Tensor, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        assemble_old_log_probs(log_probs, attention, sampled)
