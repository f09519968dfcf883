"""Drawing tokens: truncation, the random stream, and the edges of the distribution."""

from __future__ import annotations

import math

import pytest
import torch
from verifiers_embedded.engine import sampling
from verifiers_embedded.engine.sampling import BatchSampler, DeviceNoise, NoiseStream, SamplingParameters, truncate

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


def test_threads_draw_the_numbers_that_one_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, seeds = torch.randn(6, 50, generator=torch.Generator().manual_seed(2)), range(6)

    def drawn() -> list[list[int]]:
        sampler, streams = (
            BatchSampler([SamplingParameters(seed) for seed in seeds], CPU),
            list(map(NoiseStream, seeds)),
        )
        return [sampler.sample(logits, streams).tokens for _ in range(20)]

    by_one = drawn()
    monkeypatch.setattr(sampling, "_WORTH_THREADS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert drawn() == by_one


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    draws = 5_000
    logits = torch.tensor([PROBABILITIES]).log()
    sampler, stream = BatchSampler([SamplingParameters(0)], CPU), NoiseStream(0)
    counts = torch.zeros(len(PROBABILITIES))
    for _ in range(draws):
        counts[sampler.sample(logits, [stream]).tokens[0]] += 1
    expected = torch.tensor(PROBABILITIES) * draws
    # chi-squared with 4 degrees of freedom is above 23.5 once in ten thousand seeds
    assert ((counts - expected) ** 2 / expected).sum() < 23.5


def test_rounding_changes_no_token() -> None:
    vocabulary, draws = 30_000, 300
    rounding = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(1, vocabulary, generator=rounding)
    sampler, stream, rounded_stream = BatchSampler([SamplingParameters(0)], CPU), NoiseStream(5), NoiseStream(5)
    for _ in range(draws):
        rounded = logits + 1e-5 * torch.randn(1, vocabulary, generator=rounding)
        assert sampler.sample(logits, [stream]).tokens == sampler.sample(rounded, [rounded_stream]).tokens


def device_numbers(seeds: list[int], positions: int, size: int) -> torch.Tensor:
    noise = DeviceNoise([NoiseStream(seed) for seed in seeds], CPU)
    return torch.stack([noise.next(size) for _ in range(positions)])


def test_a_gpus_numbers_are_exponential_and_independent() -> None:
    numbers = device_numbers([0, 1, 2, 2**64 - 1], 10, 25_000).flatten().sort().values
    # Kolmogorov-Smirnov of a million numbers: above 2.3 / sqrt(n) once in 25,000 tries
    steps = torch.arange(len(numbers), dtype=torch.float64) / len(numbers)
    assert (steps + numbers.neg().expm1()).abs().max() < 2.3 / len(numbers) ** 0.5
    assert numbers[0] > 0
    grid = device_numbers(list(range(64)), 64, 64)
    for neighbours in (grid[1:] * grid[:-1], grid[:, 1:] * grid[:, :-1], grid[:, :, 1:] * grid[:, :, :-1]):
        # the product of two independent ones has mean 1 and variance 3
        assert abs(neighbours.mean() - 1) < 4 * (3 / neighbours.numel()) ** 0.5


def test_a_gpus_tokens_come_as_often_as_their_probabilities_say_and_by_their_seed_alone() -> None:
    rows = 20_000
    logits = torch.tensor([PROBABILITIES] * rows).log()
    sampler = BatchSampler([SamplingParameters(0)] * rows, CPU, host_noise=False)
    draws = [sampler.sample(logits, streams).tokens for streams in [[NoiseStream(seed) for seed in range(rows)]] * 2]
    for tokens in draws:
        expected = torch.tensor(PROBABILITIES) * rows
        assert ((torch.bincount(torch.tensor(tokens), minlength=5) - expected) ** 2 / expected).sum() < 23.5
    assert draws[0] != draws[1]
    # alone in its batch, and with other rows between the two positions
    stream = NoiseStream(7)
    found = [
        BatchSampler([SamplingParameters(0)] * count, CPU, host_noise=False)
        .sample(logits[:count], [*map(NoiseStream, range(count - 1)), stream])
        .tokens[-1]
        for count in (1, 5)
    ]
    assert found == [draws[0][7], draws[1][7]]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.6}, [0, 1]),
        ({"min_p": 0.25}, [0, 1, 2]),
        ({}, []),
        ({"temperature": 0}, []),
    ],
)
def test_the_tokens_that_could_be_drawn_are_told_where_some_could_not(
    limits: dict[str, float], kept: list[int]
) -> None:
    logits = torch.tensor([PROBABILITIES] * 2).log()
    rows = [SamplingParameters(0, **limits, return_mask=asked) for asked in (True, False)]
    assert BatchSampler(rows, CPU).sample(logits, [NoiseStream(0) for _ in rows]).kept == [kept, []]
