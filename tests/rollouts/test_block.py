"""The outcome of a block's rollouts is decided by what they are and became, never by when they ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from verifiers.envs.environment import Environment
from verifiers.errors import ConfigError
from verifiers.rollouts.block import BatchRequest, GroupPolicy
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Group, RolloutRequest, ScoredBlock
from verifiers.rubrics.rubric import Rubric
from verifiers.types import Outcome, RolloutKey, State

PROMPT = [{"role": "user", "content": "go"}]


class Scripted(Environment):
    """No server: `play(request info, attempt)` is the rollout, and gives its reward."""

    def __init__(self, play: Callable[[tuple[int, int, int], int], float]) -> None:
        self.rubric = Rubric([lambda completion: float(completion)])
        self.sampling_args: dict[str, Any] = {}
        self.begun: list[tuple[int, int, int]] = []
        self._play = play

    async def rollout(self, client: Any, model: str, prompt: Any, info: Any = None, **kwargs: Any) -> Any:
        key = tuple(info["key"])
        self.begun.append(key)
        return str(self._play(key, self.begun.count(key))), State()


def requests(block_id: int, examples: Sequence[int], size: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(RolloutKey(block_id, example, g), PROMPT, info={"key": [block_id, example, g]}, seed=7)
        for example in examples
        for g in range(size)
    ]


def has_zero_variance(group: Group) -> bool:
    rewards = {rollout.reward for rollout in group.scored}
    return len(group.scored) > 1 and len(rewards) == 1


def generator(env: Any, **options: Any) -> AsyncBatchGenerator:
    options = {"require_tokens": False, "generation_timeout_s": 10.0, **options}
    return AsyncBatchGenerator(env, "http://127.0.0.1:9/v1", "policy", **options)


@pytest.mark.parametrize(
    ("planned", "replacements", "message"),
    [
        ([], [], "batch 0 has no rollouts"),
        ([(0, 0), (0, 1), (1, 0)], [], r"groups of \[1, 2\] rollouts; give each prompt as many"),
        ([(0, 0), (0, 1)], [(1, 0)], r"groups of \[1, 2\] rollouts"),
        ([(0, 0), (1, 0), (0, 1)], [], "rollouts of example_id 0 do not stand together"),
        ([(0, 0), (0, 0)], [], "rollouts of example_id 0 do not stand together"),
    ],
)
def test_rollouts_that_make_no_block_are_refused(
    planned: list[tuple[int, int]], replacements: list[tuple[int, int]], message: str
) -> None:
    def rollouts(keys: list[tuple[int, int]]) -> list[RolloutRequest]:
        return [RolloutRequest(RolloutKey(0, example, generation), "a") for example, generation in keys]

    with pytest.raises(ConfigError, match=message):
        BatchRequest(0, rollouts(planned), replacements=rollouts(replacements))


# -- retries ----------------------------------------------------------------------------------------------------


def test_a_failed_rollout_is_run_again_and_its_attempts_are_counted() -> None:
    def play(key: Any, attempt: int) -> float:
        if key[2] == 1 and attempt < 3:
            raise LookupError("not yet")
        return float(key[2])

    env = Scripted(play)
    with generator(env, group_policy=GroupPolicy(retries=2)) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0, [4], 2)))
        first, second = blocks.get_batch(0).rollouts
    assert (first.attempts, second.attempts) == (1, 3)
    assert (second.outcome, second.reward) == (Outcome.COMPLETED, 1.0)
    assert env.begun.count((0, 4, 1)) == 3


# -- blocks in flight together --------------------------------------------------------------------------------------


def test_no_rollout_of_a_later_block_begins_before_those_of_an_earlier_one() -> None:
    env = Scripted(lambda key, _: float(key[2]))
    with generator(env, num_batches_ahead=2, max_concurrent=1) as blocks:
        for number in range(3):
            blocks.submit_batch(BatchRequest(number, requests(number, [1, 2, 3], 2)))
        for number in range(3):
            blocks.get_batch(number)
    assert [key[0] for key in env.begun] == [0] * 6 + [1] * 6 + [2] * 6


def test_drain_waits_until_nothing_runs_and_leaves_the_blocks_to_be_taken() -> None:
    env = Scripted(lambda key, _: float(key[2]))
    with generator(env, num_batches_ahead=2) as blocks:
        for number in range(3):
            blocks.submit_batch(BatchRequest(number, requests(number, [1], 2)))
        blocks.drain()
        assert [block.block_id for block in blocks.finished_blocks()] == [0, 1, 2]
        assert blocks.get_batch(1).block_id == 1
        assert [block.block_id for block in blocks.finished_blocks()] == [0, 2]


def test_a_restored_block_is_taken_as_if_it_had_just_been_generated() -> None:
    env = Scripted(lambda key, _: float(key[2]))
    with generator(env) as blocks:
        blocks.restore(ScoredBlock(5, [Group(1, [])]))
        assert len(blocks.groups(5, 9)) == 1
        assert blocks.get_batch(5).block_id == 5
        assert env.begun == []


# -- zero-variance groups -----------------------------------------------------------------------------------------


def test_groups_without_variance_are_replaced_in_their_order() -> None:
    env = Scripted(lambda key, _: 1.0 if key[1] in (0, 2, 20) else float(key[2]))
    policy = GroupPolicy(is_zero_variance=has_zero_variance)
    with generator(env, group_policy=policy, max_concurrent=3) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0, range(4), 2), replacements=requests(0, [20, 21, 22, 23], 2)))
        block = blocks.get_batch(0)
    assert [group.example_id for group in block.groups] == [1, 3, 21, 22]
    assert [group.example_id for group in block.filtered] == [0, 2, 20]
    assert 23 not in {key[1] for key in env.begun}
    assert blocks.launched == blocks.finished == len(env.begun) == 14


def test_a_block_of_zero_variance_groups_alone_is_what_was_planned() -> None:
    env = Scripted(lambda key, _: 1.0)
    with generator(env, group_policy=GroupPolicy(is_zero_variance=has_zero_variance)) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0, range(2), 2), replacements=requests(0, [20], 2)))
        block = blocks.get_batch(0)
    assert [group.example_id for group in block.groups] == [0, 1]
    assert [group.example_id for group in block.filtered] == [20]
