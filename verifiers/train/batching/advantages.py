"""Rewards to advantages: per group, per rollout, before anything is split into rows or shuffled.

A failed rollout has no reward, so it takes part in no mean and no deviation. Everything is computed in double
precision on plain Python floats: blocks are small, and equal rewards must give exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Literal

from verifiers.errors import ConfigError
from verifiers.keywords import warn_once
from verifiers.rollouts.rollout import Group, Rollout, ScoredBlock
from verifiers.rubrics.scoring import LARGEST
from verifiers.types import RolloutKey

ScaleRewards = Literal["group", "batch", "none"]

ROUNDING = 1e-12
"""Relative spread of rewards below which they count as equal: a weighted sum taken in another order differs so."""


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """Advantages of a batch of groups, and the deviation of each group's rewards.

    Attributes:
        advantages: same layout as the rewards; None where the rollout is kept out of the loss.
        group_stds: deviation of each group (ddof = 1); None where fewer than two rewards take part.
    """

    advantages: list[list[float | None]]
    group_stds: list[float | None]


class BlockAdvantages(dict[RolloutKey, float | list[float]]):
    """Advantage of each rollout that is trained on: one float, or one per sampled token over its rows.

    Attributes:
        left_out: why each other rollout of the block is not trained on: the outcome of a failed one
            ("provider_error", ...), "masked_truncated", "no_baseline" or "group_incomplete".
        result: the advantages and group statistics of the rewards alone, before any penalty, groups in the block's
            order.
    """

    def __init__(self, result: AdvantageResult) -> None:
        super().__init__()
        self.left_out: dict[RolloutKey, str] = {}
        self.result = result


def group_advantages(
    rewards: Sequence[Sequence[float | None]],
    scale_rewards: ScaleRewards = "group",
    eps: float = 1e-4,
    *,
    require_full_groups: bool = False,
    estimator: str = "group",
    tokens: Sequence[Sequence[int]] | None = None,
) -> AdvantageResult:
    """Turn the rewards of each group into advantages.

    - "group": (r - mean) / (std + eps), the group-relative advantage of DeepSeekMath (arXiv:2402.03300);
      `scale_rewards="none"` is that of Dr. GRPO (arXiv:2503.20783), `"batch"` the mixed one of "Tricks or Traps?"
      (arXiv:2508.08221).
    - "rloo": r minus the mean of the group's other rewards (Ahmadian et al., arXiv:2402.14740).
    - "reinforce_plus_plus": (r - m) / (s + eps), with mean m and deviation s over the sampled tokens of all groups,
      each with its rollout's reward (Hu et al., arXiv:2501.03262).
    - "reinforce_plus_plus_baseline": the same, of r minus the mean of its group (there too).

    Args:
        rewards: one list a group; None is a rollout without a reward (it failed).
        scale_rewards: of "group" alone: "group" divides by the group's deviation, "batch" by that over all rewards of
            the call, "none" leaves r - mean as it is. The mean is always the group's. Deviations have ddof = 1.
        eps: added to the deviation; in units of reward.
        require_full_groups: keep a group out whole as soon as one of its rollouts has no reward.
        estimator: one of those above.
        tokens: sampled tokens of each rollout, in the layout of `rewards`, by which the deviation s (ddof = 0) and
            the mean m are weighted; one each when left out.

    Returns:
        The advantages in the layout of `rewards`. The only reward of a group gets 0.0, since there is nothing
        to compare it with (but for "reinforce_plus_plus", which compares with every group). Equal rewards of a group
        get exactly 0.0 under "group" and "rloo", as does a reward that is the mean up to rounding. Under
        "reinforce_plus_plus_baseline" they get -m / (s + eps), where the mean m of the differences is 0 if all
        rollouts have as many tokens.

    Raises:
        ConfigError: for a reward that is infinite or not a number.
    """
    groups = [_finite(group) for group in rewards]
    if require_full_groups:
        groups = [[None] * len(group) if None in group else group for group in groups]
    scored = [[reward for reward in group if reward is not None] for group in groups]
    stds = [_deviation(values) if len(values) > 1 else None for values in scored]
    if estimator == "reinforce_plus_plus":
        return AdvantageResult(_whitened(groups, tokens, eps), stds)
    means = [_mean(values) if values else 0.0 for values in scored]
    differences = [_shifted(group, mean) for group, mean in zip(groups, means, strict=True)]
    if estimator == "reinforce_plus_plus_baseline":
        return AdvantageResult(_whitened(differences, tokens, eps), stds)
    scales = [1.0] * len(groups)
    if estimator == "rloo":
        # r - mean of all n is (n - 1) / n of r - mean of the n - 1 others
        scales = [max(1, len(values) - 1) / max(1, len(values)) for values in scored]
    elif scale_rewards == "batch":
        everything = [reward for values in scored for reward in values]
        scales = [(_deviation(everything) if len(everything) > 1 else 0.0) + eps] * len(groups)
    elif scale_rewards == "group":
        scales = [(std or 0.0) + eps for std in stds]
    advantages = [_divided(group, scale) for group, scale in zip(differences, scales, strict=True)]
    return AdvantageResult(advantages, stds)


def _shifted(values: Sequence[float | None], mean: float) -> list[float | None]:
    """Return each value minus the mean, exactly 0.0 where the two are equal up to rounding."""
    least = ROUNDING * max((abs(value) for value in values if value is not None), default=0.0)
    shifted = [None if value is None else value - mean for value in values]
    return [0.0 if value is not None and abs(value) <= least else value for value in shifted]


def _divided(values: Sequence[float | None], by: float) -> list[float | None]:
    return [None if value is None else value / by for value in values]


def _whitened(
    groups: Sequence[Sequence[float | None]], tokens: Sequence[Sequence[int]] | None, eps: float
) -> list[list[float | None]]:
    """Subtract the mean over all groups and divide by the deviation, both weighted by `tokens`."""
    values = [value for group in groups for value in group]
    counts = [1] * len(values) if tokens is None else [count for group in tokens for count in group]
    pairs = [(value, count) for value, count in zip(values, counts, strict=True) if value is not None and count]
    if not pairs:
        return [_divided(group, math.inf) for group in groups]
    total = sum(count for _, count in pairs)
    mean = pairs[0][0]
    if not _are_equal([value for value, _ in pairs]):
        mean = math.fsum(value * count for value, count in pairs) / total
    deviation = math.sqrt(math.fsum((value - mean) ** 2 * count for value, count in pairs) / total)
    return [_divided(_shifted(group, mean), deviation + eps) for group in groups]


def rollout_advantages(
    block: ScoredBlock,
    *,
    scale_rewards: ScaleRewards = "group",
    estimator: str = "group",
    penalties: Mapping[RolloutKey, float] | None = None,
    require_full_groups: bool = False,
    mask_truncated_completions: bool = False,
    zero_truncated_completions: bool = False,
    turn_discount: float | None = None,
) -> BlockAdvantages:
    """Return the advantages of a block's rollouts, by identity.

    An advantage that the environment gave (`Rollout.advantage`) replaces the group's; its reward still takes
    part in the statistics. Rollouts without an entry are not trained on, not even by a KL term, and do not
    dilute those that are: failed ones, and the only scored one of a group (there is no baseline for it).

    Args:
        scale_rewards, estimator: see `group_advantages`.
        penalties: subtracted from the rewards before the advantages; 0 for a rollout that is not named.
        require_full_groups: drop every rollout of a group in which one failed.
        mask_truncated_completions: truncated rollouts keep their place in the statistics but get no loss
            (overlong filtering of DAPO, arXiv:2503.14476).
        zero_truncated_completions: the rewards of a truncated rollout count as 0 before the statistics.
        turn_discount: of the returns whose advantages are added turn by turn; None for none (see `turn_advantages`).

    Raises:
        ConfigError: where an environment's list of advantages has not one value per sampled token, or it gave
            advantages, which penalties do not reach.
    """

    def advantages_of(subtracted: Mapping[RolloutKey, float]) -> AdvantageResult:
        return group_advantages(
            [
                [_reward(one, zero_truncated_completions, subtracted.get(one.key, 0.0)) for one in group.rollouts]
                for group in block.groups
            ],
            scale_rewards,
            require_full_groups=require_full_groups,
            estimator=estimator,
            tokens=[[_sampled_tokens(one) for one in group.rollouts] for group in block.groups],
        )

    found = BlockAdvantages(advantages_of({}))
    trained = found.result if penalties is None else advantages_of(penalties)
    for group, values, std in zip(block.groups, trained.advantages, found.result.group_stds, strict=True):
        for rollout, value in zip(group.rollouts, values, strict=True):
            if _reward(rollout) is None:
                found.left_out[rollout.key] = why_unscored(rollout)
            elif value is None:
                found.left_out[rollout.key] = "group_incomplete"
            elif mask_truncated_completions and rollout.is_truncated:
                found.left_out[rollout.key] = "masked_truncated"
            elif rollout.advantage is not None or rollout.turn_advantages is not None:
                if penalties is not None:
                    raise ConfigError(
                        f"the environment gave {rollout.key} an advantage of its own, which kl_in_reward does not "
                        "reach; set kl_in_reward=False, or let the environment give rewards alone."
                    )
                found[rollout.key] = value if rollout.advantage is None else _given_advantage(rollout)
            elif std is None and estimator != "reinforce_plus_plus":
                found.left_out[rollout.key] = "no_baseline"
            else:
                found[rollout.key] = value
    by_role = _role_advantages(block, scale_rewards, estimator, zero_truncated_completions)
    if by_role and penalties is not None:
        raise ConfigError(
            "roles have rewards of their own, which kl_in_reward does not reach; set kl_in_reward=False."
        )
    by_turn: Mapping[RolloutKey, list[float]] = {}
    if turn_discount is not None:
        by_turn = turn_advantages(block, turn_discount, scale_rewards, estimator, zero_truncated_completions)
    for rollout in block.rollouts:
        key, given = rollout.key, found.get(rollout.key)
        has_own = key in by_turn or key in by_role or rollout.turn_advantages is not None
        if isinstance(given, float) and rollout.advantage is None and has_own:
            found[key] = _by_token(rollout, given, by_role.get(key, {}), by_turn.get(key))
    return found


def _role_advantages(
    block: ScoredBlock, scale_rewards: ScaleRewards, estimator: str, zero_truncated: bool
) -> dict[RolloutKey, dict[str, float]]:
    """Return each role's advantage among the group's rewards of that role; one that nobody else has gets 0.0.

    Raises:
        ConfigError: a role has turns and no reward.
    """
    columns: Columns = {}
    for group in block.groups:
        scored = [one for one in group.rollouts if _reward(one) is not None]
        rewards = {one.key: one.role_rewards or {} for one in scored}
        for one in scored:
            missing = {row.role for row in one.rows if row.role is not None} - rewards[one.key].keys()
            if missing and one.advantage is None:
                raise ConfigError(
                    f"{one.key} has turns of the role {min(missing)!r} and no reward for it; return one by a "
                    "function marked with vf.role_reward."
                )
            if zero_truncated and one.is_truncated:
                rewards[one.key] = dict.fromkeys(rewards[one.key], 0.0)
        for role in dict.fromkeys(role for given in rewards.values() for role in given):
            counts = [sum(row.sampled_tokens for row in one.rows if row.role == role) for one in scored]
            given = [rewards[one.key].get(role) for one in scored]
            columns.setdefault(role, []).append(([one.key for one in scored], given, counts))
    found: dict[RolloutKey, dict[str, float]] = {}
    for role, key, value in _compared(columns, scale_rewards, estimator):
        found.setdefault(key, {})[role] = value
    return found


Columns = dict[Any, list[tuple[list[RolloutKey], list[float | None], list[int]]]]
"""By role, or by a turn's number: of each group the rollouts, with rewards and sampled tokens of it."""


