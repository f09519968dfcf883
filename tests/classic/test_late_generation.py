"""Releases 0.1.10 to 0.1.14: what packages written for them rely on beside what the second generation has."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

import pytest

import verifiers as vf
from verifiers.inference.wire import WireObject
from verifiers.testing import FakeClient

Rows = list[dict[str, Any]]


class SevenForEach(vf.Rubric):
    """Scores groups in its own way, as the second generation's packages do."""

    async def score_group(self, states: Any, score_sem: Any = None) -> Any:
        for state in states:
            state["reward"], state["metrics"] = 7.0, {"of_group": float(len(states))}


@pytest.mark.parametrize("wrap", ["alone", "in a rubric group", "in an environment group"])
async def test_a_rubric_that_scores_groups_itself_scores_the_classic_calls(
    wrap: str, rows: Rows, client: FakeClient
) -> None:
    rubric: vf.Rubric = SevenForEach()
    env: vf.Environment = vf.SingleTurnEnv(
        dataset=rows, rubric=vf.RubricGroup([vf.Rubric(), rubric]) if wrap == "in a rubric group" else rubric
    )
    if wrap == "in an environment group":
        env = vf.EnvGroup([env])
    for interleaved in (True, False):
        results = await env.evaluate(client, "m", rollouts_per_example=2, interleave_scoring=interleaved)
        assert results.reward == [7.0] * 6
        assert results.metrics["of_group"] == [2.0] * 6


# -- tools ------------------------------------------------------------------------------------------------------

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SHOUT = {"name": "shout", "description": "Say it loudly.", "parameters": PARAMETERS}
SENT = {"type": "function", "function": SHOUT}


async def first_request(env: vf.Environment, client: FakeClient) -> dict[str, Any]:
    await env.evaluate(client, "m", num_examples=1)
    return client.requests[0].body


@pytest.mark.parametrize("form", ["object", "fields", "openai"])
async def test_tool_defs_are_offered_to_the_policy(form: str, rows: Rows, client: FakeClient) -> None:
    tool: Any = {"object": vf.Tool(**SHOUT), "fields": SHOUT, "openai": SENT}[form]
    env = vf.SingleTurnEnv(dataset=rows, tool_defs=[tool])
    assert [(item.name, item["name"], item.parameters) for item in env.tool_defs or ()] == [
        ("shout", "shout", PARAMETERS)
    ]
    assert isinstance((env.tool_defs or [])[0], vf.Tool)
    assert (await first_request(env, client))["tools"] == [SENT]


async def test_tool_defs_of_a_row_win_over_those_of_the_environment(rows: Rows, client: FakeClient) -> None:
    env = vf.SingleTurnEnv(dataset=[{**row, "info": {"tool_defs": [SHOUT]}} for row in rows], tool_defs=[])
    assert (await first_request(env, client))["tools"] == [SENT]


@pytest.mark.parametrize("how", ["assigned", "appended", "the first generation's name"])
async def test_tool_defs_set_in_the_state_are_those_of_the_next_call(
    how: str, rows: Rows, client: FakeClient
) -> None:
    class OwnTools(vf.SingleTurnEnv):
        async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
            if how == "appended":
                state["tool_defs"].append(vf.Tool(**SHOUT))
            else:
                state["tool_defs" if how == "assigned" else "oai_tools"] = [vf.Tool(**SHOUT)]
            return state

    assert (await first_request(OwnTools(dataset=rows), client))["tools"] == [SENT]


async def test_a_tool_added_to_tool_defs_by_hand_is_offered_beside_the_functions(
    rows: Rows, client: FakeClient
) -> None:
    def add(a: int) -> int:
        """Add."""
        return a

    env = vf.ToolEnv(tools=[add], dataset=rows)
    assert [tool.name for tool in env.tool_defs or ()] == ["add"]
    assert env.oai_tools == env.tool_defs
    (env.tool_defs or []).append(vf.Tool(**SHOUT))
    sent = (await first_request(env, client))["tools"]
    assert [tool["function"]["name"] for tool in sent] == ["add", "shout"]
    assert (env.tool_defs or [])[1].model_dump() == {**SHOUT, "strict": None}


async def test_tool_defs_given_to_the_model_call_are_sent(rows: Rows, client: FakeClient) -> None:
    class Asks(vf.SingleTurnEnv):
        async def get_model_response(self, state: vf.State, prompt: vf.Messages, **kwargs: Any) -> Any:  # type: ignore[override]
            return await super().get_model_response(state, prompt, tool_defs=[vf.Tool(**SHOUT)], **kwargs)

    assert (await first_request(Asks(dataset=rows), client))["tools"] == [SENT]


