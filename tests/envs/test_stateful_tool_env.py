"""StatefulToolEnv: arguments that the environment supplies and the policy neither sees nor sets."""

from __future__ import annotations

from typing import Any

import pytest

import verifiers as vf
from verifiers.testing import FakeClient

ROWS = [{"question": "q", "answer": "a"}]
ASK = [{"role": "user", "content": "q"}]


class Account:
    """A type that no JSON can give."""

    def __init__(self, balance: int) -> None:
        self.balance = balance


def deposit(amount: int, account: Account, log: list[str]) -> str:
    """Pay in.

    Args:
        amount: how much
        account: whose
        log: internal
    """
    account.balance += amount
    log.append(f"+{amount}")
    return f"{account.balance}"


class Bank(vf.StatefulToolEnv):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(eval_dataset=ROWS, **kwargs)
        self.add_tool(deposit, args_to_skip=["account", "log"])

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        state["account"], state["log"] = Account(10), []
        return state

    async def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: Any, state: vf.State, **kwargs: Any
    ) -> dict[str, Any]:
        assert messages[-1]["tool_calls"]
        return {**tool_args, "account": state["account"], "log": state["log"]}


def calls(*arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": "deposit", "arguments": given} for given in arguments]}


async def test_hidden_arguments_reach_the_tool_as_they_are_and_the_policy_never_hears_of_them() -> None:
    env, client = Bank(), FakeClient([calls({"amount": "5"}), calls({"amount": 1}), "done"])
    completion, state = await env.rollout(client, "m", ASK)
    assert [message["content"] for message in completion if message["role"] == "tool"] == ["15", "16"]
    assert (state["account"].balance, state["log"]) == (16, ["+5", "+1"])
    function = client.requests[0].body["tools"][0]["function"]
    assert list(function["parameters"]["properties"]) == ["amount"]
    assert function["parameters"]["required"] == ["amount"]
    assert "$defs" not in function["parameters"]
    assert env.skipped_args == {"deposit": ["account", "log"]}


@pytest.mark.parametrize("name", ["account", "log"])
async def test_the_policy_cannot_set_a_hidden_argument(name: str) -> None:
    completion, state = await Bank().rollout(FakeClient([calls({"amount": 5, name: "mine"}), "done"]), "m", ASK)
    assert f"{name} is not a parameter" in completion[1]["content"]
    assert state["account"].balance == 10


async def test_bad_calls_are_told_before_anything_is_supplied() -> None:
    class Counts(Bank):
        supplied = 0

        def update_tool_args(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            type(self).supplied += 1
            _, tool_args, _, state = args
            return {**tool_args, "account": state["account"], "log": state["log"]}

    answers = [calls("{", {"amount": "much"}, {"amount": 2}), "done"]
    completion, _ = await Counts().rollout(FakeClient(answers), "m", ASK)
    first, second, third = [message["content"] for message in completion[1:4]]
    assert "not valid JSON" in first
    assert "amount: Input should be a valid integer" in second
    assert (third, Counts.supplied) == ("12", 2)


async def test_an_environment_that_supplies_nothing_is_an_error_and_not_a_tool_message() -> None:
    class Forgets(Bank):
        async def update_tool_args(self, tool_name: str, tool_args: Any, *args: Any, **kwargs: Any) -> Any:
            return tool_args

    class Leaves(vf.StatefulToolEnv):
        pass

    class ReturnsNothing(Bank):
        async def update_tool_args(self, *args: Any, **kwargs: Any) -> Any:
            return None

    client = FakeClient([calls({"amount": 1}), "done"])
    with pytest.raises(vf.ConfigError, match="hidden from the model and was not supplied"):
        await Forgets().rollout(client, "m", ASK)
    with pytest.raises(vf.ConfigError, match="return the arguments as a dict"):
        await ReturnsNothing().rollout(FakeClient([calls({"amount": 1})]), "m", ASK)
    env = Leaves(eval_dataset=ROWS)
    env.add_tool(deposit, args_to_skip=["account", "log"])
    with pytest.raises(NotImplementedError, match="Leaves must override update_tool_args"):
        await env.rollout(FakeClient([calls({"amount": 1})]), "m", ASK)