def _compared(
    columns: Columns, scale_rewards: ScaleRewards, estimator: str
) -> Iterator[tuple[Any, RolloutKey, float]]:
    """Give the advantages of each role, or turn, among the block's values of the same alone."""
    for place, groups in columns.items():
        keys, values, counts = zip(*groups, strict=True)
        compared = group_advantages(values, scale_rewards, estimator=estimator, tokens=counts).advantages
        for key, value in zip(chain(*keys), chain(*compared), strict=True):
            if value is not None:
                yield place, key, value


def turn_advantages(
    block: ScoredBlock,
    discount: float,
    scale_rewards: ScaleRewards = "group",
    estimator: str = "group",
    zero_truncated: bool = False,
) -> dict[RolloutKey, list[float]]:
    """Return the advantage of each policy turn among the same turns of its group; {} where no turn has a reward.

    The return of turn t is G_t = sum over k >= t of discount^(k - t) r_k, and is compared, by `group_advantages`,
    with the returns of the group's other rollouts at turn t; a turn that no other rollout reached gets 0.0.

    Raises:
        ConfigError: a rollout has another number of turn rewards than of turns.
    """
    if all(one.turn_rewards is None and one.turn_advantages is None for one in block.rollouts):
        by = "in the steps of the trajectory, or by a function marked with vf.turn_reward"
        warn_once("verifiers.train", f"turn_discount is set, and no turn of a block has a reward; give some {by}.")
        return {}
    columns: Columns = {}
    found: dict[RolloutKey, list[float]] = {}
    for group in block.groups:
        scored = [one for one in group.rollouts if _reward(one) is not None]
        returns = [_returns(one, discount, zero_truncated) for one in scored]
        found |= {one.key: [] for one in scored}
        for turn in range(max(map(len, returns), default=0)):
            reached = [values[turn] if turn < len(values) else None for values in returns]
            counts = [sum(row.turn_lengths.get(turn, 0) for row in one.rows) for one in scored]
            columns.setdefault(turn, []).append(([one.key for one in scored], reached, counts))
    for _, key, value in _compared(columns, scale_rewards, estimator):
        found[key].append(value)
    return found