# -- turns and time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begins", [True, False])
async def test_an_environment_that_counts_turns_itself_still_gets_all_of_them(
    begins: bool, rows: Rows, client: FakeClient
) -> None:
    class Counts(vf.MultiTurnEnv):
        async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
            if begins:
                state["turn"] = 0
            return state

        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            state["turn"] += 1
            return [{"role": "user", "content": "more"}]

    results = await Counts(dataset=rows, max_turns=8).evaluate(client, "m", num_examples=1)
    (state,) = results.state
    assert len(state["trajectory"]) == 8
    assert (type(state["turn"]), state["turn"]) == (int, 7 if begins else 8)


async def test_timeout_seconds_ends_a_rollout_with_what_was_said_and_it_is_scored(
    rows: Rows, pass_time: Callable[[float], None]
) -> None:
    class Slow(vf.MultiTurnEnv):
        async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
            pass_time(61)
            await asyncio.sleep(3600)
            return []

    env = Slow(dataset=rows, timeout_seconds=60, rubric=vf.Rubric([lambda completion: float(len(completion))]))
    results = await env.evaluate(FakeClient("hello"), "m", num_examples=1)
    (state,) = results.state
    assert (state["timed_out"], state["stop_condition"], results.reward) == (True, "timeout_reached", [1.0])
    assert results.completion[0][0]["content"] == "hello"


async def test_a_timeout_of_the_environments_own_is_no_end_by_timeout_seconds(rows: Rows, client: FakeClient) -> None:
    class Fails(vf.SingleTurnEnv):
        async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
            raise TimeoutError("the game server")

    with pytest.raises(TimeoutError, match="the game server"):
        await Fails(dataset=rows, timeout_seconds=60).evaluate(client, "m", num_examples=1)


# -- datasets that are built when they are first used -----------------------------------------------------------


async def test_a_dataset_given_as_a_function_is_built_once_when_it_is_first_used(
    rows: Rows, client: FakeClient
) -> None:
    built: list[str] = []

    def train() -> Rows:
        built.append("train")
        return rows

    def eval_rows() -> Rows:
        built.append("eval")
        return rows[:1]

    env = vf.SingleTurnEnv(dataset=train, eval_dataset=eval_rows, system_prompt="Be brief.")
    assert built == []
    results = await env.evaluate(client, "m")
    assert (built, len(results.prompt), results.prompt[0][0]["content"]) == (["eval"], 1, "Be brief.")
    assert len(env.get_dataset(n=2)) == 2
    assert env.build_dataset() is env.dataset
    assert built == ["eval", "train"]


def test_groups_and_late_assignments_take_datasets_as_functions(rows: Rows) -> None:
    env = vf.SingleTurnEnv(dataset=lambda: rows)
    group = vf.EnvGroup([env, vf.SingleTurnEnv(eval_dataset=lambda: rows)], env_names=["a", "b"])
    assert list(group.get_dataset()["task"]) == ["a"] * 3
    assert list(group.get_eval_dataset()["task"]) == ["a"] * 3 + ["b"] * 3
    env.dataset = lambda: rows[:1]
    assert len(env.get_dataset()) == 1


# -- tool calls -------------------------------------------------------------------------------------------------


def test_a_functions_definition_is_a_tool() -> None:
    from verifiers.utils.tool_utils import convert_func_to_oai_tool, convert_func_to_tool_def

    def add(a: int) -> int:
        """Add one.

        Args:
            a: what to add to.
        """
        return a + 1

    tool = convert_func_to_tool_def(add)
    assert isinstance(tool, vf.Tool)
    assert (tool.name, tool.description, tool.strict) == ("add", "Add one.", True)
    assert tool == convert_func_to_oai_tool(add)
    tool.parameters["properties"].pop("a")
    tool.name = "plus"
    assert (tool["function"]["name"], tool["function"]["parameters"]["properties"]) == ("plus", {})


# -- results and errors -----------------------------------------------------------------------------------------


class Breaks(vf.SingleTurnEnv):
    """Fails on the row q1."""

    error: Exception = vf.SandboxError("gone")

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        if state["prompt"][-1]["content"] == "q1":
            raise self.error
        return state


