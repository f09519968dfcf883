"""Sequences for the tests that drive a batch without an engine."""

from __future__ import annotations

from concurrent.futures import Future

from verifiers_embedded.engine.generation import GenerationRequest, Sequence
from verifiers_embedded.engine.sampling import NoiseStream, SamplingParameters


def sequence(tokens: list[int]) -> Sequence:
    request = GenerationRequest(tuple(tokens), 500, SamplingParameters(seed=0))
    return Sequence(request, Future(), None, NoiseStream(0), list(tokens))
