from __future__ import annotations

from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock, TokenSequence
from verifiers.train.batching.advantages import group_advantages, has_zero_variance, rollout_advantages
from verifiers.types import Outcome, RolloutKey

REWARDS = [[0.9, 0.8, 0.7], [0.6, 0.9, 0.5]]
FAILED = Outcome.PROVIDER_ERROR
TRUNCATED = Outcome.TRUNCATED


def row(sampled: int = 2) -> TokenSequence:
    return TokenSequence([1, 2], [3] * sampled, [1] * sampled, [-0.5] * sampled, [0] * sampled)


def rollout(generation: int, reward: float | None, example_id: int = 0, **extra: Any) -> Rollout:
    outcome = extra.pop("outcome", Outcome.COMPLETED)
    rows = extra.pop("rows", [row()])
    key = RolloutKey(0, example_id, generation)
    return Rollout(key, outcome, prompt="p", completion="c", reward=reward, rows=rows, **extra)


def block(*groups: list[Rollout]) -> ScoredBlock:
    return ScoredBlock(0, [Group(group[0].key.example_id, group) for group in groups])


@pytest.mark.parametrize(
    ("scale_rewards", "expected"),
    [
        ("none", [[0.1, 0, -0.1], [-0.0666667, 0.2333333, -0.1666667]]),
        ("group", [[0.9990010, 0, -0.9990010], [-0.3201025, 1.1203589, -0.8002563]]),
        ("batch", [[0.6119977, 0, -0.6119977], [-0.4079984, 1.4279946, -1.0199961]]),
    ],
)
def test_each_scaling_gives_the_worked_numbers(scale_rewards: Any, expected: list[list[float]]) -> None:
    result = group_advantages(REWARDS, scale_rewards)
    for values, wanted in zip(result.advantages, expected, strict=True):
        assert values == pytest.approx(wanted, abs=1e-6)


TOKENS = [[2, 2, 2], [2, 2, 8]]


@pytest.mark.parametrize(
    ("estimator", "tokens", "expected"),
    [
        ("rloo", TOKENS, [[0.15, 0, -0.15], [-0.1, 0.35, -0.25]]),
        # mean 0.7333333 and deviation 0.1490712 of the six rewards
        (
            "reinforce_plus_plus",
            None,
            [[1.1172845, 0.4469138, -0.2234569], [-0.8938276, 1.1172845, -1.5641983]],
        ),
        # mean 0.6555556 and deviation 0.1640536 over 18 tokens, of which the last completion has 8
        (
            "reinforce_plus_plus",
            TOKENS,
            [[1.4891203, 0.8799347, 0.2707491], [-0.3384364, 1.4891203, -0.9476220]],
        ),
        ("reinforce_plus_plus_baseline", None, [[0.7494379, 0, -0.7494379], [-0.4996253, 1.7486885, -1.2490632]]),
        (
            "reinforce_plus_plus_baseline",
            TOKENS,
            [[1.1577859, 0.4134950, -0.3307960], [-0.0826990, 2.1501738, -0.8269900]],
        ),
    ],
    ids=str,
)
def test_each_estimator_gives_the_worked_numbers(estimator: str, tokens: Any, expected: list[list[float]]) -> None:
    result = group_advantages(REWARDS, estimator=estimator, tokens=tokens)
    for values, wanted in zip(result.advantages, expected, strict=True):
        assert values == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_equal_rewards_and_failures_have_no_gradient_under_any_estimator(estimator: str) -> None:
    assert group_advantages([[0.1 + 0.2, 0.3, None]], estimator=estimator).advantages == [[0.0, 0.0, None]]
    assert group_advantages([[None, None]], estimator=estimator).advantages == [[None, None]]


def test_equal_rewards_share_a_small_advantage_under_the_baseline_of_reinforce_where_lengths_differ() -> None:
    tokens = [[2, 2, 2], [2, 2, 8]]
    found = group_advantages([[1.0] * 3, [0.0, 0.0, 1.0]], estimator="reinforce_plus_plus_baseline", tokens=tokens)
    # differences -1/3, -1/3, 2/3: over 18 tokens m = (-4/3 + 16/3) / 18 = 2/9
    variance = (6 * (2 / 9) ** 2 + 4 * (5 / 9) ** 2 + 8 * (4 / 9) ** 2) / 18
    assert found.advantages[0] == pytest.approx([-2 / 9 / (variance**0.5 + 1e-4)] * 3)


