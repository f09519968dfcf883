"""arithmetic_tools: values that are right, tools that refuse in words, and a native ToolEnv around them."""

from __future__ import annotations

import random
from typing import Any

import arithmetic_tools
import pytest
import shelf
from shelf import Turn
from shelf_policies import tagged

import verifiers as vf
from verifiers.rollouts.rollout import Rollout


def play(call: dict[str, Any]) -> Rollout:
    """One rollout that calls a tool once and then answers rightly."""

    def policy(turn: Turn) -> dict[str, Any] | str:
        return {"tool_calls": [call]} if turn.number == 0 else tagged("answer", turn.answer)

    (rollout,) = shelf.play(vf.load_environment("arithmetic-tools"), policy, prompts=1)
    return rollout


@pytest.mark.parametrize("steps", [2, 5, 20])
def test_expressions_have_as_many_operations_as_asked_for_and_their_value(steps: int) -> None:
    rng = random.Random(0)
    for _ in range(50):
        text, value = arithmetic_tools.make_expression(rng, steps)
        assert text.count("(") == steps
        assert eval(text.replace("mod", "%")) == value


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("add", {"a": 2, "b": 40}, "42"),
        ("remainder", {"a": 2, "b": 0}, "b must be 1 or more"),
        ("divide", {"a": 2, "b": 1}, "There is no tool 'divide'"),
        ("add", {"a": 2}, "b"),
    ],
)
def test_a_tool_says_its_result_or_what_is_wrong(name: str, arguments: dict[str, int], told: str) -> None:
    rollout = play({"name": name, "arguments": arguments, "id": "one"})
    (result,) = [message for message in rollout.completion if message["role"] == "tool"]
    assert result["tool_call_id"] == "one"
    assert told in result["content"]
    assert (rollout.reward, rollout.metrics["total_tool_calls"]) == (1.0, 1.0)


def test_the_answer_may_have_separators_of_thousands_but_must_be_in_the_last_message() -> None:
    env = vf.load_environment("arithmetic-tools")
    assert shelf.reward_of(env, lambda turn: tagged("answer", f"{int(turn.answer):,}".replace("-", "\u2212"))) == 1.0
    call = {"tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 1}}]}

    def answers_too_early(turn: Turn) -> dict[str, Any] | str:
        return {"content": tagged("answer", turn.answer), **call} if turn.number == 0 else "That was it."

    assert shelf.reward_of(env, answers_too_early) == 0.0
