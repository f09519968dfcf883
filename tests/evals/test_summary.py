from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.evals.comparison import ComparedRun, compare_runs
from verifiers.evals.results import RolloutResults
from verifiers.evals.summary import Price, PriceTable, at_k, load_prices, split_variance, summarize
from verifiers.reports.evaluation import summary_of

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


def test_intervals_end_at_the_bounds_that_reward_functions_declare_in_summary_report_and_comparison() -> None:
    penalty = vf.overlong_penalty(max_tokens=12, buffer_tokens=8)
    rubric = vf.Rubric([penalty, vf.XMLParser(["answer"]).get_format_reward_func()], weights=[1.0, 0.5])
    metadata = {"reward_bounds": json.loads(json.dumps(rubric.declared_bounds()))}
    values = [(0.0, 1.0)] * 5 + [(-1.0, 0.5)]
    rows = [
        {"example_id": example, "generation": generation, "outcome": "completed", "reward": over + 0.5 * form}
        | {"metrics": {"overlong_penalty": over, "format_reward_func": form}}
        for example, (over, form) in enumerate(values)
        for generation in range(2)
    ]
    summary, plain = summarize(rows, metadata), summarize(rows)
    runs = [ComparedRun.of_rows(Path(name), metadata, rows) for name in "ab"]
    reported = {one["name"]: one for one in summary_of(RolloutResults(rows), metadata, "a")["measures"]}
    for name, end in (("reward", 0.5), ("overlong_penalty", 0.0)):
        assert plain.measures[name].high > end
        compared = compare_runs(*runs, metric=name)
        highs = [summary.measures[name].high, reported[name]["high"], compared.a.estimate.high]
        assert highs[0] <= end
        assert highs == [pytest.approx(highs[0], rel=1e-5)] * 3
        # no prompt differs, which says something where there are bounds
        assert compared.difference.high < 1.5
    assert summary.at_k[1].best.high <= 0.5
    assert compare_runs(*runs, metric="pass@2", right_from=0.5).a.estimate.high <= 1


@pytest.mark.parametrize("declared", [{"reward": [0.0, 0.2]}, {"reward": ["a", None]}, {"reward": 3}, [1]])
def test_bounds_that_a_reward_does_not_keep_are_none(declared: Any) -> None:
    with_them = summarize(rows_of(FIVE_PROMPTS), {"reward_bounds": declared})
    assert with_them == summarize(rows_of(FIVE_PROMPTS))


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (0.0,), 1.0, ("0", "1"), []])
def test_reward_bounds_that_are_none_are_refused(bounds: Any) -> None:
    def func(completion: Any) -> float:
        return 0.0

    func.reward_bounds = bounds  # type: ignore[attr-defined]
    with pytest.raises(vf.ConfigError, match="reward_bounds"):
        vf.Rubric([func])


def test_a_sum_has_bounds_only_where_the_reward_is_one_and_each_part_has_some() -> None:
    penalty = vf.overlong_penalty(max_tokens=12, buffer_tokens=8)

    class Own(vf.Rubric):
        async def score_states(self, states: Any) -> Any:
            return await super().score_states(states)

    assert vf.Rubric([penalty], weights=[-2.0]).declared_bounds()["reward"] == (0.0, 2.0)
    group = vf.RubricGroup([vf.MathRubric(), vf.Rubric([penalty])])
    assert group.declared_bounds()["reward"] == (-1.0, 1.0)
    for rubric in (Own([penalty]), vf.RubricGroup([Own([penalty])]), vf.Rubric([penalty, lambda completion: 7.0])):
        assert rubric.declared_bounds() == {"overlong_penalty": (-1.0, 0.0)}
    assert vf.RubricGroup([vf.Rubric([penalty]), vf.Rubric([penalty])]).declared_bounds() == {}


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


def test_variance_is_split_as_in_the_analysis_of_variance() -> None:
    # means 2, 6, 4 around 4; MSB = 2 * 8 / 2 = 8, MSW = 6 / 3 = 2, n0 = 2
    split = split_variance([[1.0, 3.0], [5.0, 7.0], [3.0, 5.0]])
    assert (split.between, split.within, split.rollouts_per_prompt) == pytest.approx((3, 2, 2))
    assert split.share_between == pytest.approx(0.6)


def test_unequal_groups_are_estimated_without_bias() -> None:
    random = np.random.default_rng(2)
    sizes = [1, 2, 8, 8, 3, 5, 8, 4, 8, 1] * 3
    between, within = [], []
    for _ in range(1500):
        split = split_variance([random.normal(random.normal(0, 2), 1, size).tolist() for size in sizes])
        between.append(split.between)
        within.append(split.within)
    assert np.mean(between) == pytest.approx(4, rel=0.05)
    assert np.mean(within) == pytest.approx(1, rel=0.02)


def test_a_negative_share_is_none() -> None:
    split = split_variance([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert (split.between, split.share_between) == (0, 0)
    assert split.advice == "more rollouts"


def test_prompts_that_decide_alone_call_for_more_prompts() -> None:
    split = split_variance([[1.0] * 4, [0.0] * 4, [1.0] * 4])
    assert (split.within, split.share_between) == pytest.approx((0, 1))
    assert split.advice == "more prompts"


def test_what_cannot_be_told_is_nan() -> None:
    for rewards in ([], [[1.0, 0.0]], [[1.0], [0.0]], [[], [1.0, 0.0]]):
        split = split_variance(rewards)
        assert math.isnan(split.share_between)
        assert split.advice == ""
    same = split_variance([[1.0, 1.0], [1.0, 1.0]])
    assert math.isnan(same.share_between)
    assert same.advice == ""


def written(directory: Path, text: str) -> Path:
    path = directory / "prices.toml"
    path.write_text(text)
    return path


def test_tokens_cost_what_the_table_says(tmp_path: Path) -> None:
    table = load_prices(
        written(
            tmp_path,
            'currency = "EUR"\n["org/model-4.1"]\nprompt = 0.5\ncompletion = 2\n[free]\nprompt = 0\ncompletion = 0\n',
        )
    )
    assert table.currency == "EUR"
    assert table.prices == {"org/model-4.1": Price(0.5, 2.0), "free": Price(0.0, 0.0)}
    assert table.prices["org/model-4.1"].cost(3_000_000, 500_000) == 2.5
    assert load_prices(written(tmp_path, "")).currency == "USD"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[m]\nprompt = 1", "'m'"),
        ("[m]\nprompt = 1\ncompletion = -1", "completion price of 'm' is -1"),
        ("[m]\nprompt = true\ncompletion = 1", "prompt price of 'm' is True"),
        ("[m]\nprompt = nan\ncompletion = 1", "prompt price of 'm' is nan"),
        ("[gpt-4.1]\nprompt = 1\ncompletion = 1", "needs quotes"),
        ("m = 3", "'m' is 3"),
        ("currency = 3", "currency"),
        ("[m", "cannot be read"),
    ],
)
def test_what_is_no_price_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_prices(written(tmp_path, text))