def test_a_lone_survivor_is_compared_with_the_whole_block_where_the_estimator_has_no_groups() -> None:
    groups = [rollout(0, 1.0), rollout(1, None, outcome=FAILED)], [rollout(0, 0.0, 1), rollout(1, 0.5, 1)]
    whole = rollout_advantages(block(*groups), estimator="reinforce_plus_plus")
    assert whole[groups[0][0].key] == pytest.approx(1.2244, abs=1e-3)
    by_group = rollout_advantages(block(*groups), estimator="reinforce_plus_plus_baseline")
    assert by_group.left_out[groups[0][0].key] == "no_baseline"


def test_penalties_are_subtracted_before_the_statistics_and_refuse_advantages_of_the_environment() -> None:
    first, second, third = (rollout(generation, reward) for generation, reward in enumerate([1.0, 0.0, 0.0]))
    found = rollout_advantages(block([first, second, third]), penalties={first.key: 0.25, third.key: -0.5})
    assert list(found.values()) == pytest.approx(group_advantages([[0.75, 0.0, 0.5]]).advantages[0])
    with pytest.raises(ConfigError, match="advantage of its own, which kl_in_reward does not reach"):
        rollout_advantages(block([rollout(0, 1.0, advantage=0.5), second]), penalties={})


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale_rewards: Any) -> None:
    for reward in (0.7, 0.699999988079071, 1 / 3, 1e-9, -2.1):
        result = group_advantages([[reward] * 7, [0.0, 1.0]], scale_rewards)
        assert result.advantages[0] == [0.0] * 7, reward
        assert result.group_stds[0] == 0.0, reward


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_a_failed_rollout_is_in_no_statistic(scale_rewards: Any) -> None:
    result = group_advantages([[1, 0, None, 1]], scale_rewards)
    without = group_advantages([[1, 0, 1]], scale_rewards)
    assert result.advantages[0] == [*without.advantages[0][:2], None, without.advantages[0][2]]
    assert result.group_stds == without.group_stds


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_is_refused(reward: float) -> None:
    with pytest.raises(ConfigError, match="not finite"):
        group_advantages([[1.0, reward]])


def test_a_block_leaves_failures_and_lone_survivors_out_with_their_reason() -> None:
    failed = rollout(1, None, outcome=FAILED)
    survivor, dead = rollout(0, 1.0, example_id=1), rollout(1, None, example_id=1, outcome=Outcome.TIMED_OUT)
    result = rollout_advantages(block([rollout(0, 1.0), failed, rollout(2, 0.0), rollout(3, 1.0)], [survivor, dead]))
    assert [key.generation for key in result] == [0, 2, 3]
    assert list(result.values()) == pytest.approx(group_advantages([[1, 0, 1]]).advantages[0])
    assert result.left_out == {
        failed.key: "provider_error",
        survivor.key: "no_baseline",
        dead.key: "timed_out",
    }


def test_a_block_with_require_full_groups_trains_on_full_groups_alone() -> None:
    result = rollout_advantages(
        block(
            [rollout(0, 1.0), rollout(1, 0.0), rollout(2, None, outcome=FAILED)],
            [rollout(generation, generation % 2, example_id=1) for generation in range(3)],
        ),
        require_full_groups=True,
    )
    assert {key.example_id for key in result} == {1}
    assert sorted(result.left_out.values()) == ["group_incomplete", "group_incomplete", "provider_error"]


def test_truncated_rollouts_are_masked_or_count_as_reward_zero() -> None:
    scored = block([rollout(0, 1.0), rollout(1, 0.8, outcome=TRUNCATED), rollout(2, 0.0)])
    masked = rollout_advantages(scored, mask_truncated_completions=True)
    # a masked one keeps its place in the statistics
    expected = group_advantages([[1, 0.8, 0]]).advantages[0]
    assert list(masked.values()) == pytest.approx([expected[0], expected[2]])
    assert list(masked.left_out.values()) == ["masked_truncated"]
    zeroed = rollout_advantages(scored, zero_truncated_completions=True)
    assert list(zeroed.values()) == pytest.approx(group_advantages([[1, 0, 0]]).advantages[0])


def test_an_environments_advantage_replaces_the_groups() -> None:
    scored = block(
        [
            rollout(0, 1.0, advantage=0.25),
            rollout(1, 0.0, advantage=[1, 2, 3], rows=[row(1), row(2)]),
            rollout(2, 0.5),
        ]
    )
    result = rollout_advantages(scored)
    assert list(result.values()) == [0.25, [1.0, 2.0, 3.0], 0.0]
    # it needs no baseline
    result = rollout_advantages(block([rollout(0, 1.0, advantage=-0.5), rollout(1, None, outcome=FAILED)]))
    assert list(result.values()) == [-0.5]