def _returns(rollout: Rollout, discount: float, zero_truncated: bool) -> list[float]:
    rewards = _of_each_turn(rollout, rollout.turn_rewards)
    if rewards is None or (zero_truncated and rollout.is_truncated):
        return [0.0] * rollout.turns
    returns, later = [], 0.0
    for reward in reversed(rewards):
        later = float(reward) + discount * later
        returns.append(later)
    return returns[::-1]


def _of_each_turn(rollout: Rollout, given: list[Any] | None) -> list[Any] | None:
    if given is not None and len(given) != rollout.turns:
        raise ConfigError(
            f"{rollout.key} has rewards or advantages for {len(given)} turns, and the policy had {rollout.turns}; "
            "give one for each answer that is trained. get_model_response makes a step of every answer: ask "
            "client.untrained and other models by their `create`."
        )
    return given


def _by_token(
    rollout: Rollout, advantage: float, by_role: Mapping[str, float], by_turn: Sequence[float] | None
) -> list[float]:
    """Return the advantage of each sampled token: its role's or else the rollout's, and with it its turn's.

    What a turn's step was given counts in place of all that.
    """
    added = by_turn or [0.0] * rollout.turns
    given = _of_each_turn(rollout, rollout.turn_advantages) or [None] * rollout.turns
    found: list[float] = []
    for row in rollout.rows:
        base = advantage if row.role is None else by_role[row.role]
        for turn, count in row.turn_lengths.items():
            own = given[turn]
            found += [base + added[turn] if own is None else one_advantage(own)] * count
    if not all(abs(value) <= LARGEST for value in found):
        raise ConfigError(f"the advantages of {rollout.key}'s turns are not finite in float32: {set(found)!r}.")
    return found


