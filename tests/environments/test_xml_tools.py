"""xml_tools: calls in the text are answered, also those that cannot be, and an answer ends the rollout."""

from __future__ import annotations

import pytest
import shelf
from shelf import Turn
from shelf_policies import tagged

import verifiers as vf
from verifiers.rollouts.rollout import Rollout


def play(*messages: str, max_turns: int = 8) -> Rollout:
    """One rollout; "ITEM" stands for something that the shop has, "ANSWER" for the right answer."""

    def policy(turn: Turn) -> str:
        item = next(iter(turn.row["info"]["shop"]))
        return messages[min(turn.number, len(messages) - 1)].replace("ITEM", item).replace("ANSWER", turn.answer)

    (rollout,) = shelf.play(vf.load_environment("xml-tools", max_turns=max_turns), policy, prompts=1)
    return rollout


def results(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.completion if message["role"] == "user"]


@pytest.mark.parametrize("name", ["price", "discount", "stock"])
def test_a_tool_tells_of_the_rows_own_shop(name: str) -> None:
    rollout = play(f'<tool>{{"name": "{name}", "args": {{"item": "ITEM"}}}}</tool>', "<answer>ANSWER</answer>")
    shop = rollout.info["shop"]
    assert results(rollout) == [f"<result>{shop[next(iter(shop))][name]}</result>"]
    assert (rollout.reward, rollout.metrics["tool_calls"], rollout.metrics["tool_errors"]) == (1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("price(ITEM)", "a call is JSON with name"),
        ('{"name": "buy", "args": {}}', "one of price, discount, stock"),
        ("[" * 100_000, "a call is JSON with name"),
        ('{"name": "price"}', "price: missing a required argument: 'item'"),
        ('{"name": "price", "args": {"item": "ITEM", "shop": {}}}', "price: multiple values for argument 'shop'"),
        ('{"name": "price", "args": {"item": "yacht"}}', "the shop has only"),
    ],
    ids=lambda value: value[:30],
)
def test_a_call_that_cannot_be_is_told_why(call: str, told: str) -> None:
    rollout = play(tagged("tool", call), "<answer>0</answer>")
    (result,) = results(rollout)
    assert result.startswith("<result>error: ")
    assert told in result
    assert (str(rollout.outcome), rollout.metrics["tool_errors"]) == ("completed", 1.0)


def test_a_message_with_neither_is_asked_for_one_of_both() -> None:
    rollout = play("Let me think.", "<answer>ANSWER</answer>")
    assert results(rollout) == ["Write either <tool>...</tool> or <answer>...</answer>."]
    assert rollout.reward == 1.0


def test_the_last_turn_may_answer() -> None:
    call = '<tool>{"name": "price", "args": {"item": "ITEM"}}</tool>'
    assert play(call, call, "<answer>ANSWER</answer>", max_turns=3).reward == 1.0
    rollout = play(call, max_turns=3)
    assert (rollout.turns, rollout.reward) == (3, 0.0)


def test_separators_of_thousands_do_not_count() -> None:
    env = vf.load_environment("xml-tools")
    assert shelf.reward_of(env, lambda turn: f"<answer>{int(turn.answer):,}</answer>") == 1.0
