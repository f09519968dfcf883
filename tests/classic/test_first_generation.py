"""Releases 0.1.0 to 0.1.7: what their packages and scripts rely on, and what they take that others refuse."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from datasets import Dataset

import verifiers as vf
from verifiers.envs.datasets import format_dataset
from verifiers.keywords import warn_once
from verifiers.testing import FakeClient

Rows = list[dict[str, Any]]
PROMPT, ANSWER = [{"role": "user", "content": "q"}], [{"role": "assistant", "content": "a"}]


@pytest.fixture(autouse=True)
def _warnings_again() -> None:
    warn_once.cache_clear()


# -- a judge that is not awaited ----------------------------------------------------------------------------------


async def test_a_synchronous_reward_function_reads_the_judges_answer_without_awaiting_it(rows: Rows) -> None:
    judge = FakeClient("I say yes, 7 of 10.")
    rubric = vf.JudgeRubric(judge_client=judge)

    def graded(judge: Any, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        response = judge(prompt, completion, answer, state)
        found = re.search(r"(\d+) of 10", response)
        return float("yes" in response.lower()) + (int(found[1]) / 10 if found else 0.0)

    async def awaited(judge: Any, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        return float("yes" in await judge(prompt, completion, answer, state))

    rubric.add_reward_func(graded)
    rubric.add_reward_func(awaited, weight=10.0)
    env = vf.SingleTurnEnv(dataset=rows * 5, rubric=rubric)
    # quick functions move to the event loop after a few calls, where nothing could be waited for
    results = await env.evaluate(FakeClient("a"), "m", max_concurrent=1)
    assert results.reward == pytest.approx([11.7] * 15)


def test_in_a_script_the_judges_answer_may_be_read_awaited_or_run() -> None:
    rubric = vf.JudgeRubric(judge_client=FakeClient("yes"))
    answer: Any = rubric.judge(PROMPT, ANSWER, "a", vf.State())
    assert (answer, isinstance(answer, str)) == ("yes", True)
    assert asyncio.run(rubric.judge(PROMPT, ANSWER, "a", vf.State())) == "yes"

    async def later() -> str:
        return await answer  # type: ignore[no-any-return]

    assert asyncio.run(later()) == "yes"


# -- the client that an environment is made with ------------------------------------------------------------------


def test_generate_and_evaluate_use_the_client_and_model_of_the_constructor(rows: Rows, client: FakeClient) -> None:
    env = vf.SingleTurnEnv(dataset=rows, client=client, model="mine")
    assert len(env.generate({"prompt": [PROMPT]}).completion) == 1
    assert len(env.evaluate(num_examples=2).completion) == 2
    assert {request.body["model"] for request in client.requests} == {"mine"}
    env.generate({"prompt": [PROMPT]}, model="other")
    assert client.requests[-1].body["model"] == "other"
    with pytest.raises(vf.ConfigError, match="SingleTurnEnv has no client and model"):
        vf.SingleTurnEnv(dataset=rows).generate({"prompt": [PROMPT]})


# -- what is taken with a warning ---------------------------------------------------------------------------------


async def test_a_weight_too_many_is_dropped_with_a_warning(
    rows: Rows, client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    def one(completion: Any) -> float:
        return 1.0

    rubric = vf.Rubric(funcs=[one], weights=[0.5, 0.25])
    assert "1 reward functions: the weights [0.25] beyond them have no effect" in caplog.text
    rubric.add_reward_func(one, weight=2.0)
    assert rubric.reward_weights == [0.5, 2.0]
    rubric.reward_weights = [0.5, 2.0, 4.0]
    assert (await vf.SingleTurnEnv(dataset=rows, rubric=rubric).evaluate(client, "m")).reward == [2.5] * 3
    with pytest.raises(vf.ConfigError, match="2 reward functions but 1 weights"):
        vf.Rubric(funcs=[one, one], weights=[1.0])


@pytest.mark.parametrize("dataset", [[], Dataset.from_dict({"question": [], "answer": []})])
async def test_an_empty_dataset_makes_an_environment_and_gives_empty_results(
    dataset: Any, client: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        env = vf.SingleTurnEnv(dataset=dataset)
    assert "A dataset is empty" in caplog.text
    assert env.get_dataset().column_names == format_dataset(dataset).column_names
    results = await env.evaluate(client, "m")
    assert (results.completion, results.reward) == ([], [])
    assert len(vf.EnvGroup([env, vf.SingleTurnEnv(dataset=[{"question": "q"}])]).get_dataset()) == 1
