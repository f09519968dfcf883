"""Blocks from columns."""

from __future__ import annotations

from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.types import RolloutKey


def test_columns_become_requests_with_an_identity_each() -> None:
    columns: dict[str, Any] = {
        "prompt": ["a", "a", "b", "b"],
        "answer": ["1", "1", None, None],
        "info": [{"x": 1}, {"x": 1}, None, None],
        "example_id": [40, 40, 7, 7],
        "seed": [1, 2, 3, 4],
        "task": None,
    }
    requests = BatchRequest(3, columns, num_generations=2).requests()
    assert [request.key for request in requests] == [
        RolloutKey(3, 40, 0),
        RolloutKey(3, 40, 1),
        RolloutKey(3, 7, 0),
        RolloutKey(3, 7, 1),
    ]
    assert [request.answer for request in requests] == ["1", "1", "", ""]
    assert [request.info for request in requests] == [{"x": 1}, {"x": 1}, {}, {}]
    assert [request.task for request in requests] == ["default"] * 4
    assert [request.seed for request in requests] == [1, 2, 3, 4]


def test_without_example_ids_the_groups_are_numbered() -> None:
    requests = BatchRequest(0, {"prompt": ["a", "a", "b", "b"]}, num_generations=2).requests()
    assert [(request.key.example_id, request.key.generation) for request in requests] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("columns", "size", "message"),
    [
        ({}, 1, "batch 0 has no prompts; give env_inputs a column 'prompt'"),
        ({"prompt": []}, 1, "batch 0 has no prompts"),
        ({"prompt": None}, 1, "batch 0 has no prompts"),
        ({"prompt": ["a", "b"], "answer": ["1"]}, 1, "column 'answer' has 1 values, 'prompt' has 2"),
        ({"prompt": ["a", "a", "b"]}, 2, "has 3 prompts, which num_generations=2 does not divide"),
        ({"prompt": ["a"]}, 0, "num_generations is 0; give 1 or more"),
        ({"prompt": ["a", "b"] * 2, "example_id": [0, 1] * 2}, 2, "rows of example_id 0 do not stand together"),
    ],
)
def test_columns_that_make_no_block_are_refused(columns: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchRequest(0, columns, num_generations=size).requests()


def test_a_list_of_rollouts_becomes_the_same_rollouts_again() -> None:
    def of(*examples: int) -> list[RolloutRequest]:
        return [
            RolloutRequest(RolloutKey(5, example, g), f"q{example}", "a", "t", {"e": example}, seed=10 * example + g)
            for example in examples
            for g in range(2)
        ]

    request = BatchRequest.of_rollouts(5, of(3, 9), policy_version=4, replacements=of(7))
    assert request.num_generations == 2
    assert request.requests() == of(3, 9)
    assert request.replacement_requests() == of(7)


def test_groups_of_different_sizes_are_refused() -> None:
    keys = [RolloutKey(5, 0, 0), RolloutKey(5, 1, 0), RolloutKey(5, 1, 1)]
    with pytest.raises(ConfigError, match=r"batch 5 has groups of \[1, 2\] rollouts"):
        BatchRequest.of_rollouts(5, [RolloutRequest(key, "q") for key in keys])