def test_an_environments_advantages_must_match_the_sampled_tokens() -> None:
    with pytest.raises(ConfigError, match="2 advantages for 3 sampled tokens"):
        rollout_advantages(block([rollout(0, 1.0, advantage=[1, 2], rows=[row(1), row(2)]), rollout(1, 0.0)]))


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_a_reward_that_is_the_groups_mean_has_an_advantage_of_exactly_zero(scale_rewards: Any) -> None:
    # 0.1 + 0.2 + 0.3 is not 0.6 in binary, so that the mean is off by a rounding
    advantages = group_advantages([[0.1, 0.2, 0.3], [0.0, 0.7, 1.4]], scale_rewards).advantages
    assert [group[1] for group in advantages] == [0.0, 0.0]
    assert all(group[0] < -0.01 and group[2] > 0.01 for group in advantages)


# -- credit by turn ----------------------------------------------------------------------------------------------

TURNS = {"r": [[1.0, 0, 1], [0.0, 0, 1], [1.0, 0], [0.0, 1, 0]], "own": [1.0, 0.0, 1.0, 0.0]}


def by_turn(generation: int, rewards: list[float], reward: float, **extra: Any) -> Rollout:
    rows = [TokenSequence([1], [3] * 4, [1, 1, 0, 1], [-0.5] * 4, [0] * 4, turn_lengths={0: 2, 1: 1})]
    if len(rewards) == 3:
        # the third turn forked
        rows.append(TokenSequence([2], [3], [1], [-0.5], [0], turn_lengths={2: 1}))
    return rollout(generation, reward, rows=rows, turns=len(rewards), turn_rewards=rewards, **extra)


def four(**changes: Any) -> ScoredBlock:
    given = zip(TURNS["r"], TURNS["own"], strict=True)
    return block([by_turn(number, rewards, own, **changes) for number, (rewards, own) in enumerate(given)])


def test_turns_get_the_advantages_of_their_returns_beside_the_rollouts_own() -> None:
    found = rollout_advantages(four(), scale_rewards="none", turn_discount=0.5)
    # returns of turn 0: 1.25, 0.25, 1, 0.5; of turn 1: 0.5, 0.5, 0, 1; of turn 2: 1, 1, none, 0
    expected = [
        [1.0, 1.0, 0.5, 0.5 + 1 / 3],
        [-1.0, -1.0, -0.5, -0.5 + 1 / 3],
        [0.75, 0.75, 0.0],
        [-0.75, -0.75, 0.0, -0.5 - 2 / 3],
    ]
    assert [*found.values()] == [pytest.approx(values) for values in expected]
    assert {*rollout_advantages(four(), scale_rewards="none").values()} == {0.5, -0.5}


def test_advantages_that_steps_were_given_are_taken_as_they_are() -> None:
    given = [by_turn(0, [1.0, 0.0, 1.0], 1.0, turn_advantages=[None, 9.0, None]), by_turn(1, [0.0, 0.0, 0.0], 0.0)]
    found = rollout_advantages(block(given), scale_rewards="none", turn_discount=0.0)
    assert found[given[0].key] == pytest.approx([1.0, 1.0, 9.0, 1.0])
    assert found[given[1].key] == pytest.approx([-1.0, -1.0, -0.5, -1.0])
    # also where no credit by turn is asked for
    found = rollout_advantages(block(given), scale_rewards="none")
    assert found == {given[0].key: pytest.approx([0.5, 0.5, 9.0, 0.5]), given[1].key: -0.5}


@pytest.mark.parametrize("given", ["high", [None, 1.0, 2.0], {"a": 1}])
def test_an_advantage_that_is_no_number_is_named(given: Any) -> None:
    with pytest.raises(ConfigError, match="as an advantage; give a number"):
        rollout_advantages(block([rollout(0, 1.0, advantage=given), rollout(1, 0.0)]))
    with pytest.raises(ConfigError, match="as an advantage; give a number"):
        rollout_advantages(
            block([by_turn(0, [0.0, 0.0], 1.0, turn_advantages=[given, None]), by_turn(1, [0.0], 0.0)])
        )


def test_advantages_of_single_turns_need_no_baseline_and_refuse_penalties() -> None:
    lone = [by_turn(0, [0.0, 0.0], 1.0, turn_advantages=[2.0, -1.0]), by_turn(1, [0.0, 0.0], None, outcome=FAILED)]
    assert rollout_advantages(block(lone)) == {lone[0].key: [2.0, 2.0, -1.0]}
    with pytest.raises(ConfigError, match="which kl_in_reward does not reach"):
        rollout_advantages(block(lone), penalties={})
    (group,) = block([by_turn(number, [0.0], 1.0, turn_advantages=[1.0]) for number in range(2)]).groups
    assert not has_zero_variance(group)