def _reward(rollout: Rollout, zero_truncated: bool = False, penalty: float = 0.0) -> float | None:
    """Return what a rollout counts in the statistics; None where it failed."""
    if rollout.outcome.is_failure or rollout.reward is None:
        return None
    return (0.0 if zero_truncated and rollout.is_truncated else float(rollout.reward)) - penalty


def _sampled_tokens(rollout: Rollout) -> int:
    return sum(row.sampled_tokens for row in rollout.rows)


def why_unscored(rollout: Rollout) -> str:
    """Return the reason for an unscored rollout: its outcome."""
    return rollout.outcome.value if rollout.outcome.is_failure else "no_reward"


def plain_advantage(given: Any) -> float | list[float] | None:
    """Return an environment's advantage as a float or a list of them: it may be given as a tensor or an array."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if given is None:
        return None
    return list(map(one_advantage, given)) if isinstance(given, list | tuple) else one_advantage(given)


def one_advantage(given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        raise ConfigError(
            f"an environment gave {given!r:.100} as an advantage; give a number, or one for each sampled token."
        ) from None


def _given_advantage(rollout: Rollout) -> float | list[float]:
    """Return the environment's advantage of a rollout, checked against its sampled tokens."""
    given = plain_advantage(rollout.advantage)
    values = given if isinstance(given, list) else [given or 0.0]
    if not all(abs(value) <= LARGEST for value in values):
        raise ConfigError(
            f"the environment gave {rollout.key} an advantage that is not finite in float32: {given!r}; give finite "
            "numbers"
        )
    if not isinstance(given, list):
        return values[0]
    sampled = _sampled_tokens(rollout)
    if len(values) != sampled:
        raise ConfigError(
            f"the environment gave {rollout.key} {len(values)} advantages for {sampled} sampled tokens; "
            "give one float, or one value per sampled token over its rows in order"
        )
    return values


