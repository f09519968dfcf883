"""A run whose blocks have no signal is told so, with the cause; one block with a signal ends the finding."""

from __future__ import annotations

from typing import Any

import pytest

from verifiers.monitoring.learning import LearningSignal

NO_SIGNAL = {"steps": 1, "rows/trained": 0.0, "rollouts/with_advantage": 0.0, "reward/min": 0.0, "reward/max": 0.0}

FINDINGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "zero": ({}, "every reward was 0 (the reward was never met) over the last 3 blocks", "partial credit"),
    "one": ({"reward/min": 1.0, "reward/max": 1.0}, "every reward was 1 (the prompts are solved)", "harder prompts"),
    "equal in groups": ({"reward/max": 1.0}, "the rewards of each group were all equal", "a finer reward"),
    "not skipped": ({"rows/trained": 8.0}, "every reward was 0", "easier prompts"),
    "truncated": (
        {"completions/clipped_ratio": 0.97},
        "97 % of the completions were cut off",
        "max_completion_length",
    ),
    "collapsed": ({"completions/frac_identical_groups": 1.0}, "(the policy has collapsed)", "a higher temperature"),
    "dropped": (
        {"rollouts/with_advantage": 8.0, "rows/dropped/stale": 8.0, "rows/dropped/timed_out": 1.0},
        "every row was left out, most as stale, over the last 3 blocks",
        "max_staleness",
    ),
}


@pytest.mark.parametrize("name", FINDINGS)
def test_three_blocks_without_a_signal_have_a_finding_with_its_cause(name: str) -> None:
    changes, text, advice = FINDINGS[name]
    signal = LearningSignal()
    for _ in range(2):
        signal.take(NO_SIGNAL | changes)
    assert signal.finding() is None
    signal.take(NO_SIGNAL | changes)
    finding = signal.finding()
    assert finding is not None
    assert str(finding).startswith("learns nothing: ")
    assert text in str(finding)
    assert advice in finding.advice
    signal.take(NO_SIGNAL | {"rows/trained": 4.0, "rollouts/with_advantage": 4.0})
    assert signal.finding() is None


def test_blocks_are_counted_by_their_updates_however_often_is_logged() -> None:
    seldom, often = LearningSignal(), LearningSignal()
    seldom.take(NO_SIGNAL | {"steps": 12})
    assert "the last 3 blocks" in str(seldom.finding(updates_per_block=4))
    for _ in range(2):
        often.take(NO_SIGNAL)
        for _ in range(3):
            # updates of the same block log no block
            often.take({"steps": 1})
    assert often.finding(updates_per_block=4) is None
    often.take(NO_SIGNAL)
    assert "the last 3 blocks" in str(often.finding(updates_per_block=4))