def test_a_turn_counts_by_its_tokens_where_all_tokens_are_whitened_together() -> None:
    pair = [by_turn(0, [1.0, 0.0], 1.0), by_turn(1, [0.0, 0.0], 1.0)]
    pair[0].rows[0] = TokenSequence([1], [3] * 4, [1] * 4, [-0.5] * 4, [0] * 4, turn_lengths={0: 3, 1: 1})
    pair[1].rows[0] = TokenSequence([1], [3] * 2, [1] * 2, [-0.5] * 2, [0] * 2, turn_lengths={0: 1, 1: 1})
    found = rollout_advantages(block(pair), estimator="reinforce_plus_plus", turn_discount=0.0)
    # three tokens of 1 and one of 0: mean 3/4, deviation sqrt(3)/4
    assert found[pair[0].key][0] == pytest.approx(1 / 3**0.5, rel=1e-3)
    assert found[pair[1].key][0] == pytest.approx(-(3**0.5), rel=1e-3)


def test_the_batchs_deviation_is_that_of_the_same_turn() -> None:
    pair = [by_turn(0, [1.0, 50.0], 1.0), by_turn(1, [0.0, -50.0], 1.0)]
    found = rollout_advantages(block(pair), scale_rewards="batch", turn_discount=0.0)
    assert found[pair[0].key] == pytest.approx([0.5**0.5, 0.5**0.5, 0.5**0.5], rel=1e-3)


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_turn_is_whitened_among_the_same_turns_alone(estimator: str) -> None:
    """The first turn always earns 1, the second never: neither has a gradient."""
    equal = [by_turn(number, [1.0, 0.0], 1.0) for number in range(2)]
    found = rollout_advantages(block(equal), estimator=estimator, turn_discount=0.0)
    assert [*found.values()] == [[0.0] * 3] * 2
    # turn 0 earns 1 and 0; each has two tokens: the mean is 0.5, and so is the deviation
    differing = [by_turn(0, [1.0, 0.0], 1.0), by_turn(1, [0.0, 0.0], 1.0)]
    found = rollout_advantages(block(differing), estimator=estimator, turn_discount=0.0)
    assert found[differing[0].key] == pytest.approx([1.0, 1.0, 0.0], abs=1e-3)
    assert found[differing[1].key] == pytest.approx([-1.0, -1.0, 0.0], abs=1e-3)


def test_a_turn_that_no_other_rollout_reached_adds_nothing() -> None:
    lone = [by_turn(0, [0.0, 0.0, 5.0], 1.0), by_turn(1, [0.0, 0.0], 1.0)]
    assert rollout_advantages(block(lone), turn_discount=0.0)[lone[0].key] == [0.0] * 4


def test_failures_take_no_part_in_the_returns_and_truncated_ones_count_as_zero() -> None:
    group = [by_turn(0, [1.0, 0.0], 0.0), by_turn(1, [0.0, 0.0], 0.0), by_turn(2, [50.0, 50.0], None, outcome=FAILED)]
    found = rollout_advantages(block(group), scale_rewards="none", turn_discount=0.0)
    assert found[group[0].key] == pytest.approx([0.5, 0.5, 0.0])
    group[0].outcome = TRUNCATED
    options: Any = {"scale_rewards": "none", "turn_discount": 0.0}
    assert rollout_advantages(block(group), zero_truncated_completions=True, **options)[group[0].key] == [0.0] * 3


def test_another_number_of_turn_rewards_than_of_turns_is_refused() -> None:
    one = by_turn(0, [1.0, 0.0], 0.0)
    one.turns = 3
    with pytest.raises(
        ConfigError,
        match=r"2 turns, and the policy had 3; give one for each answer that is trained",
    ):
        rollout_advantages(block([one, by_turn(1, [0.0, 0.0], 0.0)]), turn_discount=1.0)


def test_a_group_of_equal_rewards_whose_turns_differ_has_a_gradient_by_turn_alone() -> None:
    (group,) = block([by_turn(0, [1.0, 0.0], 1.0), by_turn(1, [0.0, 1.0], 1.0)]).groups
    assert has_zero_variance(group)
    assert not has_zero_variance(group, by_turn=True)
    (equal,) = block([by_turn(0, [1.0, 0.0], 1.0), by_turn(1, [1.0, 0.0], 1.0)]).groups
    assert has_zero_variance(equal, by_turn=True)
