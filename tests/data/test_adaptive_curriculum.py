"""Curricula that adapt: what they do with pass rates, and that a resumed run decides as one that never stopped."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verifiers
from verifiers.data.adaptive_curriculum import (
    AdaptiveRows,
    CurriculumPolicy,
    LevelsPolicy,
    Pool,
    PoolsPolicy,
    curriculum_from,
)
from verifiers.data.curriculum import Curriculum
from verifiers.data.row_source import ObservesBlocks, PlannedBlock
from verifiers.errors import ConfigError, GenerationError

SIZES = {"easy": 30, "middle": 20, "hard": 40}
PROMPTS = [(name, row) for name, size in SIZES.items() for row in range(size)]
IDS = {"easy": range(30), "middle": range(30, 50), "hard": range(50, 90)}


def planned(block_id: int, prompts: int = 4) -> PlannedBlock:
    return PlannedBlock(block_id, prompts)


def levels(**options: Any) -> LevelsPolicy:
    return LevelsPolicy(tuple(SIZES), **{"window": 4, "raise_at": 0.75, "lower_at": 0.25, **options})


def begun(rule: Any) -> Any:
    rule.begin(SIZES)
    return rule


def outcomes(block_id: int, rows: list[int]) -> dict[int, list[float]]:
    """Rewards that block and rows alone decide; some prompts have none."""
    chance = random.Random(f"{block_id}:{rows}")
    return {row: [float(chance.random() < 0.6) for _ in range(chance.randint(0, 4))] for row in rows}


# -- levels -----------------------------------------------------------------------------------------------------


def test_a_level_rises_and_falls_by_the_pass_rate_of_a_full_window() -> None:
    rule = begun(levels())
    names = []
    for rate in (0.7, 0.8, 1.0, 1.0, 0.3, 0.1, 0.0, 0.0):
        rule.learn(dict.fromkeys(rule.draw(len(names), 4), rate))
        names.append(rule.name)
    assert names == ["easy", "middle", "hard", "hard", "hard", "middle", "easy", "easy"]


def test_a_window_that_is_not_full_decides_nothing_and_slides_when_it_is() -> None:
    rule = begun(levels(window=6))
    for rates in ([1.0] * 4, [0.0, 0.0], [1.0]):
        rule.learn(dict(zip(rule.draw(0, 4), rates, strict=False)))
        assert rule.name == "easy"
    rule.learn(dict.fromkeys(rule.draw(0, 4), 1.0))
    assert rule.name == "middle"


def test_what_another_levels_prompts_did_says_nothing_about_this_one() -> None:
    rule = begun(levels())
    early = rule.draw(1, 4)
    rule.learn(dict.fromkeys(rule.draw(0, 4), 1.0))
    assert rule.name == "middle"
    rule.learn(dict.fromkeys(early, 0.0))
    assert rule.name == "middle"


# -- pools --------------------------------------------------------------------------------------------------------


def test_prompts_move_between_pools_by_their_newest_pass_rate() -> None:
    rule = begun(PoolsPolicy())
    a, b, c = ("easy", 3), ("hard", 0), ("hard", 1)
    rule.learn({a: 1.0, b: 0.2, c: 0.21})
    assert rule.metrics() == {
        "curriculum/pool/hard": 1.0,
        "curriculum/pool/medium": 88.0,
        "curriculum/pool/easy": 1.0,
        "curriculum/prompts_seen": 3.0,
    }
    rule.learn({a: 0.0, b: 0.5})
    assert rule.metrics()["curriculum/pool/hard"] == 1.0
    assert rule.metrics()["curriculum/pool/easy"] == 0.0


def test_blocks_draw_from_the_pools_by_weight() -> None:
    rule = begun(PoolsPolicy())
    rates = dict.fromkeys(PROMPTS[:30], 0.0) | dict.fromkeys(PROMPTS[60:], 1.0)
    rule.learn(rates)
    drawn = Counter(rates.get(prompt, 0.5) for block in range(300) for prompt in rule.draw(block, 5))
    assert drawn == {0.0: 250, 0.5: 1000, 1.0: 250}
    seen = {prompt for block in range(300) for prompt in rule.draw(block, 5)}
    assert len(seen) == 90


def test_a_pool_that_runs_out_leaves_its_part_to_the_others() -> None:
    rule = begun(PoolsPolicy())
    rule.learn(dict.fromkeys(PROMPTS[:88], 0.0))
    drawn = [rule.draw(block, 12) for block in range(20)]
    assert all(len(set(block)) == 12 for block in drawn)
    assert all(set(PROMPTS[88:]) <= set(block) for block in drawn)
    only = begun(PoolsPolicy(pools=(Pool("hard", 0.5, 0.0), Pool("easy", 1.0, 1.0)), unseen="hard"))
    assert len(set(only.draw(0, 90))) == 90


# -- as a row source ----------------------------------------------------------------------------------------------


def test_a_rollout_passes_at_its_threshold_and_a_failed_one_counts_nothing() -> None:
    learned: list[dict[Any, float]] = []

    class Listening(LevelsPolicy):
        def learn(self, rates: Any) -> None:
            learned.append(dict(rates))
            super().learn(rates)

    rows = AdaptiveRows(Listening(("easy",), passes_at=0.5), {"easy": range(100, 130)}, lag=0)
    ids = rows.example_ids(planned(0))
    rows.observe(0, {ids[0]: [0.5, 0.49], ids[1]: [1.0], ids[2]: []})
    rows.example_ids(planned(1))
    assert learned == [{("easy", ids[0] - 100): 0.5, ("easy", ids[1] - 100): 1.0}]


RULES = {"levels": lambda: levels(), "pools": lambda: PoolsPolicy(seed=3)}


def drive(rows: AdaptiveRows, lag: int, first: int, last: int, drawn: dict[int, list[int]]) -> None:
    """Submit and observe blocks as a trainer does that keeps `lag` blocks in flight."""
    for block in range(first, last):
        for ahead in range(block, min(block + lag, 39) + 1):
            drawn.setdefault(ahead, rows.example_ids(planned(ahead)))
        rows.observe(block, outcomes(block, drawn[block]))


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=25)
@given(st.integers(0, 3), st.integers(1, 39))
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(rule: str, lag: int, cut: int) -> None:
    make: Callable[[], CurriculumPolicy] = RULES[rule]
    whole: dict[int, list[int]] = {}
    drive(AdaptiveRows(make(), IDS, lag=lag), lag, 0, 40, whole)
    first, second = (AdaptiveRows(make(), IDS, lag=lag) for _ in range(2))
    before: dict[int, list[int]] = {}
    drive(first, lag, 0, cut, before)
    second.restore(json.loads(json.dumps(first.state())))
    after: dict[int, list[int]] = {}
    drive(second, lag, cut, 40, after)
    assert {**before, **after} == whole
    assert {block: rows for block, rows in before.items() if block >= cut} == {
        block: after[block] for block in before if block >= cut
    }
    assert len({tuple(rows) for rows in whole.values()}) > 30


@pytest.mark.parametrize("rule", RULES)
def test_a_block_depends_on_no_block_that_may_still_be_in_flight(rule: str) -> None:
    def drawn(observed: range) -> list[int]:
        rows = AdaptiveRows(RULES[rule](), IDS, lag=2)
        asked = [rows.example_ids(planned(block)) for block in range(4)]
        for block in observed:
            rows.observe(block, {key: [1.0] for key in asked[block]})
        return rows.example_ids(planned(4))

    with pytest.raises(GenerationError, match="block 3 was asked for before block 0 was observed"):
        drawn(range(2))

    def after_three(latest: float) -> list[int]:
        rows = AdaptiveRows(RULES[rule](), IDS, lag=2)
        asked = [rows.example_ids(planned(block)) for block in range(3)]
        rows.observe(0, {key: [1.0] for key in asked[0]})
        asked.append(rows.example_ids(planned(3)))
        rows.observe(1, {key: [1.0] for key in asked[1]})
        rows.observe(2, {key: [latest] for key in asked[2]})
        return rows.example_ids(planned(4))

    assert after_three(0.0) == after_three(1.0)


def test_blocks_are_observed_in_order_and_drawn_once() -> None:
    rows = AdaptiveRows(levels(), IDS, lag=0)
    assert isinstance(rows, ObservesBlocks)
    assert rows.example_ids(planned(0)) == rows.example_ids(planned(0))
    with pytest.raises(GenerationError, match="block 1 was observed after block -1"):
        rows.observe(1, {})
    rows.observe(0, {})
    rows.example_ids(planned(1))
    rows.observe(1, {})
    # drawing it again would take other rows, and those of later blocks with it
    with pytest.raises(GenerationError, match="block 0 was observed; what it drew is not kept"):
        rows.example_ids(planned(0))


def test_the_name_of_a_step_is_that_of_the_block_trained_and_not_of_one_in_flight() -> None:
    rows = AdaptiveRows(levels(), IDS, lag=1)
    first, second = rows.example_ids(planned(0)), rows.example_ids(planned(1))
    rows.observe(0, {key: [1.0] for key in first})
    rows.example_ids(planned(2))
    assert rows.metrics() == {"curriculum/level": 1.0}
    assert rows.stage_name(0) == "easy"
    rows.observe(1, {key: [1.0] for key in second})
    assert rows.stage_name(1) == "easy"


# -- from a file ----------------------------------------------------------------------------------------------------


def test_a_table_gives_stages_levels_or_pools() -> None:
    staged = curriculum_from({"stages": [{"name": "all", "datasets": ["easy"]}]}, seed=4)
    assert isinstance(staged, Curriculum)
    assert verifiers.curriculum_from is curriculum_from
    assert staged.seed == 4
    given = {"levels": {"datasets": ["easy", "hard"], "window": 8}, "seed": 2}
    assert curriculum_from(given, seed=4) == LevelsPolicy(("easy", "hard"), window=8, seed=2)
    pools = [{"name": "low", "up_to": 0.5}, {"name": "high", "up_to": 1, "weight": 3}]
    rule = curriculum_from({"pools": {"pools": pools, "unseen": "low"}}, seed=4)
    assert rule == PoolsPolicy((), (Pool("low", 0.5), Pool("high", 1, 3)), "low", seed=4)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "neither stages, levels nor pools"),
        ({"stages": [], "levels": {}}, "has stages and levels; give one of"),
        ({"levels": {"datasets": ["a"]}, "replacement": True}, "unknown key 'replacement' beside 'levels'"),
        ({"levels": {}}, r"the curriculum\.levels\.datasets: Field required"),
        ({"levels": {"datasets": ["a"], "windo": 1}}, r"the curriculum\.levels\.windo is an unknown key"),
        ({"levels": {"datasets": ["a", "a"]}}, "give different datasets, the easiest first"),
        ({"levels": {"datasets": ["a"], "window": 0}}, "window is 0"),
        ({"levels": {"datasets": ["a"], "raise_at": 1.5}}, "raise_at is 1.5; give a number from 0 to 1"),
        ({"levels": {"datasets": ["a"], "raise_at": 0.2}}, "lower_at must be smaller"),
        ({"levels": {"datasets": ["a"]}, "seed": "x"}, r"the curriculum\.levels\.seed: .* \(given: 'x'\)"),
        ({"pools": {"datasets": ["a", "a"]}}, "give names of different datasets"),
        ({"pools": {"passes_at": float("nan")}}, "passes_at is nan"),
        ({"pools": {"unseen": "fresh"}}, "unseen is 'fresh'; name one of the pools hard, medium, easy"),
        ({"pools": {"pools": [{"name": "a", "up_to": 0.5}], "unseen": "a"}}, "of which the last is 1"),
        ({"pools": {"pools": [{"name": "a"}]}}, r"pools\.0\.up_to: Field required"),
        ({"pools": {"pools": [{"name": "a", "up_to": 1, "weight": 0}], "unseen": "a"}}, "pools sum to 0"),
        (
            {"pools": {"pools": [{"name": "a", "up_to": 0.5}, {"name": "a", "up_to": 1}], "unseen": "a"}},
            "each a name of its own",
        ),
    ],
)
def test_what_cannot_adapt_is_refused_in_one_sentence(mapping: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        curriculum_from(mapping)


def test_a_dataset_that_is_not_there_is_refused_when_the_run_is_planned() -> None:
    with pytest.raises(ConfigError, match="'late' is not a dataset with rows; there are: easy, hard, middle"):
        AdaptiveRows(LevelsPolicy(("easy", "late")), IDS, lag=0)
    with pytest.raises(ConfigError, match="rows of dataset 'late', which is not there"):
        AdaptiveRows(PoolsPolicy(datasets=("late",)), IDS, lag=0)


def test_a_block_larger_than_what_is_drawn_from_is_refused_when_the_run_is_planned() -> None:
    """Also where it is a later level that has too few rows."""
    AdaptiveRows(levels(), IDS, lag=0).policy.check_block(20)
    with pytest.raises(ConfigError, match="a block takes 21 different rows of level 'middle', which has 20"):
        AdaptiveRows(levels(), IDS, lag=0).policy.check_block(21)
    with pytest.raises(ConfigError, match="a block takes 91 different prompts, and the pools hold 90"):
        AdaptiveRows(PoolsPolicy(), IDS, lag=0).policy.check_block(91)
