"""Batch calls of an environment: columns in, columns out, with and without an event loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from datasets import Dataset

import verifiers as vf
from verifiers.errors import ConfigError, ProviderError
from verifiers.testing import FakeClient, Fault
from verifiers.types import GenerateInputs, GenerateOutputs

Rows = list[dict[str, Any]]


def right(completion: Any, answer: str) -> float:
    """1 for an answer to the right question."""
    return float(completion[-1]["content"].replace("re: q", "a") == answer)


def length(completion: Any) -> float:
    return float(len(completion[-1]["content"]))


@pytest.fixture
def env(rows: Rows) -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([right, length], [1.0, 0.0]))


def prompts_of(count: int) -> list[Any]:
    return [[{"role": "user", "content": f"q{number}"}] for number in range(count)]


def said(outputs: Any) -> list[str]:
    return [completion[0]["content"] for completion in outputs.completion]


def check_evaluation(outputs: Any) -> None:
    assert said(outputs) == ["re: q0", "re: q1", "re: q2"] * 2
    assert outputs["reward"] == outputs.reward == [1.0] * 6
    assert outputs.metrics == {"right": [1.0] * 6, "length": [6.0] * 6, "num_turns": [1.0] * 6}


def test_evaluate_read_at_once_is_complete(env: vf.SingleTurnEnv, client: FakeClient) -> None:
    check_evaluation(env.evaluate(client, "m", rollouts_per_example=2))
    check_evaluation(env.evaluate_sync(client, "m", rollouts_per_example=2))


async def test_evaluate_can_be_awaited(env: vf.SingleTurnEnv, client: FakeClient) -> None:
    check_evaluation(await env.evaluate(client, "m", rollouts_per_example=2))
    check_evaluation(await env.a_evaluate(client, "m", rollouts_per_example=2))


async def test_evaluate_can_be_read_inside_a_running_loop(env: vf.SingleTurnEnv, client: FakeClient) -> None:
    check_evaluation(env.evaluate(client, "m", rollouts_per_example=2))
    assert len(client.requests) == 6
    assert "reward" in env.evaluate(client, "m")
    assert set(dict(env.evaluate(client, "m"))) >= {"prompt", "completion", "state", "reward", "metrics", "outputs"}
    assert [name for name in env.evaluate(client, "m")][0] == "prompt"  # noqa: C416, RUF015
    check_evaluation(env.evaluate_sync(client, "m", rollouts_per_example=2))


def test_what_evaluate_gives_passes_for_a_coroutine(env: vf.SingleTurnEnv, client: FakeClient) -> None:
    check_evaluation(asyncio.run(env.evaluate(client, "m", rollouts_per_example=2)))

    async def as_tasks() -> list[Any]:
        task = asyncio.create_task(env.evaluate(client, "m", rollouts_per_example=2))
        return [await task, *await asyncio.gather(*(env.evaluate(client, "m", rollouts_per_example=2) for _ in "ab"))]

    before = len(client.requests)
    for outputs in asyncio.run(as_tasks()):
        check_evaluation(outputs)
    assert len(client.requests) == before + 18


def test_nothing_is_run_twice_however_the_result_is_read(env: vf.SingleTurnEnv, client: FakeClient) -> None:
    outputs = env.evaluate(client, "m")

    async def read() -> None:
        assert (await outputs).reward == outputs.reward == outputs["reward"] == outputs.get("reward")

    asyncio.run(read())
    assert len(client.requests) == 3


@pytest.mark.parametrize("kind", ["dict", "GenerateInputs", "Dataset", "list"])
async def test_inputs_may_be_columns_a_dataset_or_rows(env: vf.SingleTurnEnv, client: FakeClient, kind: str) -> None:
    columns = {"prompt": prompts_of(2), "answer": ["a0", "a1"]}
    inputs: Any = {
        "dict": columns,
        "GenerateInputs": GenerateInputs(**columns),
        "Dataset": Dataset.from_dict(columns),
        "list": [{"prompt": p, "answer": a} for p, a in zip(*columns.values(), strict=True)],
    }[kind]
    outputs = await env.generate(inputs, client, "m")
    assert isinstance(outputs, GenerateOutputs)
    assert (outputs.reward, outputs.answer, outputs.task) == ([1.0, 1.0], ["a0", "a1"], ["default"] * 2)
    assert outputs.prompt == prompts_of(2)
    assert [state["turn"] for state in outputs.state] == [1, 1]
    assert [state["reward"] for state in outputs.state] == [1.0, 1.0]


@pytest.mark.parametrize("inputs", [{"question": ["x"]}, []])
async def test_inputs_without_prompts_are_refused(env: vf.SingleTurnEnv, client: FakeClient, inputs: Any) -> None:
    with pytest.raises(ConfigError, match="no column 'prompt'"):
        await env.generate(inputs, client, "m")


def test_without_scoring_there_is_no_reward(env: vf.SingleTurnEnv, client: FakeClient) -> None:
    outputs = env.evaluate(client, "m", score_rollouts=False)
    assert (outputs.reward, outputs.metrics) == ([], {})
    assert len(outputs.completion) == 3


async def test_scoring_after_everything_is_generated_is_one_call(env: vf.SingleTurnEnv, client: FakeClient) -> None:
    calls = 0
    score_rollouts = env.rubric.score_rollouts

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        assert len(client.requests) == 3
        return await score_rollouts(*args, **kwargs)

    env.rubric.score_rollouts = counted  # type: ignore[method-assign]
    outputs = await env.evaluate(client, "m", interleave_scoring=False)
    assert (calls, outputs.reward) == (1, [1.0] * 3)
    assert outputs.metrics["length"] == [6.0] * 3


async def test_functions_that_compare_a_group_see_the_rollouts_of_one_prompt(rows: Rows) -> None:
    def rank(completions: Any, answers: Any) -> list[float]:
        assert len(set(answers)) == 1
        texts = [completion[0]["content"] for completion in completions]
        return [float(sorted(texts).index(text)) for text in texts]

    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([rank]))
    outputs = await env.evaluate(FakeClient(["b", "a"] * 3), "m", rollouts_per_example=2)
    assert outputs.reward == [1.0] * 3 + [0.0] * 3


async def test_ids_of_a_dataset_may_be_texts(client: FakeClient) -> None:
    rows = [{"question": f"q{number}", "answer": f"a{number}", "id": f"row-{number}"} for number in range(3)]
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right]))
    outputs = await env.evaluate(client, "m", rollouts_per_example=2)
    assert outputs.reward == [1.0] * 6
    assert [state["example_id"] for state in outputs.state] == [0, 1, 2] * 2


async def test_rollouts_come_back_in_order_under_the_limit(env: vf.SingleTurnEnv) -> None:
    async def later_ones_first(body: dict[str, Any]) -> str:
        number = int(body["messages"][0]["content"][1:])
        for _ in range(20 - number):
            await asyncio.sleep(0)
        return f"re: q{number}"

    client = FakeClient(later_ones_first)
    pairs = await env.run_rollouts(client, "m", prompts_of(20), [""] * 20, max_concurrent=4)
    assert [completion[0]["content"] for completion, _ in pairs] == [f"re: q{number}" for number in range(20)]
    assert all(state["turn"] == 1 for _, state in pairs)
    assert client.max_in_flight == 4
    await env.run_rollouts(client, "m", prompts_of(20), [""] * 20)
    assert client.max_in_flight == 20


async def test_an_environments_own_exception_is_raised_and_the_others_are_cancelled(rows: Rows) -> None:
    class Breaks(vf.SingleTurnEnv):
        async def rollout(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
            if prompt[-1]["content"] == "q1":
                raise KeyError("the environment's own mistake")
            return await super().rollout(client, model, prompt, *args, **kwargs)

    client = FakeClient(faults=[Fault.hang(), Fault.hang()])
    with pytest.raises(KeyError, match="own mistake"):
        await Breaks(eval_dataset=rows, rubric=vf.Rubric([right])).evaluate(client, "m")
    assert client.in_flight == 0


async def test_a_failure_of_every_rollout_is_raised(env: vf.SingleTurnEnv) -> None:
    with pytest.raises(ProviderError, match="401"):
        await env.evaluate(FakeClient(faults=[Fault(401)] * 3), "m")


def test_results_become_a_dataset_with_averages_by_prompt(env: vf.SingleTurnEnv) -> None:
    client = FakeClient(["re: q0", "re: q1", "no", "no", "re: q1", "no"])
    outputs = env.evaluate(client, "m", rollouts_per_example=2, max_concurrent=1)
    table = env.make_dataset(outputs, 2, state_columns=["turn", "responses"])
    assert table.column_names == [
        "prompt",
        "completion",
        "answer",
        "task",
        "reward",
        "average_reward",
        "right",
        "length",
        "num_turns",
        "turn",
        "responses",
    ]
    assert list(table["reward"]) == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert list(table["average_reward"]) == [0.5, 1.0, 0.0, 0.5, 1.0, 0.0]
    assert table[0]["responses"][0]["choices"][0]["message"]["content"] == "re: q0"


def test_a_dataset_has_infos_where_there_are_any_and_rewards_where_there_was_scoring(client: FakeClient) -> None:
    rows = [{"question": "q0", "info": {"level": 1}}]
    env = vf.SingleTurnEnv(dataset=rows)
    table = env.make_dataset(env.evaluate(client, "m", score_rollouts=False))
    assert table.column_names == ["prompt", "completion", "answer", "task", "info"]
    assert table[0]["info"] == {"level": 1}
    with pytest.raises(ConfigError, match="push_to_hf_hub needs hub_name"):
        env.make_dataset({}, push_to_hf_hub=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("all_fail", [True, False])
async def test_a_reward_function_that_raises_gives_no_reward(
    rows: Rows, client: FakeClient, interleaved: bool, all_fail: bool
) -> None:
    def breaks(answer: str) -> float:
        if all_fail or answer == "a1":
            raise ValueError("the grader broke")
        return 1.0

    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([breaks, length], [1.0, 0.5]))
    outputs = await env.evaluate(client, "m", interleave_scoring=interleaved)
    failed = [all_fail, True, all_fail]
    assert outputs.reward == [None if fails else 4.0 for fails in failed]
    assert outputs.metrics["num_turns"] == [1.0] * 3
    assert [output["outcome"] for output in outputs.outputs] == [
        "grading_error" if fails else "completed" for fails in failed
    ]
    for output, state, fails in zip(outputs.outputs, outputs.state, failed, strict=True):
        assert (state["reward"] is None, state["error"] is not None) == (fails, fails)
        assert not fails or output["error"]["error_chain_str"] == "breaks: ValueError: the grader broke"
    assert outputs.metadata.avg_reward == (None if all_fail else 4.0)


async def test_the_average_of_a_prompt_is_over_its_scored_rollouts(rows: Rows) -> None:
    def number(completion: Any) -> float:
        return float(completion[-1]["content"])

    env = vf.SingleTurnEnv(dataset=rows[:2], rubric=vf.Rubric([number]))
    outputs = await env.evaluate(FakeClient(["1", "x", "y", "z"]), "m", rollouts_per_example=2, max_concurrent=1)
    dataset = env.make_dataset(outputs)
    assert (dataset["reward"], dataset["average_reward"]) == ([1.0, None, None, None], [1.0, None, 1.0, None])
