"""Blocks from columns, and the order in which a training loop gets its items."""

from __future__ import annotations

from typing import Any

import pytest

from verifiers.errors import ConfigError, GenerationError
from verifiers.rollouts.batches import BatchRequest, EndOfBlock, EndOfData, MicroBatch, training_items
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock
from verifiers.types import Outcome, RolloutKey


class ScriptedGenerator:
    """Gives blocks of finished rollouts, and keeps a diary of what it was asked."""

    def __init__(self, num_batches_ahead: int, fail_after_checks: int | None = None) -> None:
        self.num_batches_ahead = num_batches_ahead
        self.diary: list[tuple[str, int]] = []
        self.requests: dict[int, BatchRequest] = {}
        self._checks_left = fail_after_checks

    def submit_batch(self, request: BatchRequest) -> None:
        self.diary.append(("submit", request.batch_id))
        self.requests[request.batch_id] = request

    def get(self, block_id: int, timeout_s: float | None = None) -> ScoredBlock:
        self.diary.append(("get", block_id))
        keys = [request.key for request in self.requests[block_id].requests()]
        rollouts = [Rollout(key, Outcome.COMPLETED, "p", "c", reward=1.0) for key in keys]
        return ScoredBlock(block_id, [Group(rollout.key.example_id, [rollout]) for rollout in rollouts])

    def check(self) -> None:
        if self._checks_left is not None:
            self._checks_left -= 1
            if self._checks_left < 0:
                raise GenerationError("the server is gone")


def block(batch_id: int, prompts: int = 3) -> BatchRequest:
    return BatchRequest(batch_id, {"prompt": [f"q{row}" for row in range(prompts)]})


def test_passes_over_a_block_repeat_its_micro_batches_before_the_next_block_comes() -> None:
    # EXAMPLES 7: 8 micro-batches of data, K=3, mu=2; 6 and 7 make no full block
    generator = ScriptedGenerator(num_batches_ahead=0)
    items = list(training_items(generator, [block(0), block(1)], micro_batches=3, iterations=2))
    trained = [item.block.block_id * 3 + item.index for item in items if isinstance(item, MicroBatch)]
    assert trained == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
    passes = [item.iteration for item in items if isinstance(item, MicroBatch)]
    assert passes == [0, 0, 0, 1, 1, 1] * 2
    assert [item.block_id for item in items if isinstance(item, EndOfBlock)] == [0, 1]
    assert sum(isinstance(item, EndOfData) for item in items) == 1
    assert isinstance(items[6], EndOfBlock)
    assert isinstance(items[-1], EndOfData)


def test_micro_batches_hold_every_rollout_once_in_the_plans_order() -> None:
    generator = ScriptedGenerator(num_batches_ahead=0)
    items = list(training_items(generator, [block(0, prompts=6)], micro_batches=3))
    examples = [rollout.key.example_id for item in items if isinstance(item, MicroBatch) for rollout in item.rollouts]
    assert examples == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
def test_no_block_is_submitted_more_than_the_allowed_number_beyond_the_one_being_trained(ahead: int) -> None:
    generator = ScriptedGenerator(ahead)
    diary = generator.diary
    for item in training_items(generator, [block(number) for number in range(4)], micro_batches=1):
        if isinstance(item, (MicroBatch, EndOfBlock)):
            trained = item.block.block_id if isinstance(item, MicroBatch) else item.block_id
            submitted = [number for what, number in diary if what == "submit"]
            assert max(submitted) == min(trained + ahead, 3)
    assert [number for what, number in diary if what == "submit"] == [0, 1, 2, 3]
    assert [number for what, number in diary if what == "get"] == [0, 1, 2, 3]


def test_weights_may_be_pushed_just_before_each_submission() -> None:
    generator = ScriptedGenerator(num_batches_ahead=1)
    pushed: list[int] = []

    def push(request: BatchRequest) -> None:
        assert ("submit", request.batch_id) not in generator.diary
        pushed.append(request.batch_id)
        generator.diary.append(("push", request.batch_id))

    for _ in training_items(generator, [block(0), block(1), block(2)], micro_batches=1, before_submit=push):
        pass
    assert pushed == [0, 1, 2]
    expected = ["push 0", "submit 0", "push 1", "submit 1", "get 0", "push 2", "submit 2", "get 1", "get 2"]
    assert [f"{what} {number}" for what, number in generator.diary] == expected


def test_no_blocks_at_all_is_the_end_of_data() -> None:
    assert list(training_items(ScriptedGenerator(1), [], micro_batches=1)) == [EndOfData()]


def test_a_failure_is_raised_between_two_micro_batches_and_not_at_the_end_of_the_block() -> None:
    items = training_items(ScriptedGenerator(0, fail_after_checks=1), [block(0)], micro_batches=3)
    assert isinstance(next(items), MicroBatch)
    with pytest.raises(GenerationError, match="the server is gone"):
        next(items)


def test_micro_batches_that_do_not_divide_a_block_are_refused_with_both_numbers() -> None:
    items = training_items(ScriptedGenerator(0), [block(4)], micro_batches=2)
    with pytest.raises(ConfigError, match="block 4 has 3 rollouts, which 2 micro-batches do not divide"):
        next(items)


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