@pytest.mark.parametrize("interleaved", [True, False])
async def test_an_error_of_one_rollout_is_kept_in_its_state_and_the_others_have_their_results(
    interleaved: bool, rows: Rows, client: FakeClient
) -> None:
    env = Breaks(dataset=rows, rubric=vf.Rubric([lambda completion: float(len(completion))]))
    results = await env.evaluate(client, "m", interleave_scoring=interleaved)
    assert results.reward == [1.0, None, 1.0]
    assert [type(state["error"]) for state in results.state] == [type(None), vf.SandboxError, type(None)]
    assert [output["error"] is None for output in results.outputs] == [True, False, True]
    assert results.metadata.avg_error == pytest.approx(1 / 3)


async def test_results_have_the_fields_of_the_second_generation(rows: Rows, client: FakeClient) -> None:
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([lambda completion: 0.5]), env_id="my-env")
    results = await env.evaluate(client, "m", {"temperature": 0.5}, rollouts_per_example=2)
    assert results["example_id"] == [0, 1, 2, 0, 1, 2]
    assert results["stop_conditions"] == [state["stop_condition"] for state in results["state"]]
    assert results["is_truncated"] == [False] * 6
    assert results["metrics"]["num_turns"] == [1.0] * 6
    output = results["outputs"][4]
    assert (output["example_id"], output["reward"], output["num_turns"], output["error"]) == (1, 0.5, 1.0, None)
    meta = results["metadata"]
    assert (meta["env_id"], meta["model"], meta["num_examples"], meta["rollouts_per_example"]) == (
        "my-env",
        "m",
        3,
        2,
    )
    assert (meta["avg_reward"], meta["sampling_args"]["temperature"]) == (0.5, 0.5)
    ids = {state["trajectory_id"] for state in results["state"]}
    assert len(ids) == 6
    assert {step["trajectory_id"] for state in results["state"] for step in state["trajectory"]} == ids


async def test_an_overridden_a_generate_is_given_the_rows_of_a_dataset(rows: Rows, client: FakeClient) -> None:
    seen: list[Any] = []

    class Reads(vf.SingleTurnEnv):
        async def a_generate(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(row["answer"] for row in inputs)
            return await super().a_generate(inputs, *args, **kwargs)

    env = Reads(dataset=rows, rubric=vf.Rubric([lambda completion: 0.5]))
    results = await env.evaluate(client, "m", rollouts_per_example=2)
    assert seen == ["a0", "a1", "a2"] * 2
    assert results.reward == [0.5] * 6


@pytest.mark.parametrize(
    ("longest", "kept", "is_overlong", "is_cut"),
    [(None, (2, 3), False, False), (5, (2, 3), False, False), (4, (2, 2), False, True), (1, (1, 0), True, True)],
)
async def test_the_tokens_of_a_response_are_cut_at_the_longest_sequence(
    longest: int | None, kept: tuple[int, int], is_overlong: bool, is_cut: bool
) -> None:
    parse = importlib.import_module("verifiers.utils.response_utils").parse_response_tokens
    entries = [{"token": f"token_id:{number}", "logprob": -0.5} for number in (3, 4, 5)]
    choice = {"token_ids": [3, 4, 5], "logprobs": {"content": entries}, "finish_reason": "stop", "message": {}}
    tokens = await parse(WireObject({"prompt_token_ids": [1, 2], "choices": [choice]}), "chat", longest)
    assert tuple(len(tokens[f"{part}_ids"]) for part in ("prompt", "completion")) == kept
    assert [len(tokens[name]) for name in ("completion_mask", "completion_logprobs")] == [kept[1]] * 2
    assert (tokens["overlong_prompt"], tokens["is_truncated"]) == (is_overlong, is_cut)


async def test_a_response_has_its_message_with_tool_calls_and_the_reason_it_ended(rows: Rows) -> None:
    seen: list[Any] = []

    class Asks(vf.SingleTurnEnv):
        async def get_model_response(self, state: vf.State, prompt: vf.Messages, **kwargs: Any) -> Any:  # type: ignore[override]
            seen.append(await super().get_model_response(state, prompt, **kwargs))
            return seen[-1]

    policy = FakeClient({"content": "hm", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]})
    await Asks(dataset=rows[:1]).evaluate(policy, "m")
    (response,) = seen
    message = response.message
    assert (message.content, message.finish_reason, message.is_truncated) == ("hm", "tool_calls", False)
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("add", '{"a": 1}')]
    assert "message" not in response.model_dump()
