"""Old log-probs stand where their tokens are, or nothing is assembled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verifiers.errors import ConfigError
from verifiers.train.loss import logprobs
from verifiers.train.loss.logprobs import assemble_old_log_probs, log_probs_of_copy

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


SIZE: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 0}
SIZE |= {"initializer_range": 0.5, "bos_token_id": None}


@pytest.mark.parametrize("caps_logits", [False, True])
def test_a_copys_log_probs_are_made_tile_by_tile_where_its_logits_are_its_heads_alone(
    caps_logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    copy: Any = Qwen3ForCausalLM(Qwen3Config(**SIZE)).eval()
    if caps_logits:
        copy = Gemma2ForCausalLM(Gemma2Config(**SIZE, final_logit_softcapping=3.0)).eval()
    draw = torch.Generator().manual_seed(1)
    batch = {
        name: torch.randint(1, 40, (5, size), generator=draw) for name, size in (("prompt", 4), ("completion", 6))
    }
    batch = {f"{name}_ids": ids for name, ids in batch.items()}
    batch |= {"prompt_mask": torch.tensor([[0, 0, 1, 1], *[[1] * 4] * 4]), "completion_mask": torch.ones(5, 6).long()}
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = copy(input_ids=ids, attention_mask=mask).logits[:, 3:-1] / 0.7
    expected = logits.log_softmax(dim=-1).gather(2, batch["completion_ids"][..., None]).squeeze(2)
    held: list[int] = []
    copy.get_output_embeddings().register_forward_hook(lambda *args: held.append(args[-1].numel()))
    monkeypatch.setattr(logprobs, "_TILE", 7 * 40)
    for batch_size in (2, 5):
        found = log_probs_of_copy(copy, batch, temperature=0.7, batch_size=batch_size)
        assert torch.allclose(found, expected, atol=1e-5)
    assert (max(held) <= 7 * 40) is not caps_logits
