"""Roles: what one policy says as one of them is trained by that role's reward, in rows of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import ConfigError, NothingScoredError
from verifiers.rollouts.block import BatchRequest
from verifiers.rollouts.generator import AsyncBatchGenerator
from verifiers.rollouts.recording_client import rows_from_turns
from verifiers.rollouts.rollout import Group, Rollout, RolloutRequest, ScoredBlock, TokenSequence, Turn
from verifiers.testing import FakeOpenAIServer
from verifiers.train.batching.advantages import has_zero_variance, rollout_advantages
from verifiers.types import Outcome, RolloutKey

PROMPT = [{"role": "user", "content": "x"}]


class Pair(vf.MultiTurnEnv):
    """A proposer and a solver of one policy, and a judge that is not trained."""

    async def rollout(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        proposer, solver = client.role("proposer"), client.role("solver")
        first = await proposer.chat.completions.create(model=model, messages=prompt)
        said = [{"role": "user", "content": first.choices[0].message.content}]
        state = kwargs.get("state")
        for handle in (solver, client.untrained, proposer):
            answer = await handle.chat.completions.create(model=model, messages=said)
        completion = [{"role": "assistant", "content": answer.choices[0].message.content}]
        return completion, {**(state or {}), "completion": completion}


@vf.role_reward
def by_role(completion: Any) -> dict[str, float]:
    return {"proposer": 2.0, "solver": 4.0}


def env_with(*funcs: Any, weights: Any = None) -> vf.Environment:
    return Pair(dataset=[{"prompt": PROMPT, "answer": ""}], rubric=vf.Rubric(list(funcs), weights=weights))


def played(env: Any) -> Rollout:
    with FakeOpenAIServer("abc") as server, AsyncBatchGenerator(env, server.url, "fake") as blocks:
        blocks.submit_batch(BatchRequest(0, [RolloutRequest(RolloutKey(0, 0, 0), PROMPT)]))
        (rollout,) = blocks.get_batch(0, 20.0).rollouts
    return rollout


def test_a_role_stays_one_under_other_options() -> None:
    class Patient(Pair):
        async def rollout(self, client: Any, *args: Any, **kwargs: Any) -> Any:
            role = client.role
            client.role = lambda name: role(name).with_options(timeout=30)
            return await super().rollout(client, *args, **kwargs)

    assert [row.role for row in played(Patient(dataset=env_with().dataset, rubric=vf.Rubric([by_role]))).rows] == [
        "proposer",
        "solver",
        "proposer",
    ]


def test_each_role_has_rows_and_a_reward_of_its_own() -> None:
    rollout = played(env_with(by_role, lambda completion: 1.0, weights=[0.5, 1.0]))
    assert [row.role for row in rollout.rows] == ["proposer", "solver", "proposer"]
    assert rollout.role_rewards == {"proposer": 1.0, "solver": 2.0}
    # the mean over roles
    assert rollout.reward == 1.0 + 1.5
    assert rollout.metrics == {"by_role/proposer": 2.0, "by_role/solver": 4.0, "<lambda>": 1.0}
    # the judge's answer is no turn, and a role's second conversation is a fork of it
    assert (rollout.turns, rollout.forks) == (3, 1)


def test_rows_of_two_roles_never_join() -> None:
    def turn(role: str | None, prompt: list[int], sampled: list[int]) -> Turn:
        return Turn(prompt, sampled, [-0.1] * len(sampled), [0] * len(sampled), role=role)

    turns = [turn("a", [1], [2]), turn("b", [1, 2], [3]), turn("a", [1, 2, 9], [4]), turn(None, [1, 2, 3], [5])]
    rows, forks = rows_from_turns(turns)
    assert [(row.role, row.completion_ids) for row in rows] == [("a", [2, 9, 4]), ("b", [3]), (None, [5])]
    assert forks == 0


@pytest.mark.parametrize("given", [3.0, [1.0], {"proposer": "high"}, {"solver": float("nan")}])
def test_a_role_reward_that_is_no_mapping_of_numbers_is_a_failed_grade(given: Any) -> None:
    with pytest.raises(NothingScoredError, match=r"1 grading_error\); .* <lambda>: .*returned"):
        played(env_with(vf.role_reward(lambda: given)))


def rollout_of(number: int, rewards: dict[str, float], reward: float = 0.0) -> Rollout:
    rows = [TokenSequence([1], [2, 3], [1, 1], [-0.1] * 2, [0, 0], role=role) for role in ("proposer", "solver")]
    rows.append(TokenSequence([1], [4], [1], [-0.1], [0]))
    for turn, row in enumerate(rows):
        row.turn_lengths = {turn: len(row.completion_ids)}
    key = RolloutKey(0, 0, number)
    return Rollout(key, Outcome.COMPLETED, "p", "c", reward=reward, rows=rows, turns=3, role_rewards=rewards)


def block_of(*rollouts: Rollout) -> ScoredBlock:
    return ScoredBlock(0, [Group(0, list(rollouts))])


def test_a_roles_tokens_get_its_advantage_and_other_tokens_the_rollouts() -> None:
    pairs = [({"proposer": 1.0, "solver": 0.0}, 3.0), ({"proposer": 0.0, "solver": 0.5}, 1.0)]
    rollouts = [rollout_of(number, rewards, reward) for number, (rewards, reward) in enumerate(pairs)]
    found = rollout_advantages(block_of(*rollouts), scale_rewards="none")
    assert list(found.values()) == [[0.5, 0.5, -0.25, -0.25, 1.0], [-0.5, -0.5, 0.25, 0.25, -1.0]]
    # credit by turn comes on top
    for rollout in rollouts:
        rollout.turn_rewards = [float(rollout.key.generation), 0.0, 0.0]
    found = rollout_advantages(block_of(*rollouts), scale_rewards="none", turn_discount=0.0)
    assert list(found.values()) == [[0.0, 0.0, -0.25, -0.25, 1.0], [0.0, 0.0, 0.25, 0.25, -1.0]]
    # a list that the environment gave is taken as it is
    rollouts[0].advantage = [9.0] * 5
    assert rollout_advantages(block_of(*rollouts))[rollouts[0].key] == [9.0] * 5


def test_a_role_is_whitened_among_the_same_role_alone() -> None:
    """Every proposer earns 1 and no solver anything: neither has a gradient."""
    rollouts = [rollout_of(number, {"proposer": 1.0, "solver": 0.0}) for number in range(2)]
    found = rollout_advantages(block_of(*rollouts), estimator="reinforce_plus_plus")
    assert list(found.values()) == [[0.0] * 5] * 2


def test_a_role_without_a_reward_is_refused_and_one_without_turns_is_part_of_the_baseline() -> None:
    full = rollout_of(0, {"proposer": 1.0, "solver": 1.0})
    with pytest.raises(ConfigError, match=r"has turns of the role 'solver' and no reward for it.*vf.role_reward"):
        rollout_advantages(block_of(full, rollout_of(1, {"proposer": 0.0})))
    own = dataclasses.replace(rollout_of(1, {}), advantage=0.5)
    assert rollout_advantages(block_of(full, own))[own.key] == 0.5
    with pytest.raises(ConfigError, match="which kl_in_reward does not reach"):
        rollout_advantages(block_of(full, full), penalties={})
    silent = dataclasses.replace(rollout_of(1, {"proposer": 0.0, "solver": 0.0}), rows=full.rows[:1])
    found = rollout_advantages(block_of(full, silent), scale_rewards="none")
    assert list(found.values()) == [[0.5, 0.5, 0.5, 0.5, 0.0], [-0.5, -0.5]]


def test_a_group_whose_roles_differ_has_a_gradient() -> None:
    same = [rollout_of(number, {"proposer": 1.0, "solver": 0.0}) for number in range(2)]
    assert has_zero_variance(Group(0, same))
    assert not has_zero_variance(Group(0, [same[0], rollout_of(1, {"proposer": 0.0, "solver": 1.0})]))


@pytest.mark.parametrize("by_turn", [False, True])
def test_a_group_of_which_one_was_cut_off_and_zeroed_has_a_gradient_though_all_got_the_same(by_turn: bool) -> None:
    """Turn rewards, and the roles of a game of zero sum, leave the rollouts' own rewards at 0."""
    same = [rollout_of(number, {} if by_turn else {"proposer": 1.0, "solver": -1.0}) for number in range(2)]
    for rollout in same:
        rollout.turn_rewards = [1.0, 0.0, 0.0] if by_turn else None
    assert has_zero_variance(Group(0, same), zero_truncated_completions=True, by_turn=by_turn)
    same[1].outcome = Outcome.TRUNCATED
    assert not has_zero_variance(Group(0, same), zero_truncated_completions=True, by_turn=by_turn)
    plain = [dataclasses.replace(one, role_rewards=None, turn_rewards=None) for one in same]
    assert has_zero_variance(Group(0, plain), zero_truncated_completions=True, by_turn=by_turn)
    same[0].role_rewards, same[0].turn_rewards = {"proposer": 0.0, "solver": 0.0}, [0.0, 0.0, 0.0]
    assert has_zero_variance(Group(0, same), zero_truncated_completions=True, by_turn=by_turn)
