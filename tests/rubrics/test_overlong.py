"""overlong_penalty: DAPO's soft punishment, by the server's own count of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import verifiers as vf
from verifiers.errors import ConfigError, GradingError
from verifiers.rubrics.overlong import completion_tokens
from verifiers.testing import FakeOpenAIServer
from verifiers.types import State


def response(**fields: Any) -> Any:
    choice = {"token_ids": None, "logprobs": None, **fields.pop("choice", {})}
    return SimpleNamespace(choices=[SimpleNamespace(**choice)], **{"usage": None, **fields})


def counted(tokens: int) -> Any:
    return response(usage=SimpleNamespace(completion_tokens=tokens))


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (79, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (10_000, -1.0)],
)
def test_the_penalty_grows_over_the_buffer(tokens: int, penalty: float) -> None:
    func = vf.overlong_penalty(max_tokens=100, buffer_tokens=20)
    assert func(state=State(responses=[counted(tokens)])) == pytest.approx(penalty)


def test_the_papers_own_numbers() -> None:
    # L_max 20,480 with L_cache 4,096: nothing is punished up to 16,384 tokens
    func = vf.overlong_penalty(max_tokens=20_480, buffer_tokens=4_096)
    for tokens, penalty in ((16_384, 0.0), (18_432, -0.5), (20_480, -1.0)):
        assert func(state=State(responses=[counted(tokens)])) == penalty


@pytest.mark.parametrize(("max_tokens", "buffer_tokens"), [(10, 0), (10, 11), (0, 0), (10, -1)])
def test_a_buffer_that_does_not_fit_is_refused(max_tokens: int, buffer_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"buffer_tokens={buffer_tokens} and max_tokens={max_tokens}"):
        vf.overlong_penalty(max_tokens=max_tokens, buffer_tokens=buffer_tokens)


@pytest.mark.parametrize(
    "one",
    [
        response(choice={"token_ids": [1, 2, 3]}, usage=SimpleNamespace(completion_tokens=99)),
        response(choice={"logprobs": SimpleNamespace(content=[{}, {}, {}])}),
        response(choice={"logprobs": {"token_logprobs": [0.0, 0.0, 0.0]}}),
        counted(3),
        {"choices": [{"message": {}}], "usage": {"completion_tokens": 3}},
        response(choice={"token_ids": []}, usage=SimpleNamespace(completion_tokens=9)),
    ],
)
def test_tokens_are_counted_from_whatever_the_server_sent(one: Any) -> None:
    expected = 0 if getattr(one, "choices", [None])[0] and one.choices[0].token_ids == [] else 3
    assert completion_tokens(State(responses=[one])) == expected
    assert completion_tokens(State(trajectory=[{"response": one}])) == expected


def test_all_answers_of_a_rollout_count_together() -> None:
    steps = [{"response": counted(5), "tokens": {"completion_ids": [1, 2]}}, {"response": counted(5), "tokens": None}]
    state = State(responses=[step["response"] for step in steps], trajectory=steps)
    assert completion_tokens(state) == 7


@pytest.mark.parametrize(
    "state",
    [
        State(),
        State(responses=[], trajectory=[]),
        State(responses=[response()]),
        State(responses=[SimpleNamespace(choices=[None, None], usage=SimpleNamespace(completion_tokens=5))]),
        State(responses=[MagicMock()]),
    ],
)
async def test_an_unknown_length_is_a_failed_grade_and_no_zero(state: State) -> None:
    with pytest.raises(GradingError, match="unknown"):
        completion_tokens(state)
    state.update(prompt="p", completion="c")
    await vf.Rubric(funcs=[vf.overlong_penalty(max_tokens=10, buffer_tokens=5)]).score_group([state])
    assert state["grading_errors"][0]["func"] == "overlong_penalty"


@pytest.mark.parametrize("token_ids", [True, False])
def test_an_environment_punishes_length_and_shows_it(token_ids: bool) -> None:
    rubric = vf.Rubric(funcs=[vf.overlong_penalty(max_tokens=10, buffer_tokens=5)])
    rubric.add_metric(completion_tokens)
    env = vf.SingleTurnEnv(eval_dataset=[{"question": "?", "answer": ""}], rubric=rubric)
    # the fake server samples a token for each letter, and one for the end
    sampling = {"extra_body": {"return_token_ids": True}}
    with FakeOpenAIServer("1234567", token_ids=token_ids) as server:
        results = env.evaluate_sync(server.url, "fake", sampling_args=sampling)
    assert results.reward == pytest.approx([-0.6])
    assert results.metrics == {"overlong_penalty": pytest.approx([-0.6]), "completion_tokens": [8.0]}
