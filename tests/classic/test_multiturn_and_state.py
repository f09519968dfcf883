"""Sections on the state and `MultiTurnEnv`: overrides of either generation, sync and async, called as they were."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
from datasets import Dataset

import verifiers as vf
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient
from verifiers.types import Outcome, RolloutKey, as_message

Rows = list[dict[str, Any]]
ASK = [{"role": "user", "content": "start"}]
MORE = [{"role": "user", "content": "more"}]


def contents(messages: Any) -> list[Any]:
    return [message["content"] for message in messages]


async def run(env: Any, client: FakeClient, **request: Any) -> Rollout:
    """One rollout by the modern runner, scored."""
    runner = Run(env, ClientBackend(client), "m", {"temperature": 0.5})
    group = await runner.run_group([RolloutRequest(RolloutKey(0, 4, 0), **{"prompt": ASK, **request})])
    return group.rollouts[0]


class Talks(vf.MultiTurnEnv):
    def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return MORE


# -- the state -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second_way", [False, True])
async def test_the_state_has_the_keys_of_both_generations(client: FakeClient, rows: Rows, second_way: bool) -> None:
    env = Talks(max_turns=2, dataset=rows)
    if second_way:
        state = await env.rollout({"prompt": ASK, "example_id": 3, "answer": "a", "info": {"k": 1}}, client, "m")
    else:
        completion, state = await env.rollout(client, "m", ASK, "a", "default", {"k": 1})
        assert (len(completion), state["completion"]) == (3, [])
    first = {"id", "prompt", "completion", "answer", "task", "info", "responses", "turn", "timing"}
    second = {
        "input", "trajectory", "trajectory_id", "is_completed", "is_truncated", "stop_condition", "reward",
        "metrics", "error", "client", "model", "sampling_args", "oai_tools", "tool_defs", "example_id",
        "final_env_response",
    }  # fmt: skip
    assert set(state) == first | second
    assert set(state["timing"]) == {"generation_ms", "scoring_ms", "total_ms"}
    step = {"prompt", "completion", "response", "tokens", "reward", "advantage", "is_truncated", "extras"}
    step.add("trajectory_id")
    assert all(set(item) == step for item in state["trajectory"])
    assert (state["turn"], len(state["responses"]), state["is_completed"]) == (2, 2, True)
    assert (state["input"]["prompt"], state["input"]["answer"], state["info"]) == (ASK, "a", {"k": 1})


async def test_a_steps_tokens_are_the_servers(client: FakeClient, rows: Rows) -> None:
    asked = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    for env, prompt in (
        (vf.SingleTurnEnv(dataset=rows), ASK),
        (vf.SingleTurnEnv(dataset=rows, message_type="completion"), "start"),
    ):
        arguments = asked if isinstance(prompt, list) else {**asked, "logprobs": 0}
        _, state = await env.rollout(client, "m", prompt, sampling_args=arguments)  # type: ignore[misc]
        tokens = state["trajectory"][0]["tokens"]
        response = state["responses"][0]
        assert tokens["completion_ids"] == response.choices[0].token_ids
        assert tokens["prompt_ids"] == (response.prompt_token_ids or response.choices[0].prompt_token_ids)
        assert len(tokens["completion_logprobs"]) == len(tokens["completion_ids"]) == len(tokens["completion_mask"])
        assert (tokens["is_truncated"], tokens["overlong_prompt"]) == (False, False)


# -- messages ----------------------------------------------------------------------------------------------------


async def test_messages_are_dicts_that_answer_to_attributes(rows: Rows) -> None:
    answer = {"content": "hm", "tool_calls": [{"id": "c1", "name": "add", "arguments": {"a": 1}}]}
    seen: list[Any] = []

    class Looks(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            seen.append(messages)
            return [vf.ToolMessage(content="2", tool_call_id="c1")]

    completion, _ = await Looks(max_turns=2, dataset=rows).rollout(FakeClient(answer), "m", ASK)
    prompt, said = seen[0]
    assert (prompt.role, prompt.content, prompt.tool_calls, prompt.name) == ("user", "start", None, None)
    call = said.tool_calls[0]
    assert (call.id, call.function.name, call.function.arguments) == ("c1", "add", '{"a": 1}')
    assert (call.name, call.arguments, said["tool_calls"][0].function.name) == ("add", '{"a": 1}', "add")
    assert (type(prompt), type(said), type(completion[1])) == (vf.UserMessage, vf.AssistantMessage, vf.ToolMessage)
    with pytest.raises(AttributeError, match="no field 'colour'"):
        _ = said.colour


def test_a_message_record_is_plain_data_to_json_tables_comparisons_and_copies() -> None:
    plain = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    message = as_message(plain)
    assert message == plain
    assert message.content[0].text == "a"
    message.content[0].text = "b"
    assert message["content"][0]["text"] == "b"
    assert json.loads(json.dumps(message)) == {"role": "user", "content": [{"type": "text", "text": "b"}]}
    assert Dataset.from_list([{"prompt": [message]}])[0]["prompt"][0]["content"][0]["text"] == "b"
    assert type(message.model_dump()["content"][0]) is dict
    twin = copy.deepcopy(message)
    twin["content"][0]["text"] = "c"
    assert message["content"][0]["text"] == "b"
    message.role = "assistant"
    assert message["role"] == "assistant"


class Said(pydantic.BaseModel):
    role: str = "user"
    content: str = "more"
    name: str | None = None


@pytest.mark.parametrize(
    "reply",
    [
        MORE,
        [vf.UserMessage(content="more")],
        [Said()],
        Said(),
        {"role": "user", "content": "more"},
        "more",
        [SimpleNamespace(role="user", content="more")],
        (MORE, None),
    ],
)
async def test_a_reply_may_be_messages_of_any_kind(client: FakeClient, rows: Rows, reply: Any) -> None:
    class Replies(vf.MultiTurnEnv):
        def env_response(self, messages: Any, state: Any) -> Any:  # type: ignore[override]
            return reply

    completion, _ = await Replies(max_turns=2, dataset=rows).rollout(client, "m", ASK)
    assert contents(completion) == ["re: start", "more", "re: more"]
    assert completion[1] == {"role": "user", "content": "more"}
    assert client.requests[1].body["messages"] == [*ASK, {"role": "assistant", "content": "re: start"}, *MORE]


# -- overrides of the second generation ------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
async def test_every_override_of_the_second_generation_is_called_sync_or_async(
    client: FakeClient, rows: Rows, is_async: bool
) -> None:
    called: list[str] = []

    def sync_or_async(name: str, work: Any) -> Any:
        def sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return work(self, *args, **kwargs)

        async def later(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return work(self, *args, **kwargs)

        return later if is_async else sync

    def render(self: Any, state: Any) -> None:
        state["completion"] = [*state["trajectory"][-1]["completion"], {"role": "user", "content": "mine"}]

    def prompt_messages(self: Any, state: Any) -> Any:
        return [{"role": "user", "content": f"ask {len(state['trajectory'])}"}]

    methods = {
        "setup_state": lambda self, state: state.update(mine=1),
        "get_prompt_messages": prompt_messages,
        "render_completion": render,
        "add_trajectory_step": lambda self, state, step: state["trajectory"].append({**step, "reward": 1.0}),
    }
    env: Any = type("Env", (Talks,), {name: sync_or_async(name, work) for name, work in methods.items()})(
        max_turns=2, dataset=rows
    )
    state = await env.rollout({"prompt": ASK}, client, "m")
    turn = ["get_prompt_messages", "add_trajectory_step"]
    assert called == ["setup_state", *turn, *turn, "render_completion"]
    assert [request.body["messages"][0]["content"] for request in client.requests] == ["ask 0", "ask 1"]
    assert contents(state["completion"]) == ["re: ask 1", "mine"]
    assert ([step["reward"] for step in state["trajectory"]], state["mine"]) == ([1.0, 1.0], 1)


async def test_a_model_call_may_be_overridden_in_either_generations_way(client: FakeClient, rows: Rows) -> None:
    class First(Talks):
        async def get_model_response(self, client: Any, model: str, prompt: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            assert set(kwargs) == {"oai_tools", "sampling_args", "message_type"}
            return await super().get_model_response(client, model, [*prompt, *MORE], **kwargs)

    class Second(Talks):
        async def get_model_response(self, state: Any, prompt: Any, **kwargs: Any) -> Any:  # type: ignore[override]
            state["sampling_args"] = {**state["sampling_args"], "temperature": 0.1 * state["turn"]}
            return await super().get_model_response(state, [*prompt, *MORE], **kwargs)

    for kind in (First, Second):
        rollout = await run(kind(max_turns=2, dataset=rows), client)
        assert (rollout.outcome, contents(rollout.completion)) == (
            Outcome.COMPLETED,
            ["re: more", "more", "re: more"],
        )
    sent = [request.body["temperature"] for request in client.requests]
    assert sent == [0.5, 0.5, 0.0, 0.1]


@pytest.mark.parametrize("is_async", [False, True])
async def test_is_completed_may_take_the_state_alone(client: FakeClient, rows: Rows, is_async: bool) -> None:
    class Sync(Talks):
        def is_completed(self, state: Any, **kwargs: Any) -> bool:  # type: ignore[override]
            return len(state["trajectory"]) == 2

    class Async(Talks):
        async def is_completed(self, state: Any) -> bool:  # type: ignore[override]
            return await super().is_completed(state) or len(state["trajectory"]) == 2

        @vf.stop
        async def never(self, state: Any) -> bool:
            return False

    state = await (Async if is_async else Sync)(dataset=rows).rollout({"prompt": ASK}, client, "m")
    assert (state["turn"], state["stop_condition"]) == (2, "is_completed")


async def test_the_base_classes_answer_both_ways(client: FakeClient, rows: Rows) -> None:
    class Env(Talks):
        @vf.stop
        async def enough(self, state: Any) -> bool:
            return bool(state.get("enough"))

    env = Env(max_turns=2, dataset=rows)
    state = await env.init_state({"prompt": ASK}, client, "m")
    assert (await env.is_completed(ASK, state), await env.is_completed(state)) == (False, False)
    state["enough"] = True
    assert (await env.is_completed(ASK, state), await env.is_completed(state)) == (True, True)
    assert state["stop_condition"] == "enough"
    state["trajectory"] = [{}, {}]
    assert await env.is_completed(messages=ASK, state=state)
    assert env.max_turns_reached(state)
    assert await env.max_turns_reached(state) is True
    assert await env.prompt_too_long(state) is False
    single = vf.SingleTurnEnv(dataset=rows)
    assert not await single.is_completed([], vf.State(responses=[]))
    assert await single.is_completed(state)


async def test_the_next_prompt_and_the_completion_can_be_asked_for(client: FakeClient, rows: Rows) -> None:
    env = Talks(max_turns=1, dataset=rows)
    state = await env.init_state({"prompt": ASK}, client, "m")
    assert await env.get_prompt_messages(state) == ASK
    state = await env.rollout({"prompt": ASK}, client, "m")
    assert contents(await env.get_prompt_messages(state)) == ["start", "re: start", "more"]
    state["completion"] = None
    await env.render_completion(state)
    assert contents(state["completion"]) == ["re: start"]


async def test_a_prompt_that_setup_draws_is_the_rollouts_prompt(client: FakeClient, rows: Rows) -> None:
    class Env(Talks):
        async def setup_state(self, state: Any, **kwargs: Any) -> Any:
            state["prompt"] = [{"role": "user", "content": "drawn"}]
            state["answer"] = "secret"
            return state

    def right(answer: str, prompt: Any) -> float:
        return float((answer, prompt[0]["content"]) == ("secret", "drawn"))

    env = Env(max_turns=1, dataset=rows, rubric=vf.Rubric([right]))
    rollout = await run(env, client)
    assert (contents(rollout.prompt), rollout.answer, rollout.reward) == (["drawn"], "secret", 1.0)
    assert contents(rollout.completion) == ["re: drawn"]
    results = await env.a_generate({"prompt": [ASK], "answer": ["x"]}, client, "m")
    assert (results.answer, results.reward) == (["secret"], [1.0])


# -- errors and ends ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["setup_state", "env_response", "stored"])
async def test_an_error_of_the_second_generation_stands_in_the_state_and_is_an_environment_error(
    client: FakeClient, rows: Rows, where: str
) -> None:
    left: list[int] = []

    class Env(vf.MultiTurnEnv):
        async def setup_state(self, state: Any, **kwargs: Any) -> Any:
            if where == "setup_state":
                raise vf.InfraError("no room")
            return state

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            if where == "env_response":
                raise vf.ToolError("no room")
            state["error"] = vf.InfraError("no room")
            return MORE

        @vf.cleanup
        async def leave(self, state: Any) -> None:
            left.append(state["turn"])

    env = Env(dataset=rows)
    state = await env.rollout({"prompt": ASK}, client, "m")
    assert (str(state["error"]), state["stop_condition"], state["is_completed"]) == ("no room", "has_error", True)
    rollout = await run(env, client)
    assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    turns = 0 if where == "setup_state" else 1
    assert contents(rollout.completion)[:1] == ["re: start"] * turns
    assert left == [turns, turns]


async def test_the_first_generations_call_raises_what_is_raised(client: FakeClient, rows: Rows) -> None:
    class Env(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            raise vf.ToolError("no room")

    with pytest.raises(vf.ToolError, match="no room"):
        await Env(dataset=rows).rollout(client, "m", ASK)


async def test_a_text_under_error_is_the_environments_own_business(client: FakeClient, rows: Rows) -> None:
    class Env(Talks):
        async def setup_state(self, state: Any, **kwargs: Any) -> Any:
            state["error"] = "none yet"
            return state

    rollout = await run(Env(max_turns=2, dataset=rows, rubric=vf.Rubric([lambda completion: 1.0])), client)
    assert (rollout.outcome, rollout.turns, rollout.reward) == (Outcome.COMPLETED, 2, 1.0)


async def test_an_overlong_prompt_is_truncated_wherever_it_is_raised(client: FakeClient, rows: Rows) -> None:
    class Env(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            raise vf.OverlongPromptError("too long")

    rollout = await run(Env(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0])), client)
    assert (rollout.outcome, rollout.reward) == (Outcome.TRUNCATED, 1.0)
    assert (rollout.state["error"], rollout.state["stop_condition"]) == (None, "prompt_too_long")


async def test_reward_functions_may_ask_the_same_server_and_are_not_trained_on(
    client: FakeClient, rows: Rows
) -> None:
    async def judged(state: Any) -> float:
        asked = await state["client"].chat.completions.create(model=state["model"], messages=MORE)
        return float(len(asked.choices[0].message.content))

    rollout = await run(vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([judged])), client, seed=5)
    assert (rollout.reward, rollout.turns, len(client.requests)) == (8.0, 1, 2)
    assert ["seed" in request.body for request in client.requests] == [True, False]
    assert rollout.usage.completion_tokens == rollout.state["responses"][0].usage.completion_tokens
    assert "client" not in rollout.state


async def test_the_single_turn_environments_reply_is_the_classic_one(rows: Rows) -> None:
    state = vf.State()
    reply = await vf.SingleTurnEnv(dataset=rows).env_response([], state)
    assert reply == ([{"role": "user", "content": ""}], state)


async def test_a_class_that_is_no_environment_may_bring_the_methods(client: FakeClient, rows: Rows) -> None:
    class Mixin:
        async def init_state(self, *args: Any) -> Any:
            return {**await super().init_state(*args), "mine": 1}  # type: ignore[misc]

        def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
            return len(messages) > 2

    class Env(Mixin, Talks):  # type: ignore[misc]
        pass

    rollout = await run(Env(dataset=rows), client)
    assert (rollout.turns, rollout.state["mine"], rollout.state["stop_condition"]) == (1, 1, "is_completed")
