"""An environment served as OpenEnv: its episodes are its own rollouts, and what fails is an error, never a reward."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

import verifiers as vf
from verifiers.inference.server_pool import backend_for
from verifiers.integrations.openenv import OpenEnvEnv
from verifiers.integrations.openenv_server import OpenEnvServer
from verifiers.rollouts.rollout import RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.server_process import bind, url_of
from verifiers.testing import FakeOpenAIServer
from verifiers.types import RolloutKey


class Guessing(vf.MultiTurnEnv):
    """Says whether a guess is too low, until it is right."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        if (guess := int(messages[-1]["content"])) == int(state["answer"]):
            state["right"] = True
            return []
        return [{"role": "user", "content": "more" if guess < int(state["answer"]) else "less"}]

    @vf.stop
    async def is_right(self, state: Any) -> bool:
        return bool(state.get("right"))


def guessing(reward: Callable[..., float] | None = None) -> Guessing:
    def found(state: Any) -> float:
        return 1 / state["turn"] if state.get("right") else 0.0

    rows = [{"question": f"Guess number {place}.", "answer": str(place)} for place in range(5)]
    return Guessing(dataset=rows, max_turns=5, rubric=vf.Rubric(funcs=[reward or found]))


@asynccontextmanager
async def served(env: Any, **options: Any) -> AsyncIterator[str]:
    listener = bind("127.0.0.1", 0)
    server = OpenEnvServer(env, env.get_dataset(), "guessing", **{"rollout_timeout_s": 60.0, **options})
    await server.start(listener)
    try:
        yield url_of(listener)
    finally:
        await server.close()


@asynccontextmanager
async def session(url: str) -> AsyncIterator[Callable[..., Any]]:
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as socket:

        async def ask(kind: Any, data: Any = None) -> Any:
            await socket.send_str(json.dumps({"type": kind, "data": data}))
            return json.loads((await socket.receive(timeout=20)).data)

        yield ask


async def test_an_episode_is_a_rollout_and_its_last_observation_has_the_reward() -> None:
    async with served(guessing()) as url, session(url) as ask:
        first = (await ask("reset", {"task_id": 2, "episode_id": "e"}))["data"]
        assert (first["observation"]["text"], first["reward"], first["done"]) == ("Guess number 2.", None, False)
        low = (await ask("step", {"message": "1"}))["data"]
        assert low["observation"]["messages"] == [{"role": "user", "content": "more"}]
        assert (await ask("state"))["data"] == {"episode_id": "e", "task_id": 2, "step_count": 1}
        last = (await ask("step", {"message": "2"}))["data"]
        assert (last["reward"], last["done"], last["observation"]["outcome"]) == (0.5, True, "completed")
        assert last["observation"]["metrics"] == {"found": 0.5}
        assert (await ask("step", {"message": "2"}))["data"]["code"] == "VALIDATION_ERROR"
        # the same session plays on
        for asked, text in (({"seed": 8}, "3"), ({}, "0"), ({}, "1"), ({"task_id": "4"}, "4")):
            assert (await ask("reset", asked))["data"]["observation"]["text"] == f"Guess number {text}."


async def test_rows_of_completions_and_tools_are_played_too() -> None:
    def twice(n: int) -> int:
        """Double a number."""
        return 2 * n

    rows = [{"question": "Double 4.", "answer": "8"}]
    env = vf.ToolEnv(dataset=rows, tools=[twice], rubric=vf.Rubric(funcs=[lambda completion, answer: 1.0]))
    async with served(env) as url, session(url) as ask:
        (tool,) = (await ask("reset", {}))["data"]["observation"]["tools"]
        assert tool["function"]["name"] == "twice"
        call = {"function": {"name": "twice", "arguments": {"n": 4}}}
        told = (await ask("step", {"message": "", "tool_calls": [call]}))["data"]["observation"]
        assert told["text"] == "8"
        assert "tools" not in told
        assert (await ask("step", {"message": "It is 8."}))["data"]["reward"] == 1.0
    plain = vf.SingleTurnEnv(
        dataset=[{"prompt": "2+2=", "answer": "4"}],
        message_type="completion",
        rubric=vf.Rubric(funcs=[lambda completion, answer: float(completion == answer)]),
    )
    async with served(plain) as url, session(url) as ask:
        assert (await ask("reset", {}))["data"]["observation"]["text"] == "2+2="
        assert (await ask("step", {"message": "4"}))["data"]["reward"] == 1.0


