from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from verifiers.errors import ConfigError
from verifiers.evals.comparison import ComparedRun, compare_runs

METADATA = {"env": "sums", "env_args": {}, "model": "m", "num_examples": 12, "rollouts_per_example": 2}
Rewards = Mapping[int, Sequence[float | None]]


def run(rewards: Rewards, name: str = "run", *, text: str = "", **metadata: Any) -> ComparedRun:
    rows = [
        {
            "example_id": example,
            "generation": generation,
            "prompt": [{"role": "user", "content": f"question {example}{text}"}],
            "answer": str(example),
            "task": "default",
            "outcome": "provider_error" if reward is None else "completed",
            "reward": reward,
            "metrics": {} if reward is None else {"good": reward},
        }
        for example, of_prompt in rewards.items()
        for generation, reward in enumerate(of_prompt)
    ]
    return ComparedRun.of_rows(Path(name), {**METADATA, **metadata}, rows)


HALF: Rewards = {n: [1.0, 0.0] for n in range(12)}
BETTER: Rewards = {n: [1.0, 1.0] if n < 9 else [1.0, 0.0] for n in range(12)}


def test_a_better_run_is_called_better_and_a_worse_one_worse() -> None:
    comparison = compare_runs(run(HALF, "a"), run(BETTER, "b"))
    assert comparison.verdict == "B is better"
    assert comparison.difference.mean == pytest.approx(0.375)
    assert comparison.difference.low > 0
    assert (comparison.wins, comparison.ties, comparison.losses) == (9, 3, 0)
    assert comparison.test.exact
    # nine differences of one sign
    assert comparison.test.p == 2 / 2**9
    assert comparison.b.estimate.mean - comparison.a.estimate.mean == pytest.approx(comparison.difference.mean)
    backwards = compare_runs(run(BETTER, "b"), run(HALF, "a"))
    assert backwards.verdict == "A is better"
    assert backwards.difference.mean == -comparison.difference.mean


def test_equal_runs_show_no_difference() -> None:
    comparison = compare_runs(run(HALF), run(HALF))
    assert comparison.verdict == "no difference shown"
    assert (comparison.difference.mean, comparison.test.p, comparison.ties) == (0, 1, 12)
    assert comparison.difference.low < 0 < comparison.difference.high
    assert math.isnan(comparison.detectable)


def test_a_few_prompts_tell_nothing_however_large_the_difference() -> None:
    comparison = compare_runs(run({n: [0.0] for n in range(5)}), run({n: [1.0] for n in range(5)}))
    assert comparison.verdict == "too few prompts to tell"


def test_different_prompts_are_refused_unless_told() -> None:
    fewer = {n: rewards for n, rewards in BETTER.items() if n < 10}
    more = {**fewer, 20: [0.0, 0.0]}
    with pytest.raises(ConfigError, match="10 in common, 2 only in A, 1 only in B"):
        compare_runs(run(HALF), run(more))
    for before, after in ((fewer, HALF), (HALF, fewer)):
        with pytest.raises(ConfigError, match="10 in common"):
            compare_runs(run(before), run(after))
    comparison = compare_runs(run(HALF), run(more), pairing="common")
    assert (comparison.common, comparison.a.only_here, comparison.b.only_here) == (10, 2, 1)
    assert comparison.difference.prompts == 10
    # the prompt that only B has is in no number of the pairs
    assert comparison.b.estimate.mean == pytest.approx(0.95)
    unpaired = compare_runs(run(HALF), run(more), pairing="unpaired")
    assert not unpaired.paired
    assert unpaired.wins is None
    assert (unpaired.a.estimate.prompts, unpaired.b.estimate.prompts) == (12, 11)
    assert unpaired.difference.mean == pytest.approx(9.5 / 11 - 0.5)
    assert unpaired.verdict == "B is better"


