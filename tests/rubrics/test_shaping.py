"""Ready-made rewards: DAPO's penalty for length, the R1-Zero format, and the sum of step rewards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import verifiers as vf
from verifiers.errors import ConfigError, GradingError
from verifiers.rubrics.shaping import completion_tokens, r1_zero_rubric
from verifiers.testing import FakeOpenAIServer
from verifiers.types import State


def response(**fields: Any) -> Any:
    choice = {"token_ids": None, "logprobs": None, **fields.pop("choice", {})}
    return SimpleNamespace(choices=[SimpleNamespace(**choice)], **{"usage": None, **fields})


def counted(tokens: int) -> Any:
    return response(usage=SimpleNamespace(completion_tokens=tokens))


@pytest.mark.parametrize(
    ("tokens", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (10_000, -1.0)],
)
def test_the_penalty_grows_over_the_buffer(tokens: int, penalty: float) -> None:
    func = vf.overlong_penalty(max_tokens=100, buffer_tokens=20)
    assert func(state=State(responses=[counted(tokens)])) == pytest.approx(penalty)


@pytest.mark.parametrize(("max_tokens", "buffer_tokens"), [(10, 0), (10, 11), (0, 0), (10, -1)])
def test_a_buffer_that_does_not_fit_is_refused(max_tokens: int, buffer_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"buffer_tokens={buffer_tokens} and max_tokens={max_tokens}"):
        vf.overlong_penalty(max_tokens=max_tokens, buffer_tokens=buffer_tokens)


@pytest.mark.parametrize(
    "one",
    [
        response(choice={"token_ids": [1, 2, 3]}, usage=SimpleNamespace(completion_tokens=99)),
        response(choice={"logprobs": SimpleNamespace(content=[{"logprob": -0.1}] * 3)}),
        response(choice={"logprobs": {"token_logprobs": [0.0, 0.0, 0.0]}}),
        counted(3),
        {"choices": [{"message": {}}], "usage": {"completion_tokens": 3}},
        {"usage": {"completion_tokens": 3}},
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
        State(responses=[{"choices": [{}, {}], "usage": {"completion_tokens": 5}}]),
        State(responses=[{"choices": [None], "usage": {"completion_tokens": 5}}]),
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
    metrics = {"overlong_penalty": pytest.approx([-0.6]), "completion_tokens": [8.0], "num_turns": [1.0]}
    assert results.metrics == metrics


# -- r1_zero

CASES = [
    ("so 4 it is</think> <answer>4</answer>", "4", (1, 1, 1)),
    ("so 4 it is</think> <answer> \\boxed{4} </answer>", 4, (1, 1, 1)),
    ("so</think> <answer>The answer is \\boxed{2\\sqrt{2}}.</answer>", "\\sqrt{8}", (1, 1, 1)),
    ("so</think> <answer>5</answer>", "4", (1, 0, 0)),
    ("4", "4", (0, 0, 0)),
    ("so</think><answer>4</answer>", "4", (0, 0, 0)),
    ("so</think> <answer>4", "4", (0, 0, 0)),
    ("a</think> <answer>5</answer> no: </think> <answer>4</answer>", "4", (1, 1, 1)),
    ("so</think> <answer>4</answer>", ["3", "4"], (1, 1, 1)),
]


@pytest.mark.parametrize(("text", "truth", "expected"), CASES)
def test_format_answer_and_reward_are_the_worked_examples(
    text: str, truth: Any, expected: tuple[int, int, int]
) -> None:
    result = vf.r1_zero_reward(text, truth, timeout_s=60)
    assert result == dict(zip(("format", "answer", "reward"), expected, strict=True))


@pytest.mark.parametrize(("text", "truth", "expected"), CASES[2:6])
async def test_the_rubric_gives_the_same(text: str, truth: Any, expected: tuple[int, int, int]) -> None:
    scored = State(prompt="p", completion=[{"role": "assistant", "content": text}], answer=truth)
    await r1_zero_rubric(timeout_s=60).score_group([scored])
    assert scored["reward"] == expected[2]
    assert scored["metrics"] == {"r1_zero_answer": expected[1], "r1_zero_format": expected[0]}
    assert "grading_errors" not in scored


# -- EpisodicSumRubric


def always_one(completion: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("steps", "total"),
    [
        ([{"reward": 0.5}, {"reward": None}, {"reward": -2}, {}], -1.5),
        ([SimpleNamespace(reward=1.0), {"reward": 1.0}], 2.0),
        ([], 0.0),
        (None, 0.0),
    ],
)
async def test_the_reward_is_the_sum_of_the_steps(steps: Any, total: float) -> None:
    scored = State(prompt="p", completion="c", trajectory=steps)
    await vf.EpisodicSumRubric().score_group([scored])
    assert scored["reward"] == total
    assert scored["metrics"] == {"sum_step_rewards": total}


async def test_further_functions_and_weights_are_as_in_a_rubric() -> None:
    rubric = vf.EpisodicSumRubric(weight=0.5, funcs=[always_one], weights=[0.25], parser=vf.XMLParser(["answer"]))
    scored = State(prompt="p", completion="c", trajectory=[{"reward": 3.0}])
    await rubric.score_group([scored])
    assert scored["reward"] == 1.75
    assert isinstance(rubric.parser, vf.XMLParser)
    assert vf.EpisodicSumRubric(funcs=[always_one]).weights == [1.0, 1.0]


async def test_a_step_without_a_number_is_a_failed_grade() -> None:
    for reward in (float("nan"), "much"):
        scored = State(prompt="p", completion="c", trajectory=[{"reward": reward}])
        await vf.EpisodicSumRubric().score_group([scored])
        assert scored["grading_errors"][0]["func"] == "sum_step_rewards"


def test_rewards_of_trls_form_get_lists_and_the_columns_they_name() -> None:
    seen: list[dict[str, Any]] = []

    def right(completions: list[Any], answer: list[str], hint: list[Any], **kwargs: Any) -> list[float]:
        seen.append(kwargs)
        return [float(said[-1]["content"] == wanted) for said, wanted in zip(completions, answer, strict=True)]

    async def named(prompts: list[Any], hint: list[Any]) -> list[float]:
        return [float(one == "x") for one in hint]

    rubric = vf.Rubric([vf.from_trl(right), vf.from_trl(named)])
    rows = [{"question": "2+2?", "answer": "4", "info": {"hint": "x"}}]
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=rubric)
    with FakeOpenAIServer(["4", "5"]) as server:
        results = env.evaluate_sync(server.url, "fake", rollouts_per_example=2)
    assert sorted(results.metrics["right"]) == [0.0, 1.0]
    assert results.metrics["named"] == [1.0, 1.0]
    assert set(seen[0]) == {"prompts", "task"}


async def test_a_column_that_a_reward_of_trls_form_names_and_info_has_not_is_told() -> None:
    def right(completions: list[Any], solution: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    scored = State(prompt="p", completion="c", info={"hint": "x"})
    await vf.Rubric([vf.from_trl(right)]).score_group([scored])
    assert "'solution', which the row's info has not; put a column there" in str(scored["grading_errors"])