async def test_what_fails_is_an_error_and_never_a_reward() -> None:
    def broken(**_: Any) -> float:
        raise ValueError("no key")

    async with served(guessing(broken)) as url, session(url) as ask:
        await ask("reset", {"task_id": 1})
        answer = await ask("step", {"message": "1"})
        assert answer["data"]["code"] == "SESSION_ERROR"
        assert "grading_error" in answer["data"]["message"]
        assert "no key" in answer["data"]["message"]
        assert await ask("step", {"message": "1"}) == answer
        await ask("reset", {"task_id": 1})
        assert "environment_error" in (await ask("step", {"message": "x"}))["data"]["message"]
    async with served(guessing(), rollout_timeout_s=0.2) as url, session(url) as ask:
        await ask("reset", {})
        await asyncio.sleep(0.5)
        for _ in range(2):
            answer = (await ask("step", {"message": "1"}))["data"]
            assert (answer["code"], "timed_out" in answer["message"]) == ("SESSION_ERROR", True)


async def test_an_episode_that_ends_between_two_steps_tells_its_end() -> None:
    env = guessing(lambda state: 0.75)
    env.timeout_seconds = 0.2
    async with served(env) as url, session(url) as ask:
        await ask("reset", {})
        await asyncio.sleep(0.5)
        assert (await ask("step", {"message": "1"}))["data"]["reward"] == 0.75


async def test_a_policy_does_not_grade_itself() -> None:
    async def judged(state: Any) -> float:
        asked = [{"role": "user", "content": "Is it right?"}]
        answer = await state["client"].untrained.chat.completions.create(model=state["model"], messages=asked)
        return float(answer.choices[0].message.content == "yes")

    async with served(guessing(judged)) as url, session(url) as ask:
        await ask("reset", {"task_id": 1})
        answer = await ask("step", {"message": "1"})
        assert answer["data"]["code"] == "SESSION_ERROR"
        assert "give judges a client of their own" in answer["data"]["message"]


async def test_another_conversation_is_shown_whole_and_said_to_be_one() -> None:
    class Planning(vf.SingleTurnEnv):
        async def play(self, state: Any) -> Any:
            plan = await self.get_model_response(state, [{"role": "user", "content": "Make a plan."}])
            said = plan.choices[0].message.content
            task = [{"role": "system", "content": f"Follow: {said}"}, {"role": "user", "content": "The task."}]
            state["completion"] = [(await self.get_model_response(state, task)).choices[0].message]
            return state

    env = Planning(dataset=[{"question": "q", "answer": "a"}], rubric=vf.Rubric(funcs=[lambda completion: 1.0]))
    async with served(env) as url, session(url) as ask:
        assert (await ask("reset", {}))["data"]["observation"]["text"] == "Make a plan."
        shown = (await ask("step", {"message": "think"}))["data"]["observation"]
        assert (shown["text"], shown["restarts"]) == ("Follow: think\n\nThe task.", True)
        last = (await ask("step", {"message": "done"}))["data"]
        assert (last["reward"], last["observation"]["text"]) == (1.0, "")


