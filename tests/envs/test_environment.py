"""Environment: what it is made of, its datasets, and one call to the policy."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import openai
import pytest
from datasets import Dataset

import verifiers as vf
from verifiers.errors import ConfigError, EmptyModelResponseError
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.testing import FakeClient, Fault

Rows = list[dict[str, Any]]
ASK = [{"role": "user", "content": "2+2?"}]


def test_an_environment_without_a_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="Either dataset or eval_dataset must be provided"):
        vf.Environment()


@pytest.mark.parametrize("extra", [{"system_prompt": "Be brief."}, {"few_shot": [{"role": "user", "content": "x"}]}])
def test_prompts_made_of_messages_do_not_fit_completion_mode(rows: Rows, extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not supported for completion tasks"):
        vf.Environment(dataset=rows, message_type="completion", **extra)


def test_a_rubric_with_another_kind_of_parser_is_warned_about_once(
    rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="verifiers"):
        vf.Environment(dataset=rows, parser=vf.ThinkParser(), rubric=vf.Rubric(parser=vf.XMLParser(["answer"])))
        assert [record.getMessage() for record in caplog.records] == [
            "The parser of the rubric is a XMLParser, the environment's a ThinkParser: "
            "rewards and prompts may disagree."
        ]
        caplog.clear()
        vf.Environment(dataset=rows, parser=vf.ThinkParser(), rubric=vf.Rubric(parser=vf.ThinkParser()))
        assert caplog.records == []


def test_questions_become_prompts_with_system_prompt_and_examples(rows: Rows) -> None:
    example = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    env = vf.Environment(dataset=rows, system_prompt="Be brief.", few_shot=example)
    expected = [{"role": "system", "content": "Be brief."}, *example, {"role": "user", "content": "q0"}]
    assert env.get_dataset()[0]["prompt"] == expected
    assert env.format_prompt("q0", "Be brief.", example) == expected
    assert list(env.get_dataset()["id"]) == [0, 1, 2]


def test_a_given_number_of_rows_is_taken_after_the_shuffle(rows: Rows) -> None:
    env = vf.Environment(dataset=rows)
    assert list(env.get_dataset(n=2)["question"]) == ["q0", "q1"]
    assert len(env.get_dataset(n=99)) == 3
    shuffled = list(env.get_dataset(seed=1)["question"])
    assert sorted(shuffled) == ["q0", "q1", "q2"]
    assert list(env.get_dataset(n=2, seed=1)["question"]) == shuffled[:2]


def test_evaluation_falls_back_to_the_training_rows_with_a_warning(
    rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    env = vf.Environment(dataset=rows)
    with caplog.at_level(logging.WARNING, logger="verifiers"):
        assert list(env.get_eval_dataset(n=1)["question"]) == ["q0"]
    assert "No eval dataset" in caplog.text
    both = vf.Environment(dataset=rows, eval_dataset=Dataset.from_list([{"question": "eval", "answer": ""}]))
    assert list(both.get_eval_dataset()["question"]) == ["eval"]
    with pytest.raises(ConfigError, match="has no training dataset"):
        vf.Environment(eval_dataset=rows).get_dataset()


async def test_the_base_class_says_what_to_override(rows: Rows) -> None:
    with pytest.raises(NotImplementedError, match="must override play, or subclass SingleTurnEnv"):
        await vf.Environment(dataset=rows).rollout(None, "m", ASK)


# -- get_model_response ----------------------------------------------------------------------------------------


async def test_chat_sends_messages_tools_and_the_present_name_of_max_tokens(client: FakeClient, rows: Rows) -> None:
    env = vf.Environment(dataset=rows)
    tools = [{"type": "function", "function": {"name": "add"}}]
    arguments = {"max_tokens": 9, "temperature": None, "top_p": 0.5}
    response = await env.get_model_response(client, "m", ASK, oai_tools=tools, sampling_args=arguments)
    assert response.choices[0].message.content == "re: 2+2?"
    assert client.requests[0].path == "/v1/chat/completions"
    assert client.requests[0].body == {
        "model": "m",
        "messages": ASK,
        "tools": tools,
        "max_completion_tokens": 9,
        "top_p": 0.5,
    }
    assert arguments == {"max_tokens": 9, "temperature": None, "top_p": 0.5}
    await env.get_model_response(client, "m", ASK, sampling_args={"max_tokens": 9, "max_completion_tokens": 7})
    assert client.requests[1].body["max_completion_tokens"] == 7


async def test_completion_mode_sends_a_text_and_keeps_max_tokens(client: FakeClient, rows: Rows) -> None:
    env = vf.Environment(dataset=rows, message_type="completion")
    response = await env.get_model_response(client, "m", "2+2=", sampling_args={"max_tokens": 99})
    assert response.choices[0].text == "re: 2+2="
    assert client.requests[0].body == {"model": "m", "prompt": "2+2=", "max_tokens": 99}
    await env.get_model_response(client, "m", ASK, message_type="chat")
    assert client.requests[1].path == "/v1/chat/completions"


async def test_a_prompt_with_audio_asks_for_text_back_unless_told_otherwise(client: FakeClient, rows: Rows) -> None:
    env = vf.Environment(dataset=rows)
    audio = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]
    await env.get_model_response(client, "m", audio)
    await env.get_model_response(client, "m", audio, sampling_args={"modalities": ["audio", "text"]})
    await env.get_model_response(client, "m", ASK)
    sent = [request.body.get("modalities") for request in client.requests]
    assert sent == [["text"], ["audio", "text"], None]


@pytest.mark.parametrize("message_type", ["chat", "completion"])
@pytest.mark.parametrize("recorded", [False, True])
async def test_a_prompt_that_does_not_fit_is_an_empty_answer_that_ended_for_length(
    rows: Rows, message_type: Any, recorded: bool
) -> None:
    fake: Any = FakeClient(faults=Fault(400, body={"error": {"message": "maximum context length is 8 tokens"}}))
    handle = RolloutClient(ClientBackend(fake), model="m") if recorded else fake
    env = vf.Environment(dataset=rows, message_type=message_type)
    prompt: Any = ASK if message_type == "chat" else "2+2="
    response = await env.get_model_response(handle, "m", prompt)
    assert (response.id, response.choices[0].finish_reason) == ("overlong-prompt", "length")


async def test_other_errors_of_the_client_pass(rows: Rows) -> None:
    env = vf.Environment(dataset=rows)
    with pytest.raises(openai.BadRequestError):
        await env.get_model_response(FakeClient(faults=Fault(400)), "m", ASK)
    with pytest.raises(openai.RateLimitError):
        await env.get_model_response(FakeClient(faults=Fault(429)), "m", ASK)


async def test_an_answer_without_choices_is_an_error_that_says_so(rows: Rows) -> None:
    client = AsyncMock()
    client.chat.completions.create.return_value = SimpleNamespace(choices=[])
    with pytest.raises(EmptyModelResponseError, match="'m' has no choices"):
        await vf.Environment(dataset=rows).get_model_response(client, "m", ASK)
