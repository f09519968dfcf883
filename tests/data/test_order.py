"""Chunks come back in order, whatever arrives when."""

from __future__ import annotations

import itertools

import pytest

from verifiers.data.sampler import reorder_chunks
from verifiers.errors import ConfigError


@pytest.mark.parametrize(("num_generations", "sizes"), [(4, (2, 2)), (8, (3, 3, 2)), (3, (1, 1, 1))])
def test_chunked_generation_comes_back_in_prompt_major_order(num_generations: int, sizes: tuple[int, ...]) -> None:
    generations = iter(range(num_generations))
    made_at_once = [list(itertools.islice(generations, size)) for size in sizes]
    chunks = [[((p, g), f"p{p}g{g}") for p in range(2) for g in chunk] for chunk in made_at_once]
    expected = [f"p{p}g{g}" for p in range(2) for g in range(num_generations)]
    for arrival in itertools.permutations(chunks):
        assert reorder_chunks(arrival, num_generations) == expected
        assert reorder_chunks([chunk[::-1] for chunk in arrival], num_generations) == expected


def test_a_missing_or_doubled_generation_is_never_guessed() -> None:
    with pytest.raises(ConfigError, match=r"\[\(0, 1\)\] are missing"):
        reorder_chunks([[((0, 0), "a")]], 2)
    with pytest.raises(ConfigError, match="arrived twice"):
        reorder_chunks([[((0, 0), "a")], [((0, 0), "b")]], 1)
    with pytest.raises(ConfigError, match=r"\[\(0, 1\)\] do not belong"):
        reorder_chunks([[((0, 0), "a"), ((0, 1), "b")]], 1)
