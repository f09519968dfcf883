"""Sequences for the tests that drive a batch without an engine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from verifiers_embedded.engine.batch import ActiveBatch
from verifiers_embedded.engine.generation import GenerationRequest, Sequence
from verifiers_embedded.engine.sampling import NoiseStream, SamplingParameters


def sequence(tokens: list[int]) -> Sequence:
    request = GenerationRequest(tuple(tokens), 500, SamplingParameters(seed=0))
    return Sequence(request, Future(), None, NoiseStream(0), list(tokens))


def check(batch: ActiveBatch, model: Any, single: float = 1e-5) -> None:
    """Compare every row's logits with a plain forward pass of its tokens; `single` bounds float32."""
    for row, item in zip(batch.logits(), batch.sequences, strict=True):
        plain = model(input_ids=torch.tensor([item.tokens])).logits[0, -1]
        bound = 1e-12 if row.dtype == torch.float64 else single
        assert (row - plain).abs().max() <= bound * (1 + plain.abs().max())
