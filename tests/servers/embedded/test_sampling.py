"""Drawing tokens: truncation, the random stream, and the edges of the distribution."""

from __future__ import annotations

import math

import pytest
import torch
from verifiers_embedded.sampling import BatchSampler, SamplingParameters, UniformStream, truncate

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
    draw = BatchSampler(rows, CPU).sample(logits, [0.99] * 4)
    tokens, log_probs = draw.tokens, draw.log_probs
    assert tokens == [0, 0, 4, 3]
    sharpened = [p**2 / sum(q**2 for q in PROBABILITIES) for p in PROBABILITIES]
    assert log_probs == pytest.approx([math.log(0.5), 0.0, math.log(0.05), math.log(sharpened[3])], abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1.0 - 2.0**-40])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, 17] = 3.0
    draw = BatchSampler([SamplingParameters(0)], CPU).sample(logits, [uniform])
    assert (draw.tokens, draw.log_probs) == ([17], [0.0])


def test_the_random_stream_depends_on_the_seed_and_stays_below_one() -> None:
    first, again, other = UniformStream(3), UniformStream(3), UniformStream(2**64 - 1)
    numbers = [first.next() for _ in range(200)]
    assert numbers == [again.next() for _ in range(200)]
    assert numbers != [other.next() for _ in range(200)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert 0.4 < sum(numbers) / 200 < 0.6
