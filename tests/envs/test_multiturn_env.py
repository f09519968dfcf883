"""MultiTurnEnv: the loop of policy and environment, for overrides of either generation, sync or async."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import verifiers as vf
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient, Fault
from verifiers.types import Outcome, RolloutKey

Rows = list[dict[str, Any]]
ASK = [{"role": "user", "content": "start"}]
MORE = [{"role": "user", "content": "more"}]


class TupleReply(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["seen"] = [*state.get("seen", []), len(messages)]
        return MORE, state


class NewStateReply(vf.MultiTurnEnv):
    def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return MORE, {"seen": [*state.get("seen", []), len(messages)]}


@pytest.mark.parametrize("kind", [TupleReply, NewStateReply])
@pytest.mark.parametrize("second_way", [False, True])
async def test_replies_of_either_generation_sync_or_async_carry_the_conversation_on(
    client: FakeClient, rows: Rows, kind: Any, second_way: bool
) -> None:
    env = kind(max_turns=3, dataset=rows)
    if second_way:
        state = await env.rollout({"prompt": ASK, "example_id": 1}, client, "m")
        completion = state["completion"]
    else:
        completion, state = await env.rollout(client, "m", ASK)
    assert [message["content"] for message in completion] == ["re: start", "more", "re: more", "more", "re: more"]
    assert [len(request.messages) for request in client.requests] == [1, 3, 5]
    assert state["seen"] == [2, 4]
    assert (state["turn"], len(state["responses"]), len(state["trajectory"])) == (3, 3, 3)
    assert [len(step["prompt"]) for step in state["trajectory"]] == [1, 3, 5]
    assert state["stop_condition"] == "max_turns_reached"


async def test_is_completed_is_asked_before_and_after_every_answer(client: FakeClient, rows: Rows) -> None:
    asked: list[int] = []

    class Counts(TupleReply):
        def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:  # type: ignore[override]
            asked.append(len(messages))
            return state["turn"] == 2

    _, state = await Counts(dataset=rows).rollout(client, "m", ASK)
    assert asked == [1, 2, 3, 4]
    assert state["stop_condition"] == "is_completed"


async def test_max_turns_holds_whatever_is_completed_says(client: FakeClient, rows: Rows) -> None:
    class Never(TupleReply):
        async def is_completed(self, messages: Any, state: Any, **kwargs: Any) -> bool:
            return False

    _, state = await Never(max_turns=2, dataset=rows).rollout(client, "m", ASK)
    assert state["turn"] == 2


async def test_keywords_of_the_call_reach_the_overrides(client: FakeClient, rows: Rows) -> None:
    seen: list[Any] = []

    class Curious(TupleReply):
        async def setup_state(self, state: Any, **kwargs: Any) -> Any:
            seen.append(kwargs)
            return state

        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            seen.append(kwargs)
            return MORE, state

    await Curious(max_turns=2, dataset=rows).rollout(client, "m", ASK, level=3)
    assert seen == [{"level": 3}, {"level": 3}]


class Stops(TupleReply):
    """Two ways to stop, and two things to tidy up."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.order: list[str] = []

    @vf.stop
    async def enough(self, state: Any) -> bool:
        self.order.append("enough")
        return bool(state["turn"] == 2)

    @vf.stop(priority=5)
    def first(self, state: Any) -> bool:
        self.order.append("first")
        return False

    @vf.cleanup
    async def last(self, state: Any) -> None:
        self.order.append(f"last {state['turn']}")

    @vf.cleanup(priority=5)
    def before(self, state: Any) -> None:
        self.order.append("before")


async def test_marked_methods_stop_the_rollout_and_tidy_up_in_order_of_priority(
    client: FakeClient, rows: Rows
) -> None:
    env = Stops(dataset=rows)
    _, state = await env.rollout(client, "m", ASK)
    assert (state["turn"], state["stop_condition"]) == (2, "enough")
    assert env.order == ["first", "enough"] * 4 + ["before", "last 2"]


async def test_every_cleanup_runs_when_the_rollout_or_another_cleanup_fails(rows: Rows) -> None:
    env = Stops(dataset=rows)
    with pytest.raises(Exception, match="scripted fault"):
        await env.rollout(FakeClient(faults=Fault(500)), "m", ASK)
    assert env.order[-2:] == ["before", "last 0"]

    class Careless(Stops):
        @vf.cleanup(priority=9)
        def breaks(self, state: Any) -> None:
            raise KeyError("lost")

    env = Careless(max_turns=1, dataset=rows)
    with pytest.raises(KeyError, match="lost"):
        await env.rollout(FakeClient(), "m", ASK)
    assert env.order[-2:] == ["before", "last 1"]


