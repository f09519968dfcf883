from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.evals.results import RolloutResults
from verifiers.evals.summary import Price, PriceTable, at_k, summarize

FIVE_PROMPTS = [[1, 1, 0, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]


def row(
    example: int, generation: int, reward: float | None, outcome: str = "completed", **more: Any
) -> dict[str, Any]:
    return {
        "example_id": example,
        "generation": generation,
        "outcome": outcome,
        "reward": reward,
        "task": "default",
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "metrics": {},
        **more,
    }


def rows_of(rewards_by_prompt: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    return [
        row(example, generation, reward, metrics={"good": reward})
        for example, rewards in enumerate(rewards_by_prompt)
        for generation, reward in enumerate(rewards)
    ]


def test_a_summary_has_the_mean_with_its_clustered_interval() -> None:
    summary = summarize(rows_of(FIVE_PROMPTS))
    for name in ("reward", "good"):
        estimate = summary.measures[name]
        assert (estimate.mean, estimate.prompts, estimate.rollouts) == (0.5, 5, 20)
        assert (estimate.stderr, estimate.low, estimate.high) == pytest.approx(
            (0.176777, 0.009189, 0.990811), abs=1e-6
        )
    assert (summary.prompt_tokens, summary.completion_tokens) == (200, 60)


def test_a_failed_rollout_is_counted_and_never_a_zero() -> None:
    rows = [
        row(0, 0, 1.0),
        row(0, 1, None, "provider_error"),
        # a row that claims both, as a broken writer might leave it
        row(0, 2, 0.0, "timed_out", metrics={"good": 0.0}),
        row(1, 0, 1.0, "truncated"),
        row(1, 1, math.nan),
        row(1, 2, None),
        row(2, 0, None, "environment_error"),
    ]
    summary = summarize(rows, {"num_examples": 4, "rollouts_per_example": 3})
    counts = summary.counts
    assert summary.measures["reward"].mean == 1
    assert summary.as_json()["rewards"]["reward"]["without"] == 5
    assert "good" not in summary.measures
    assert (counts.prompts, counts.rollouts, counts.scored, counts.unscored) == (3, 7, 2, 5)
    assert (counts.failed, counts.truncated, counts.missing) == (3, 1, 5)
    assert sum(counts.outcomes.values()) == counts.rollouts


def test_pass_at_k_rests_on_the_prompts_that_have_k_scored_rollouts() -> None:
    curve = {found.k: found for found in at_k([[1, 0, 0], [1], [0, 0], []])}
    assert list(curve) == [1, 2, 3]
    assert curve[1].pass_at.mean == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert (curve[1].pass_at.prompts, curve[1].pass_at.rollouts) == (3, 6)
    assert curve[2].pass_at.mean == pytest.approx((2 / 3 + 0) / 2)
    assert (curve[3].pass_at.mean, curve[3].pass_at.prompts) == (1, 1)
    assert curve[3].pass_hat.mean == 0


def test_pass_and_best_at_k_of_a_run_and_their_intervals() -> None:
    curve = {found.k: found for found in summarize(rows_of(FIVE_PROMPTS)).at_k}
    assert list(curve) == [1, 2, 4]
    assert curve[1].pass_at.mean == curve[1].pass_hat.mean == curve[1].best.mean == 0.5
    assert curve[2].pass_at.mean == pytest.approx((1 + 0.5 + 1 + 0 + 5 / 6) / 5)
    assert curve[2].pass_hat.mean == pytest.approx((0.5 + 0 + 1 + 0 + 1 / 6) / 5)
    assert curve[4].pass_at.mean == 0.8
    # 4 of 5 prompts, by Clopper and Pearson
    assert (curve[4].pass_at.low, curve[4].pass_at.high) == pytest.approx((0.283582, 0.994949), abs=1e-6)


def test_the_reward_that_is_right_can_be_set_and_forgives_rounding() -> None:
    almost = 0.7 + 0.2 + 0.1
    assert almost < 1
    assert at_k([[almost], [0.5]])[0].pass_at.mean == 0.5
    assert at_k([[almost], [0.5]], right_from=0.5)[0].pass_at.mean == 1
    assert at_k([[3.0, 5.0]], right_from=4)[0].pass_at.mean == 0.5
    assert summarize(rows_of([[0.5]]), right_from=0.5).at_k[0].pass_at.mean == 1


def test_best_at_k_of_rewards_beyond_one_is_not_cut_off() -> None:
    two = at_k([[0.0, 3.0], [0.0, 0.5], [-1.0, 1.0]])[1]
    assert two.best.mean == pytest.approx(1.5)
    assert two.best.high > 3
    hidden = at_k([[-5.0, 0.9], [-5.0, 0.1]])[1].best
    assert hidden.high > 1


def test_the_later_row_of_a_rollout_counts_and_all_tokens_were_spent() -> None:
    columns = RolloutResults([row(0, 0, None, "timed_out"), row(0, 1, 0.0), row(0, 0, 1.0, metrics={"good": 1.0})])
    assert columns.values() == {0: [1.0, 0.0]}
    assert columns.values("good") == {0: [1.0]}
    assert columns.counts().outcomes == {"completed": 2}
    assert columns.completion_tokens == 9
    columns.add(row(0, 0, None, "timed_out"))
    assert columns.values("good") == {0: []}


def test_tasks_are_shown_apart_where_there_are_several() -> None:
    rows = [
        row(0, 0, 1.0, task="sums"),
        row(1, 0, 0.0, task="words"),
        row(2, 0, None, "provider_error", task="words"),
    ]
    summary = summarize(rows)
    assert list(summary.tasks) == ["sums", "words"]
    reward, counts = summary.tasks["words"]
    assert (reward.mean, counts.unscored, counts.failed, counts.rollouts) == (0, 1, 1, 2)
    assert summarize(rows[:1]).tasks == {}


def test_cost_is_told_only_where_the_table_has_the_model() -> None:
    prices = PriceTable({"m": Price(1e6, 2e6)}, "EUR")
    rows = rows_of([[1, 0]])
    summary = summarize(rows, {"model": "m"}, prices=prices)
    assert (summary.cost, summary.currency) == (20 + 2 * 6, "EUR")
    unknown = summarize(rows, {"model": "other"}, prices=prices)
    assert (unknown.cost, unknown.currency) == (None, None)


def test_a_reward_function_called_reward_does_not_take_the_rewards_place() -> None:
    assert summarize([row(0, 0, 0.5, metrics={"reward": 1.0})]).measures["reward"].mean == 0.5


def test_a_summary_is_strict_json_also_where_nothing_is_known() -> None:
    for rows in ([], [row(0, 0, None, "timed_out")], rows_of(FIVE_PROMPTS), rows_of([[1.0]])):
        found = json.loads(json.dumps(summarize(rows).as_json(), allow_nan=False))
        assert set(found) >= {"rewards", "pass_at_k", "pass_hat_k", "best_at_k", "variance", "tasks", "cost"}
        assert found["scored"] + found["unscored"] == found["rollouts"] == len(rows)
    assert summarize([]).as_json()["rewards"]["reward"]["mean"] is None
    assert summarize(rows_of(FIVE_PROMPTS)).as_json()["pass_at_k"]["4"]["mean"] == 0.8


def test_a_row_of_no_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="example_id"):
        summarize([{"reward": 1.0}])
