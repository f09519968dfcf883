"""The READMEs' tables of baselines are the scores of the scripted policies."""

from __future__ import annotations

import re
from typing import Any

import pytest
import shelf
from shelf import Policy
from shelf_policies import POLICIES, open_environment

LINES = [(name, line) for name in shelf.names() for line in shelf.baselines(name)]


# the oracles in the fast tier, every policy in the slow one; a judge makes even the first slow
@pytest.mark.parametrize(
    ("name", "line"),
    [
        pytest.param(
            name,
            line,
            id=f"{name}-{line.policy}",
            marks=() if line.policy == "oracle" and name != "judged_rewrite" else pytest.mark.slow,
        )
        for name, line in LINES
    ],
)
def test_a_baseline_is_what_its_readme_says(name: str, line: shelf.Baseline) -> None:
    with open_environment(name) as env:
        assert shelf.measure(env, line.policy, POLICIES[name][line.policy], line.prompts, line.rollouts) == line


def after_a_thought(policy: Policy) -> Policy:
    def said(turn: shelf.Turn) -> Any:
        answer, thought = policy(turn), "<think>\nRed <answer>7</answer> or (6)?\n</think>\n\n"
        if isinstance(answer, str):
            return thought + answer
        return {**answer, "content": thought + (answer.get("content") or "")}

    return said


# a base model that goes on with a text has no thoughts
THINKING = [name for name in shelf.names() if name != "complete_sequence"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "judged_rewrite" else name for name in THINKING]
)
def test_a_thought_that_a_server_leaves_in_the_text_costs_nothing(name: str) -> None:
    with open_environment(name) as env:
        assert shelf.reward_of(env, after_a_thought(POLICIES[name]["oracle"]), prompts=5) == pytest.approx(1.0)


def test_the_guide_lists_every_package_with_its_baseline() -> None:
    text = (shelf.ENVIRONMENTS.parent / "docs" / "guides" / "shelf.md").read_text()
    listed = re.findall(r"^\| `([\w-]+)` \|.*\| `(\w+)` ([\d.]+) \|$", text, re.MULTILINE)
    assert {name for name, _, _ in listed} == {name.replace("_", "-") for name in shelf.names()}
    for name, policy, reward in listed:
        rewards = {line.policy: line.reward for line in shelf.baselines(name.replace("-", "_"))}
        assert rewards[policy] == reward, name


@pytest.mark.parametrize("name", shelf.names())
def test_the_table_has_every_policy_and_tells_good_from_weak(name: str) -> None:
    lines = {line.policy: line for line in shelf.baselines(name)}
    assert list(lines) == list(POLICIES[name])
    assert lines["oracle"].reward == "1.000"
    weakest = min(float(line.reward) for line in lines.values())
    assert weakest <= 0.26
    assert min(line.prompts for line in lines.values()) >= 20
