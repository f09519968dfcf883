"""The outcome of a block's rollouts is decided by what they are and became, never by when they ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verifiers.envs.environment import Environment
from verifiers.errors import ConfigError, NothingScoredError
from verifiers.rollouts.block import BatchRequest, GroupPolicy
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.rollout import Group, RolloutRequest, ScoredBlock
from verifiers.rubrics.rubric import Rubric
from verifiers.types import Outcome, RolloutKey, State

PROMPT = [{"role": "user", "content": "go"}]


class Scripted(Environment):
    """No server: `play(request info, attempt)` is the rollout, and gives its reward."""

    def __init__(self, play: Callable[[tuple[int, int, int], int], Any]) -> None:
        self.rubric = Rubric([lambda completion: float(completion)])
        self.sampling_args: dict[str, Any] = {}
        self.begun: list[tuple[int, int, int]] = []
        self._play = play

    async def rollout(self, client: Any, model: str, prompt: Any, info: Any = None, **kwargs: Any) -> Any:
        key = tuple(info["key"])
        self.begun.append(key)
        reward = self._play(key, self.begun.count(key))
        if asyncio.iscoroutine(reward):
            reward = await reward
        return str(reward), State()


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


def keys(groups: Sequence[Group]) -> list[tuple[int, int]]:
    return [(rollout.key.example_id, rollout.key.generation) for group in groups for rollout in group.rollouts]


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


def test_a_block_of_zero_variance_groups_alone_is_what_was_planned() -> None:
    env = Scripted(lambda key, _: 1.0)
    with generator(env, group_policy=GroupPolicy(is_zero_variance=has_zero_variance)) as blocks:
        blocks.submit_batch(BatchRequest(0, requests(0, range(2), 2), replacements=requests(0, [20], 2)))
        block = blocks.get_batch(0)
    assert [group.example_id for group in block.groups] == [0, 1]
    assert [group.example_id for group in block.filtered] == [20]


# -- conservation and order, over arrival orders ------------------------------------------------------------------


def generated(
    arrival: int, sizes: dict[str, int], fates: int, policy: GroupPolicy, max_concurrent: int
) -> list[tuple[ScoredBlock, list[list[tuple[int, int]]]]]:
    """Every block, with what `groups` gave while it was generated; rollouts end in an order drawn by `arrival`."""
    latency = random.Random(arrival)

    async def after(turns: int, reward: float) -> float:
        for _ in range(turns):
            await asyncio.sleep(0)
        return reward

    def play(key: tuple[int, int, int], attempt: int) -> Any:
        fate = random.Random(f"{fates}:{key}:{attempt}")
        if fate.random() < 0.15:
            raise LookupError("failed")
        group = random.Random(f"{fates}:{key[:2]}")
        reward = 1.0 if group.random() < 0.4 else fate.random()
        return after(latency.randrange(30), reward)

    prompts, size, count = sizes["prompts"], sizes["size"], sizes["blocks"]
    found = []
    options = {"num_batches_ahead": sizes["ahead"], "max_concurrent": max_concurrent, "group_policy": policy}
    with generator(Scripted(play), **options) as blocks:

        def submit(number: int) -> None:
            others = requests(number, range(100, 100 + sizes["replacements"]), size)
            blocks.submit_batch(BatchRequest(number, requests(number, range(prompts), size), replacements=others))

        for number in range(min(count, sizes["ahead"] + 1)):
            submit(number)
        for number in range(count):
            seen = [keys(blocks.groups(number, stop)) for stop in range(1, prompts + 1)]
            found.append((blocks.get_batch(number), seen))
            if number + sizes["ahead"] + 1 < count:
                submit(number + sizes["ahead"] + 1)
        # what was launched beyond the plan replaces groups without variance
        assert blocks.finished >= count * prompts * size
        assert blocks.launched == sum(len(block.launched) for block, _ in found)
    return found


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.fixed_dictionaries(
        {
            "prompts": st.integers(1, 5),
            "size": st.integers(2, 4),
            "blocks": st.integers(1, 4),
            "ahead": st.integers(0, 3),
            "replacements": st.integers(0, 6),
        }
    ),
    fates=st.integers(0, 10**6),
    retries=st.integers(0, 2),
    replace=st.booleans(),
    limits=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    arrivals=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)
def test_every_rollout_ends_once_and_the_order_of_arrival_decides_nothing(
    sizes: dict[str, int], fates: int, retries: int, replace: bool, limits: Any, arrivals: Any
) -> None:
    policy = GroupPolicy(retries=retries, is_zero_variance=has_zero_variance if replace else None)
    runs = []
    for arrival, limit in zip(arrivals, limits, strict=True):
        try:
            runs.append(generated(arrival, sizes, fates, policy, limit))
        except NothingScoredError:
            # a block in which every rollout failed ends the run, in either order
            runs.append([])
    one, other = runs
    for (first, seen), (second, seen_again) in zip(one, other, strict=True):
        assert keys(first.groups) == keys(second.groups)
        assert keys(first.filtered) == keys(second.filtered)
        assert [r.reward for r in first.launched] == [r.reward for r in second.launched]
        assert seen == seen_again
        check_block(first, seen, sizes, replace)


def check_block(block: ScoredBlock, seen: list[Any], sizes: dict[str, int], replace: bool) -> None:
    ended = keys([*block.groups, *block.filtered])
    planned = [(example, g) for example in range(sizes["prompts"]) for g in range(sizes["size"])]
    assert len(set(ended)) == len(ended)
    assert set(planned) <= set(ended)
    assert sum(block.outcomes().values()) == len(ended)
    assert [example for example, _ in keys(block.groups)] == sorted(example for example, _ in keys(block.groups))
    # what was handed out early is what the block begins with
    for stop, groups in enumerate(seen, start=1):
        assert groups == keys(block.groups[:stop])
    if not replace:
        assert keys(block.groups) == planned
    elif not all(has_zero_variance(group) for group in block.groups):
        assert not any(has_zero_variance(group) for group in block.groups)
        assert all(has_zero_variance(group) for group in block.filtered)
        spent = len(block.groups) + len(block.filtered) == sizes["prompts"] + sizes["replacements"]
        assert len(block.groups) == sizes["prompts"] or spent
