"""OpenEnvEnv: episodes of an OpenEnv server, whose failures are never rewards."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from openenv_server import OpenEnvServer

import verifiers as vf
from verifiers.inference.server_pool import backend_for
from verifiers.integrations.openenv import (
    OpenEnvEnv,
    SessionLimits,
    action_from_text,
    action_hint,
    observation_text,
    only_text_field,
)
from verifiers.rollouts.rollout import Rollout, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.testing import FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey

MESSAGE_SCHEMA = {"properties": {"message": {"type": "string"}}, "required": ["message"]}


def earned(state: dict[str, Any]) -> float:
    return float(sum(step["reward"] or 0.0 for step in state["trajectory"]))


def count_up(body: dict[str, Any]) -> str:
    """Guesses 0, 1, 2, ..."""
    return json.dumps({"guess": sum(message["role"] == "assistant" for message in body["messages"])})


def environment(server: Any, **settings: Any) -> OpenEnvEnv:
    return OpenEnvEnv(server.url, **{"rubric": vf.Rubric(funcs=[earned]), "num_train_episodes": 5, **settings})


async def play(env: OpenEnvEnv, answers: Any, seed: int = 0) -> Rollout:
    """One scored rollout, on the path of the trainer and the evaluator."""
    prompt = [{"role": "system", "content": "play"}]
    request = RolloutRequest(RolloutKey(0, 0, 0), prompt, info={"reset": {"seed": seed}})
    with FakeOpenAIServer(answers) as server:
        backend = backend_for(server.url)
        try:
            group = await Run(env, backend, "fake").run_group([request])
        finally:
            await backend.close()
    return group.rollouts[0]


def said(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.completion]


def first_observation(rollout: Rollout) -> str:
    text: str = rollout.prompt[-1]["content"]  # type: ignore[index]
    return text


async def test_an_episode_is_played_until_done_and_its_rewards_add_up() -> None:
    with OpenEnvServer() as server:
        rollout = await play(environment(server, keep_server_state=True), count_up, seed=2)
        assert (rollout.outcome, rollout.reward, rollout.turns) == (Outcome.COMPLETED, 0.5, 3)
        assert [step["reward"] for step in rollout.state["trajectory"]] == [-0.25, -0.25, 1.0]
        assert rollout.state["stop_condition"] == "episode_done"
        assert rollout.state["server_state"] == {"episode_id": None, "step_count": 3}
        assert "openenv_session" not in rollout.state
        first = first_observation(rollout)
        assert first.startswith("guess\n\nAnswer with your next action: one JSON object")
        assert '"guess"' in first
        assert '"metadata"' not in first
        assert said(rollout) == ['{"guess": 0}', "not 0", '{"guess": 1}', "not 1", '{"guess": 2}', "right"]
        kinds = [request["type"] for request in server.received if request["type"] != "state"]
        assert kinds == ["reset", "step", "step", "step", "close"]
        assert server.received[0]["data"] == {"seed": 2}


async def test_the_answer_of_the_last_turn_is_played_too() -> None:
    with OpenEnvServer() as server:
        rollout = await play(environment(server, max_turns=2), count_up, seed=1)
        assert (rollout.reward, rollout.state["stop_condition"]) == (0.75, "episode_done")
        rollout = await play(environment(server, max_turns=2), count_up, seed=9)
        assert (rollout.reward, rollout.state["stop_condition"]) == (-0.5, "max_turns_reached")
        assert rollout.turns == 2


async def test_a_refused_action_is_told_to_the_policy_and_the_episode_continues() -> None:
    with OpenEnvServer() as server:
        answers = ['{"guess": "x"}', "no idea", '{"guess": 13}', '{"guess": 4}']
        rollout = await play(environment(server, max_action_errors=4), answers, seed=4)
        assert (rollout.outcome, rollout.reward) == (Outcome.COMPLETED, 1.0)
        told = [text for text in said(rollout) if text.startswith("The action was refused")]
        assert told == [
            "The action was refused: Invalid message: guess: not an integer",
            "The action was refused: the answer holds no JSON object",
            "The action was refused: thirteen is unlucky",
        ]
        refusals = [step["extras"].get("refusal") for step in rollout.state["trajectory"]]
        assert refusals == ["VALIDATION_ERROR", "VALIDATION_ERROR", "EXECUTION_ERROR", None]


async def test_actions_refused_too_often_end_the_episode_with_what_was_earned() -> None:
    with OpenEnvServer() as server:
        answers = ['{"guess": 0}', "a", "b", '{"guess": 1}', "c", "d", "e", '{"guess": 2}']
        rollout = await play(environment(server), answers, seed=9)
        assert (rollout.outcome, rollout.reward, rollout.turns) == (Outcome.COMPLETED, -0.5, 7)
        assert rollout.state["stop_condition"] == "too_many_action_errors"


@pytest.mark.parametrize(
    ("settings", "answers", "reason"),
    [
        ({"first_error": ("FACTORY_ERROR", "no engine")}, "{}", "FACTORY_ERROR: no engine"),
        ({"first_error": ("SESSION_ERROR", "broken")}, "{}", "SESSION_ERROR: broken"),
        ({}, '{"guess": 99}', "closed the session"),
        ({}, '{"guess": 13}', "failed 3 steps in a row: thirteen is unlucky"),
        ({"answer": {"step": "no JSON"}}, '{"guess": 1}', "not a message of the protocol"),
        ({"answer": {"step": '{"type": "state", "data": {}}'}}, '{"guess": 1}', "answered 'state'"),
        ({"answer": {"step": '{"type": "error", "data": {"code": "UNKNOWN_TYPE"}}'}}, '{"guess": 1}', "UNKNOWN_TYPE"),
        ({"answer": {"reset": '{"type": "error", "data": {"code": "EXECUTION_ERROR"}}'}}, "{}", "EXECUTION_ERROR"),
        ({"hang_on": "step"}, '{"guess": 1}', "message_timeout_s=0.5"),
        ({"hang_on": "reset"}, '{"guess": 1}', "message_timeout_s=0.5"),
        ({"lose_resets": 3}, '{"guess": 1}', "closed the session"),
    ],
)
async def test_a_session_that_fails_is_an_environment_error_and_no_reward(
    settings: dict[str, Any], answers: str, reason: str
) -> None:
    with OpenEnvServer(**settings) as server:
        # what hangs makes the short limit expire, wherever; the other answers have all the time they need
        limits = SessionLimits(message_timeout_s=0.5) if "hang_on" in settings else SessionLimits()
        env = environment(server, limits=limits)
        rollout = await play(env, answers)
        assert (rollout.outcome, rollout.reward) == (Outcome.ENVIRONMENT_ERROR, None)
        assert reason in str(rollout.failure)
        await asyncio.to_thread(server.wait_until, lambda it: it.open == 0)
        assert not env.open_sessions


async def test_a_connection_lost_before_the_reset_is_made_again() -> None:
    with OpenEnvServer(lose_resets=2) as server:
        rollout = await play(environment(server), '{"guess": 0}')
        assert (rollout.reward, server.begun) == (1.0, 3)


async def test_rollouts_ask_a_full_server_again_instead_of_failing() -> None:
    with OpenEnvServer(max_sessions=2) as server, FakeOpenAIServer(count_up) as model:
        env = environment(server, num_train_episodes=8)
        results = await env.a_evaluate(model.url, "fake")
        assert results.reward == [1.0 - 0.25 * seed for seed in range(8)]
        assert (server.most_open, server.begun, server.goodbyes) == (2, 8, 8)
        assert server.refused > 0


async def test_a_server_that_stays_full_is_given_up_at_the_deadline() -> None:
    with OpenEnvServer(max_sessions=0) as server:
        env = environment(server, limits=SessionLimits(capacity_timeout_s=0.3))
        rollout = await play(env, "{}")
        assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
        assert "capacity_timeout_s=0.3" in str(rollout.failure)
        assert server.refused >= 2


async def test_pings_are_answered_while_the_policy_thinks() -> None:
    async def slow(body: dict[str, Any]) -> str:
        with suppress(OSError):
            for _ in range(3):
                await asyncio.to_thread(server.ping)
        return count_up(body)

    with OpenEnvServer() as server:
        rollout = await play(environment(server), slow, seed=1)
        assert (rollout.outcome, rollout.reward, server.pongs) == (Outcome.COMPLETED, 0.75, 6)


async def test_a_cancelled_rollout_closes_its_session() -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def never(body: dict[str, Any]) -> str:
        loop.call_soon_threadsafe(asked.set)
        await asyncio.Event().wait()
        return ""

    with OpenEnvServer(max_sessions=1) as server:
        env = environment(server)
        task = asyncio.create_task(play(env, never))
        await asked.wait()
        assert (server.open, len(env.open_sessions)) == (1, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (server.goodbyes, len(env.open_sessions)) == (1, 0)
        assert (await play(env, count_up)).reward == 1.0


async def test_a_message_over_the_size_limit_names_the_setting() -> None:
    def shout(episode: Any, action: Any) -> dict[str, Any]:
        return {"observation": {"text": "x" * 5000}, "reward": 1.0, "done": True}

    with OpenEnvServer(play=shout) as server:
        env = environment(server, limits=SessionLimits(max_message_bytes=4096))
        rollout = await play(env, '{"guess": 1}')
        assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
        assert "max_message_bytes=4096" in str(rollout.failure)
        cut = await play(environment(server, max_observation_chars=10), '{"guess": 1}')
        assert said(cut)[-1] == "xxxxx\n[... 4,990 characters left out ...]\nxxxxx"


@pytest.mark.parametrize("text", ['{"guess": 1e999}', '{"guess": "\\ud800"}', '{"guess": NaN}'])
async def test_what_json_cannot_carry_never_reaches_the_server(text: str) -> None:
    with OpenEnvServer() as server:
        rollout = await play(environment(server, max_action_errors=1), text)
        assert (rollout.outcome, rollout.state["stop_condition"]) == (Outcome.COMPLETED, "too_many_action_errors")
        assert [request["type"] for request in server.received] == ["reset", "close"]


async def test_another_server_at_the_url_is_said_in_one_sentence() -> None:
    where = r"No OpenEnv server is at base_url='http://127.*404"
    with OpenEnvServer(health=None) as server, pytest.raises(vf.ConfigError, match=where):
        await play(environment(server), "{}")
    with FakeOpenAIServer() as other, pytest.raises(vf.ConfigError, match=where):
        await play(OpenEnvEnv(other.url, rubric=vf.Rubric()), "{}")


async def test_a_server_that_is_not_there_is_an_environment_error() -> None:
    with OpenEnvServer() as server:
        env = environment(server)
    rollout = await play(env, "{}")
    assert rollout.outcome is Outcome.ENVIRONMENT_ERROR
    assert "Nothing answers at base_url=" in str(rollout.failure)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "127.0.0.1:8000"}, "base_url is '127.0.0.1:8000'"),
        ({"base_url": None}, "base_url is None"),
        ({"num_train_episodes": 0}, "num_train_episodes is 0"),
        ({"message_type": "completion"}, "played in chat"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(vf.ConfigError, match=message):
        OpenEnvEnv(**{"base_url": "http://127.0.0.1:1", "rubric": vf.Rubric(), **settings})


async def test_text_goes_into_the_actions_only_field() -> None:
    def echo(episode: Any, action: Any) -> dict[str, Any]:
        return {"observation": {"echoed": action["message"]}, "reward": 0.5, "done": True}

    with OpenEnvServer(play=echo, action_schema=MESSAGE_SCHEMA) as server:
        rollout = await play(environment(server), "<think>hm</think> hello\nthere")
        assert first_observation(rollout).endswith("plain text.")
        assert said(rollout)[-1] == "hello\nthere"


async def test_a_text_field_that_no_action_has_is_refused_at_the_first_rollout() -> None:
    with OpenEnvServer(action_schema=MESSAGE_SCHEMA) as server:
        with pytest.raises(vf.ConfigError, match="text_field is 'mesage'; the server's actions have message"):
            await play(environment(server, text_field="mesage"), "hello")
        assert server.begun == 0
    with OpenEnvServer(action_schema={**MESSAGE_SCHEMA, "additionalProperties": True}) as server:
        await play(environment(server, text_field="note"), "hello")
        assert server.begun == 1


async def test_parsers_of_ones_own_make_the_action() -> None:
    async def shifted(text: str) -> dict[str, int]:
        return {"guess": int(text) - 1}

    with OpenEnvServer() as server:
        env = environment(server, action_parser=shifted, parser=vf.XMLParser(["answer"]))
        rollout = await play(env, ["<answer>one</answer>", "four", "<answer>5</answer>"], seed=4)
        assert rollout.reward == 1.0
        assert first_observation(rollout) == "guess"
        assert "form asked for" not in said(rollout)[1]
        assert "invalid literal" in said(rollout)[1]
        assert "form asked for" in said(rollout)[3]


async def test_rows_of_ones_own_give_reset_arguments_and_prompts() -> None:
    rows = [
        {"question": "Which digit?", "info": {"reset": {"seed": 3, "level": None}}},
        {"question": "And now?", "info": {"reset": {"seed": None, "level": "hard"}}},
    ]
    with OpenEnvServer() as server, FakeOpenAIServer('{"guess": 3}') as model:
        env = environment(server, dataset=rows, reset={"seed": 13}, headers={"X-Key": "k"}, system_prompt=None)
        results = await env.a_evaluate(model.url, "fake", max_concurrent=1)
        assert results.reward == [1.0, 1.0]
        resets = [request["data"] for request in server.received if request["type"] == "reset"]
        assert resets == [{"seed": 3}, {"seed": 13, "level": "hard"}]
        # one user message, since some chat templates refuse two in a row
        assert [message["role"] for message in model.requests[0].messages] == ["user"]
        assert model.requests[0].messages[0]["content"].startswith("Which digit?\n\nguess")
        assert server.headers["X-Key"] == "k"


def test_five_rollouts_at_once_also_from_a_loop_after_the_first() -> None:
    with OpenEnvServer(max_sessions=5) as server, FakeOpenAIServer(count_up) as model:
        env = environment(server)
        for _ in range(2):
            results = env.evaluate_sync(model.url, "fake")
            assert results.reward == [1.0, 0.75, 0.5, 0.25, 0.0]
        assert not env.open_sessions
        assert server.goodbyes == 10


# -- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        ("as it is", "as it is"),
        ({"text": "one field"}, "one field"),
        ({"text": "hi", "reward": 1, "done": False, "metadata": {}, "hints": [], "left": None}, "hi"),
        ({"board": "xo\nox", "turn": 3, "legal": ["a", "b"]}, 'board:\nxo\nox\nturn: 3\nlegal: ["a", "b"]'),
        ({"won": False, "score": 0}, "won: false\nscore: 0"),
        ([1, 2], "[1, 2]"),
        ({}, ""),
    ],
)
def test_observations_read_as_text(observation: Any, text: str) -> None:
    assert observation_text(observation) == text


@pytest.mark.parametrize(
    ("text", "field", "action"),
    [
        ('{"a": 1}', None, {"a": 1}),
        ('Well.\n```json\n{"a": 1}\n```\nor\n```\n{"a": 2}\n```', None, {"a": 2}),
        ('<think>{"a": 9}</think>\n{"a": 1}', None, {"a": 1}),
        ('{"message": "hi"}', "message", {"message": "hi"}),
        ('{"other": 1}', "message", {"message": '{"other": 1}'}),
        ("[1]", "message", {"message": "[1]"}),
    ],
)
def test_answers_become_actions(text: str, field: str | None, action: dict[str, Any]) -> None:
    assert action_from_text(text, MESSAGE_SCHEMA, field) == action


def test_the_text_field_is_the_only_required_string() -> None:
    optional = {"properties": {"code": {"type": "string"}, "timeout": {"type": "number"}, "metadata": {}}}
    assert only_text_field({**optional, "required": ["code"]}) == "code"
    assert only_text_field(optional) is None
    assert only_text_field({"properties": {"guess": {"type": "integer"}}}) is None
    assert only_text_field({}) is None
    assert action_hint({}, None) == ""