async def test_cleanup_runs_when_the_rollout_is_cancelled(rows: Rows) -> None:
    begun = asyncio.Event()

    async def hang(body: Any) -> str:
        begun.set()
        await asyncio.get_running_loop().create_future()
        return "never"

    env = Stops(dataset=rows)
    work = asyncio.create_task(env.rollout(FakeClient(hang), "m", ASK))
    await begun.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert env.order[-2:] == ["before", "last 0"]


@pytest.mark.parametrize("reply", [[], MORE])
async def test_a_final_env_response_ends_the_rollout_and_is_the_last_word(
    client: FakeClient, rows: Rows, reply: Any
) -> None:
    final = [{"role": "user", "content": "you won"}]

    class Wins(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            state["final_env_response"] = final
            return reply

    state = await Wins(dataset=rows).rollout({"prompt": ASK, "example_id": 0}, client, "m")
    assert [message["content"] for message in state["completion"]] == ["re: start", "you won"]
    assert (state["turn"], state["stop_condition"]) == (1, "final_env_response")


async def test_completion_mode_carries_one_text_on_and_knows_where_the_policy_speaks(
    client: FakeClient, rows: Rows
) -> None:
    class Continues(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return "|", state

    env = Continues(max_turns=2, dataset=rows, message_type="completion")
    completion, state = await env.rollout(client, "m", "a")
    assert [request.body["prompt"] for request in client.requests] == ["a", "are: a|"]
    assert completion == "re: a|re: are: a|"
    assert state["responses_start_idx"] == [0, 6]


async def test_a_prompt_that_grew_too_long_ends_the_rollout_without_an_error(rows: Rows) -> None:
    faults = [None, Fault(400, body={"error": {"message": "maximum context length"}})]
    env = TupleReply(dataset=rows)
    completion, state = await env.rollout(FakeClient("hm", faults=faults), "m", ASK)
    assert [message["content"] for message in completion] == ["hm", "more", ""]
    assert state["stop_condition"] == "prompt_too_long"


async def test_the_base_class_says_what_to_override(client: FakeClient, rows: Rows) -> None:
    with pytest.raises(TypeError, match="make a subclass of it that has an env_response"):
        vf.MultiTurnEnv(dataset=rows)

    class Silent(vf.MultiTurnEnv):
        pass

    with pytest.raises(NotImplementedError, match="Silent must override env_response"):
        await Silent(dataset=rows).rollout(client, "m", ASK)


async def test_an_override_may_wrap_the_rollout_in_either_generations_way(client: FakeClient, rows: Rows) -> None:
    class First(TupleReply):
        async def rollout(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            completion, state = await super().rollout(client, model, prompt, *args, **kwargs)
            return completion, {**state, "mine": 1}

    class Second(TupleReply):
        async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> Any:  # type: ignore[override]  # noqa: A002
            state = await super().rollout(input, client, model, sampling_args)
            return {**state, "mine": 1}

    for kind in (First, Second):
        runner = Run(kind(max_turns=2, dataset=rows), ClientBackend(client), "m", require_tokens=True)
        (rollout,) = await runner.play([RolloutRequest(RolloutKey(0, 9, 0), ASK)])
        assert (rollout.outcome, rollout.state["mine"], rollout.turns) == (Outcome.COMPLETED, 1, 2)
        assert (len(rollout.rows), rollout.forks) == (1, 0)


# -- one turn -----------------------------------------------------------------------------------------------------


async def test_sampling_arguments_and_a_rows_own_tools_reach_the_policy(client: FakeClient, rows: Rows) -> None:
    common, own = [{"function": {"name": "common"}}], [{"function": {"name": "own"}}]
    env = vf.SingleTurnEnv(dataset=rows, oai_tools=common)
    await env.rollout(client, "m", ASK, sampling_args={"temperature": 0.5})
    await env.rollout(client, "m", ASK, info={"oai_tools": own})
    assert [request.body["tools"] for request in client.requests] == [common, own]
    assert client.requests[0].body["temperature"] == 0.5
