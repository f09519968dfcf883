"""Compiled passes give the plain logits; pushes and a changing number of rows compile nothing more."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sequences import sequence
from verifiers_embedded.engine.batch import ActiveBatch

CONTEXT = 256


class Backend:
    """Runs what torch.compile captured as it is, and counts how often something was captured."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, captured: Any, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1
        return captured.forward


@pytest.fixture
def model(model_dir: Path) -> Any:
    torch._dynamo.reset()
    yield transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval().requires_grad_(False)
    torch._dynamo.reset()


def check(batch: ActiveBatch, model: Any) -> None:
    for row, item in zip(batch.logits(), batch.sequences, strict=True):
        plain = model(input_ids=torch.tensor([item.tokens])).logits[0, -1]
        assert (row - plain).abs().max() <= 1e-4


@pytest.mark.slow
def test_one_compilation_serves_all_steps_of_a_size_and_every_push(model: Any) -> None:
    backend, dice = Backend(), random.Random(0)
    batch = ActiveBatch(model, 6, CONTEXT, backend=backend)
    with torch.inference_mode():
        for turn in range(24):
            lengths = [dice.choice([1, 2, 20]) for _ in range(dice.randint(1, 6 - len(batch.sequences)))]
            batch.add([sequence([dice.randrange(90) for _ in range(length)]) for length in lengths])
            check(batch, model)
            for item in batch.sequences:
                item.tokens.append(dice.randrange(90))
            batch.keep_only([*[False] * (turn % 3 + 1), *[True] * 6][: len(batch.sequences)])
            if turn % 4 == 3:
                before = batch.sequences[0].tokens if batch.sequences else None
                for tensor in model.state_dict().values():
                    tensor.mul_(1.01)
                batch.recompute()
                assert before is None or batch.sequences[0].tokens is before
        assert backend.compiled == 1
        # a longer sequence needs a wider cache: compiled once more, and then no more
        batch.keep_only([False] * len(batch.sequences))
        for _ in range(2):
            batch.add([sequence([7] * 150), sequence([5, 6])])
            check(batch, model)
            check(batch, model)
            batch.keep_only([False, False])
    assert backend.compiled == 2