def test_the_same_id_with_another_text_is_another_prompt() -> None:
    other = run(BETTER, text=", please")
    with pytest.raises(ConfigError, match=r"0 in common.*12 have the same example id and another text"):
        compare_runs(run(HALF), other)
    with pytest.raises(ConfigError, match="no prompt in common"):
        compare_runs(run(HALF), other, pairing="common")
    assert compare_runs(run(HALF), other, match_by="id").difference.prompts == 12


def test_the_same_prompts_of_another_environment_are_refused_unless_told() -> None:
    for other in (run(BETTER, env="products"), run(BETTER, env_args={"strict": True})):
        with pytest.raises(ConfigError, match="all 12 prompts are the same, but env"):
            compare_runs(run(HALF), other)
        assert compare_runs(run(HALF), other, pairing="common").difference.prompts == 12


def test_what_failed_is_counted_and_left_out_of_the_pairs() -> None:
    failing = {**BETTER, 0: [None, None], 1: [None, 1.0]}
    half = {**HALF, 2: [None, None]}
    comparison = compare_runs(run(half), run(failing))
    assert (comparison.common, comparison.difference.prompts) == (12, 10)
    assert (comparison.a.unscored, comparison.b.unscored) == (1, 1)
    assert (comparison.a.counts.failed, comparison.b.counts.failed) == (2, 3)
    # prompt 1 counts by its one scored rollout
    assert comparison.difference.mean == pytest.approx(7 * 0.5 / 10)
    assert comparison.difference.rollouts == 2 * 10 * 2 - 1


def test_pass_at_k_and_reward_functions_are_compared_alike() -> None:
    a, b = run(HALF), run(BETTER)
    assert compare_runs(a, b, metric="good").difference.mean == pytest.approx(0.375)
    assert compare_runs(a, b, metric="pass^2").difference.mean == pytest.approx(0.75)
    assert compare_runs(a, b, metric="pass@2").difference.mean == 0
    assert compare_runs(a, b, metric="best@2").difference.mean == 0
    assert compare_runs(a, b, metric="pass@1", right_from=2).difference.mean == 0
    with pytest.raises(ConfigError, match="has no metric 'bad'; it has reward, good"):
        compare_runs(a, b, metric="bad")
    assert math.isnan(compare_runs(a, b, metric="pass@3").difference.mean)


def test_the_interval_of_rewards_beyond_one_is_not_cut_off() -> None:
    # prompt means lie within 0 and 1, the rewards do not
    a = run({0: [0.25, 0.25], 1: [0.25, 0.25]})
    b = run({0: [-4.0, 4.0], 1: [-3.0, 5.0]})
    comparison = compare_runs(a, b)
    assert comparison.difference.high == pytest.approx(0.25 + 12.7062047 * 0.5)
    assert comparison.b.estimate.high > 1


def test_a_verdict_needs_the_interval_and_the_p_value() -> None:
    # five of eight prompts won: t says yes, but one in 16 arrangements of signs is as large
    a, b = run({n: [0.0] for n in range(8)}), run({n: [float(n < 5)] for n in range(8)})
    for comparison in (compare_runs(a, b), compare_runs(b, a)):
        assert comparison.test.p == 2 / 32
        assert comparison.difference.low > 0 or comparison.difference.high < 0
        assert comparison.verdict == "no difference shown"


def test_a_comparison_is_strict_json() -> None:
    for pairing in ("same", "unpaired"):
        for metric in ("reward", "pass@3"):
            found = compare_runs(run(HALF), run(BETTER), pairing=pairing, metric=metric)  # type: ignore[arg-type]
            json.dumps(found.as_json(), allow_nan=False)


def test_the_order_of_arrival_changes_nothing() -> None:
    before = {n: [float(n % 3 == 0), 0.0] for n in range(40)}
    after = {n: [float(n % 2 == 0), float(n % 5 == 0)] for n in range(40)}
    shuffled = [list(rewards.items()) for rewards in (before, after)]
    for number, items in enumerate(shuffled):
        random.Random(number).shuffle(items)
    one, two = (compare_runs(run(dict(a)), run(dict(b))) for a, b in ((before, after), (shuffled[0], shuffled[1])))
    assert not one.test.exact
    assert one.as_json() == two.as_json()