def has_zero_variance(group: Group, *, zero_truncated_completions: bool = False, by_turn: bool = False) -> bool:
    """Return whether a scored group has no gradient: its rewards are all equal, and no advantage was given.

    With credit `by_turn`, those of turns must be equal too.

    Failed rollouts take no part. A group with fewer than two scored ones does not count: failures of the machinery
    are not a reason to ask for other prompts, which would fail as well.
    """
    if len(group.scored) < 2 or any(rollout.advantage is not None for rollout in group.scored):
        return False

    def credit(one: Rollout) -> tuple[Any, Any]:
        if zero_truncated_completions and one.is_truncated:
            return None, None
        roles, turns = one.role_rewards or {}, (one.turn_rewards or ()) if by_turn else ()
        # zeros are what a truncated rollout has
        return (roles if any(roles.values()) else None), (turns if any(turns) else None)

    if any(credit(one) != credit(group.scored[0]) for one in group.scored):
        return False
    if any(any(one.turn_advantages or ()) for one in group.scored):
        return False
    rewards = [_reward(rollout, zero_truncated_completions) or 0.0 for rollout in group.scored]
    return _are_equal(rewards)


def _finite(group: Sequence[float | None]) -> list[float | None]:
    values = [None if reward is None else float(reward) for reward in group]
    for value in values:
        if value is not None and not abs(value) <= LARGEST:
            raise ConfigError(
                f"a reward of {value!r} in the group {values!r} is not finite in float32; a reward function that "
                "cannot score must raise, so that the rollout is kept out"
            )
    return values


def _mean(values: list[float]) -> float:
    return values[0] if _are_equal(values) else fmean(values)


def _deviation(values: list[float]) -> float:
    """Return the sample standard deviation (ddof = 1), exactly 0.0 for equal values; needs at least two."""
    if _are_equal(values):
        return 0.0
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _are_equal(values: list[float]) -> bool:
    low, high = min(values), max(values)
    return high - low <= ROUNDING * max(abs(low), abs(high))
