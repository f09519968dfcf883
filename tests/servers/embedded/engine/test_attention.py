"""Rows of different lengths and prompts laid end to end attend exactly as they would alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from sequences import sequence
from verifiers_embedded.engine.attention import NAME, install
from verifiers_embedded.engine.batch import ActiveBatch
from verifiers_embedded.engine.generation import Sequence


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def test_a_model_that_was_served_still_attends_as_before_outside_the_batch(model_dir: Path, reference: Any) -> None:
    model = load(model_dir)
    assert install(model)
    assert model.config._attn_implementation == NAME
    ids = [[5, 6, 7, 8, 9], [0, 0, 6, 7, 9]]
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor(ids), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits
    for row, start in ((0, 0), (1, 2)):
        assert (logits[row, start:] - reference.logits(model_dir, ids[row][start:])).abs().max() <= 1e-5


def test_in_16_bits_most_tokens_have_every_bit_of_a_plain_pass(model_dir: Path) -> None:
    model, dice = load(model_dir, torch.bfloat16), random.Random(0)
    batch = ActiveBatch(model, slots=16, max_model_len=256)
    found: list[tuple[Sequence, torch.Tensor]] = []
    with torch.inference_mode():
        batch.add([sequence([dice.randrange(5, 90) for _ in range(dice.randint(20, 90))]) for _ in range(16)])
        starts = {id(item): len(item.tokens) for item in batch.sequences}
        for _ in range(40):
            found += zip(list(batch.sequences), batch.logits(), strict=True)
            for item in batch.sequences:
                item.tokens.append(dice.randrange(5, 90))
        same = []
        for item in batch.sequences:
            plain = model(input_ids=torch.tensor([item.tokens])).logits[0, starts[id(item)] - 1 : -1]
            ours = torch.stack([row for owner, row in found if owner is item])
            same += (ours == plain).all(dim=1).tolist()
    assert sum(same) / len(same) > 0.8
