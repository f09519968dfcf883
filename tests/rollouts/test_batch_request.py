"""Blocks of rollouts: what makes none is refused."""

from __future__ import annotations

import pytest

from verifiers.errors import ConfigError
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.types import RolloutKey


def rollouts(*keys: tuple[int, int]) -> list[RolloutRequest]:
    return [RolloutRequest(RolloutKey(0, example, generation), "a") for example, generation in keys]


@pytest.mark.parametrize(
    ("requests", "replacements", "message"),
    [
        ([], [], "batch 0 has no rollouts"),
        ([(0, 0), (0, 1), (1, 0)], [], r"groups of \[1, 2\] rollouts; give each prompt as many"),
        ([(0, 0), (0, 1)], [(1, 0)], r"groups of \[1, 2\] rollouts"),
        ([(0, 0), (1, 0), (0, 1)], [], "rollouts of example_id 0 do not stand together"),
        ([(0, 0), (0, 0)], [], "rollouts of example_id 0 do not stand together"),
    ],
)
def test_rollouts_that_make_no_block_are_refused(
    requests: list[tuple[int, int]], replacements: list[tuple[int, int]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchRequest(0, rollouts(*requests), replacements=rollouts(*replacements))