class Slow(Guessing):
    """Needs a second for each answer, and notes what became of its episodes."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        self.began.set()
        await asyncio.sleep(1.0)
        return await super().env_response(messages, state, **kwargs)

    @vf.cleanup
    async def clean(self, state: Any) -> None:
        await asyncio.sleep(0.05)
        self.cleaned += 1
        self.was_cleaned.set()


def slow() -> Slow:
    env = Slow(dataset=[{"question": "q", "answer": "2"}], rubric=vf.Rubric(funcs=[lambda state: 1.0]))
    env.began, env.was_cleaned, env.cleaned = asyncio.Event(), asyncio.Event(), 0
    return env


async def test_pings_are_answered_while_a_step_is_played() -> None:
    async with (
        served(slow()) as url,
        aiohttp.ClientSession() as http,
        http.ws_connect(f"{url}/ws", heartbeat=0.2) as socket,
    ):
        for message in ({"type": "reset"}, {"type": "step", "data": {"message": "2"}}):
            await socket.send_json(message)
            answer = json.loads((await socket.receive(timeout=20)).data)
        assert answer["data"]["reward"] == 1.0


async def test_a_client_that_leaves_in_mid_step_and_a_server_that_ends_leave_nothing_open() -> None:
    env = slow()
    async with served(env, max_sessions=1) as url, aiohttp.ClientSession() as http:
        for kept in (False, True):
            socket = await http.ws_connect(f"{url}/ws")
            await socket.send_json({"type": "reset"})
            await socket.receive(timeout=20)
            env.began.clear()
            await socket.send_json({"type": "step", "data": {"message": "1"}})
            await asyncio.wait_for(env.began.wait(), 20)
            if not kept:
                await socket.close()
                await asyncio.wait_for(env.was_cleaned.wait(), 20)
                await asyncio.sleep(0.1)
    assert env.cleaned == 2


@pytest.mark.parametrize(
    ("kind", "data", "code"),
    [
        ("step", {"message": "1"}, "VALIDATION_ERROR"),
        ("reset", {"task_id": 5}, "VALIDATION_ERROR"),
        ("reset", {"task_id": -1}, "VALIDATION_ERROR"),
        ("reset", {"seed": "x"}, "VALIDATION_ERROR"),
        ("reset", [1], "VALIDATION_ERROR"),
        ("dance", {}, "UNKNOWN_TYPE"),
        ([], {}, "UNKNOWN_TYPE"),
    ],
)
async def test_messages_that_cannot_be_followed_are_named(kind: Any, data: Any, code: str) -> None:
    async with served(guessing()) as url, session(url) as ask:
        assert (await ask(kind, data))["data"]["code"] == code
        assert (await ask("reset", {}))["type"] == "observation"


@pytest.mark.parametrize(
    "action",
    [
        {},
        {"message": 1},
        {"message": "1", "x": 1},
        {"message": "", "tool_calls": [1]},
        {"message": "", "tool_calls": "f"},
    ],
)
async def test_an_action_that_is_none_leaves_the_episode_as_it_was(action: Any) -> None:
    async with served(guessing()) as url, session(url) as ask:
        await ask("reset", {"task_id": 3})
        assert (await ask("step", action))["data"]["code"] == "VALIDATION_ERROR"
        assert (await ask("step", {"message": "3"}))["data"]["reward"] == 1.0


async def test_a_full_server_says_so_and_a_lost_client_gives_its_session_back() -> None:
    async with served(guessing(), max_sessions=1) as url:
        async with session(url) as ask:
            await ask("reset", {})
            async with aiohttp.ClientSession() as http, http.ws_connect(f"{url}/ws") as other:
                assert json.loads((await other.receive(timeout=20)).data)["data"]["code"] == "CAPACITY_REACHED"
        for _ in range(100):
            async with session(url) as ask:
                if (await ask("reset", {}))["type"] == "observation":
                    return
        pytest.fail("the session was not given back")


async def test_tasks_are_listed_and_strangers_get_no_answer() -> None:
    async with served(guessing()) as url, aiohttp.ClientSession() as http:
        listed = await (await http.get(f"{url}/tasks?from=3")).json()
        assert listed == {"total": 5, "tasks": [{"id": 3, "task": "default"}, {"id": 4, "task": "default"}]}
        assert (await http.get(f"{url}/tasks?from=x")).status == 400
        assert (await (await http.get(f"{url}/schema")).json())["action"]["required"] == ["message"]
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            assert (await http.get(f"{url}/health", headers=headers)).status == 403


async def test_our_own_client_plays_it_with_the_same_rewards() -> None:
    """The rollouts of the served environment are those of the environment itself."""

    def guess(body: dict[str, Any]) -> str:
        return str(sum(message["role"] == "assistant" for message in body["messages"]))

    env = guessing()
    async with FakeOpenAIServer(guess) as policy:
        rewards = []
        async with served(env) as url:
            rows = [{"info": {"reset": {"task_id": place}}} for place in range(5)]
            remote = OpenEnvEnv(url, dataset=rows, describe_actions=False, obs_to_text=lambda seen: seen["text"])
            for each in (env, remote):
                dataset = each.get_dataset()
                requests = [
                    RolloutRequest(
                        RolloutKey(0, place, 0), row["prompt"], row.get("answer", ""), info=row.get("info") or {}
                    )
                    for place, row in enumerate(dataset)
                ]
                backend = backend_for(policy.url)
                found = await Run(each, backend, "m").run_groups([[one] for one in requests])
                rewards.append([group.rollouts[0].reward for group in found])
                await backend.close()
        async with served(guessing(lambda state: 1 / 0)) as url:
            remote = OpenEnvEnv(url, num_train_episodes=1, describe_actions=False)
            backend = backend_for(policy.url)
            request = RolloutRequest(
                RolloutKey(0, 0, 0), remote.get_dataset()[0]["prompt"], info={"reset": {"seed": 0}}
            )
            (failed,) = (await Run(remote, backend, "m").run_group([request])).rollouts
            await backend.close()
    assert rewards[0] == [1.0, 1 / 2, 1 / 3, 1 / 4, 0.0]
    assert rewards[1] == rewards[0]
    # and not a reward of 0
    assert (failed.reward, failed.outcome) == (None, "environment_error")
