"""Drawing tokens: truncation, the random stream, and the edges of the distribution."""

from __future__ import annotations

import math

import pytest
import torch
from verifiers_embedded.sampling import BatchSampler, NoiseStream, SamplingParameters, truncate

CPU = torch.device("cpu")
PROBABILITIES = [0.5, 0.2, 0.15, 0.1, 0.05]


def left(top_k: float = 0, top_p: float = 1, min_p: float = 0) -> list[int]:
    log_probs = torch.tensor([PROBABILITIES[::-1]]).log()
    kept = truncate(log_probs, torch.tensor([[float(top_k), top_p, min_p]]))
    return [4 - index for index in range(4, -1, -1) if kept[0, index] > -math.inf]


def test_truncation_keeps_what_each_limit_says() -> None:
    assert left() == [0, 1, 2, 3, 4]
    assert left(top_k=2) == [0, 1]
    assert left(top_p=0.6) == [0, 1]
    assert left(top_p=0.49) == [0]
    assert left(top_p=1e-9) == [0]
    assert left(min_p=0.25) == [0, 1, 2]
    assert left(min_p=1.0) == [0]
    # 0.5 / 0.7 of the mass that top_k leaves is more than 0.7, so the first token alone reaches top_p.
    assert left(top_k=2, top_p=0.7) == [0]


def test_rows_of_different_kinds_share_a_batch() -> None:
    logits = torch.tensor([PROBABILITIES] * 4).log()
    rows = [
        SamplingParameters(0, temperature=0),
        SamplingParameters(0, top_k=1),
        SamplingParameters(0),
        SamplingParameters(0, temperature=0.5),
    ]
    # its numbers are 1.83, 1.40, 1.47, 0.0203 and 0.0051
    draw = BatchSampler(rows, CPU).sample(logits, [NoiseStream(6709) for _ in rows])
    tokens, log_probs = draw.tokens, draw.log_probs
    assert tokens == [0, 0, 4, 3]
    sharpened = [p**2 / sum(q**2 for q in PROBABILITIES) for p in PROBABILITIES]
    assert log_probs == pytest.approx([math.log(0.5), 0.0, math.log(0.05), math.log(sharpened[3])], abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_token_of_probability_zero_is_never_drawn(seed: int) -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, 17] = 3.0
    draw = BatchSampler([SamplingParameters(seed)], CPU).sample(logits, [NoiseStream(seed)])
    assert (draw.tokens, draw.log_probs) == ([17], [0.0])


def numbers(seed: int, size: int = 500) -> torch.Tensor:
    noise, stream = torch.empty(2, size, dtype=torch.float64), NoiseStream(seed)
    for row in noise:
        stream.fill(row)
    return noise


def test_the_numbers_depend_on_the_seed_and_the_position() -> None:
    first, other = numbers(3), numbers(2**64 - 1)
    assert torch.equal(first, numbers(3))
    assert not torch.isclose(first[0], first[1]).any()
    assert not torch.isclose(first, other).any()


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    draws = 20_000
    logits = torch.tensor([PROBABILITIES]).log()
    sampler, stream = BatchSampler([SamplingParameters(0)], CPU), NoiseStream(0)
    counts = torch.zeros(len(PROBABILITIES))
    for _ in range(draws):
        counts[sampler.sample(logits, [stream]).tokens[0]] += 1
    expected = torch.tensor(PROBABILITIES) * draws
    # chi-squared with 4 degrees of freedom is above 23.5 once in ten thousand seeds
    assert ((counts - expected) ** 2 / expected).sum() < 23.5


def test_rounding_changes_no_token() -> None:
    vocabulary, draws = 30_000, 1_000
    rounding = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(1, vocabulary, generator=rounding)
    sampler, stream, rounded_stream = BatchSampler([SamplingParameters(0)], CPU), NoiseStream(5), NoiseStream(5)
    for _ in range(draws):
        rounded = logits + 1e-5 * torch.randn(1, vocabulary, generator=rounding)
        assert sampler.sample(logits, [stream]).tokens == sampler.sample(rounded, [rounded_stream]).tokens
