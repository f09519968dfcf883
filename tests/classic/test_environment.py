"""Section "Environment", down to the dataset's columns."""

from __future__ import annotations

import asyncio
import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

import verifiers as vf
from verifiers.testing import FakeClient, Fault

Rows = list[dict[str, Any]]
ASK = [{"role": "user", "content": "2+2?"}]


def length(completion: Any) -> float:
    return float(len(completion[-1]["content"]))


def test_the_signatures_are_the_classic_ones() -> None:
    def names(func: Any) -> list[str]:
        return [name for name in inspect.signature(func).parameters if name != "self"]

    env = vf.Environment
    assert names(env)[:10] == [
        "dataset", "eval_dataset", "system_prompt", "few_shot", "parser", "rubric", "sampling_args", "message_type",
        "oai_tools", "max_workers",
    ]  # fmt: skip
    assert names(vf.MultiTurnEnv.rollout)[:7] == [
        "client", "model", "prompt", "answer", "task", "info", "sampling_args",
    ]  # fmt: skip
    assert names(vf.MultiTurnEnv.is_completed) == ["state"]
    assert names(env.init_state) == ["input", "client", "model", "sampling_args"]
    assert names(env.a_generate)[:9] == [
        "inputs", "client", "model", "sampling_args", "score_rollouts", "max_concurrent", "max_concurrent_generation",
        "max_concurrent_scoring", "interleave_scoring",
    ]  # fmt: skip
    assert names(env.process_env_results_vllm) == [
        "prompts", "completions", "states", "rewards", "processing_class", "max_seq_len", "mask_env_responses",
        "mask_truncated_completions", "zero_truncated_completions",
    ]  # fmt: skip
    assert names(env.make_dataset)[:5] == [
        "results", "rollouts_per_example", "push_to_hf_hub", "hub_name", "state_columns",
    ]  # fmt: skip


def test_what_makes_no_environment_is_refused(rows: Rows) -> None:
    with pytest.raises(ValueError, match="Either dataset or eval_dataset must be provided"):
        vf.Environment()
    for extra in ({"system_prompt": "s"}, {"few_shot": ASK}):
        with pytest.raises(ValueError, match="not supported for completion tasks"):
            vf.Environment(dataset=rows, message_type="completion", **extra)


def test_extra_keywords_are_attributes_and_a_foreign_parser_is_warned_about_once(
    rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="verifiers"):
        env = vf.Environment(dataset=rows, level=3, parser=vf.ThinkParser(), rubric=vf.Rubric())
    assert env.level == 3  # type: ignore[attr-defined]
    assert len([text for text in caplog.messages if "parser of the rubric" in text]) == 1


def test_datasets_get_prompts_and_ids_and_fall_back(rows: Rows, caplog: pytest.LogCaptureFixture) -> None:
    env = vf.Environment(
        dataset=Dataset.from_list(rows), system_prompt="s", few_shot=[{"role": "user", "content": "e"}]
    )
    row = env.get_dataset(n=1)[0]
    assert [message["content"] for message in row["prompt"]] == ["s", "e", "q0"]
    assert (row["id"], row["answer"], len(env.get_dataset(seed=1))) == (0, "a0", 3)
    assert env.format_prompt("q")[-1] == {"role": "user", "content": "q"}
    other = env.format_dataset(
        Dataset.from_list([{"problem": "p", "solution": "s"}]), question_key="problem", answer_key="solution"
    )
    assert (other[0]["prompt"][-1]["content"], other[0]["answer"]) == ("p", "s")
    with caplog.at_level(logging.WARNING, logger="verifiers"):
        assert len(env.get_eval_dataset(n=2)) == 2
    assert "No eval dataset" in caplog.text


def test_the_rubrics_functions_are_the_environments(rows: Rows) -> None:
    env = vf.Environment(dataset=rows, rubric=vf.Rubric([length], [0.5]))
    assert (env.get_reward_funcs(), env.get_reward_weights()) == ([length], [0.5])


# -- get_model_response ----------------------------------------------------------------------------------------


async def test_the_first_generations_model_call(client: FakeClient, rows: Rows) -> None:
    env = vf.Environment(dataset=rows)
    await env.get_model_response(client, "m", ASK, sampling_args={"max_tokens": 5, "top_p": None})
    assert client.requests[0].body == {"model": "m", "messages": ASK, "max_completion_tokens": 5}
    text = await env.get_model_response(client=client, model="m", prompt="2+2=", message_type="completion")
    assert text.choices[0].text == "re: 2+2="
    with pytest.raises(ValueError, match="not supported for completion"):
        await env.get_model_response(client, "m", "2+2=", [{}], message_type="completion")


async def test_the_second_generations_model_call_takes_from_the_state_what_is_not_given(
    client: FakeClient, rows: Rows
) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    env = vf.SingleTurnEnv(dataset=rows, oai_tools=tools)
    state = await env.init_state({"prompt": ASK, "example_id": 3}, client, "m", {"temperature": 0.5})
    assert (state["client"], state["model"], state["sampling_args"]) == (client, "m", {"temperature": 0.5})
    assert (state["oai_tools"], state["example_id"], state["trajectory"]) == (tools, 3, [])
    await env.get_model_response(state, ASK)
    await env.get_model_response(
        state=state, prompt=ASK, model="other", sampling_args={"temperature": 1.0}, oai_tools=[]
    )
    assert client.requests[0].body == {"model": "m", "messages": ASK, "temperature": 0.5, "tools": tools}
    assert client.requests[1].body == {"model": "other", "messages": ASK, "temperature": 1.0}
    another = FakeClient("hi")
    await env.get_model_response(state, ASK, another)
    assert len(another.requests) == 1


async def test_a_context_overflow_is_an_answer_and_other_errors_propagate(rows: Rows) -> None:
    env = vf.Environment(dataset=rows)
    overflow = Fault(400, body={"error": {"message": "This model's maximum context length is 8 tokens"}})
    response = await env.get_model_response(FakeClient(faults=overflow), "m", ASK)
    assert (response.id, response.choices[0].finish_reason) == ("overlong-prompt", "length")
    with pytest.raises(Exception, match="scripted fault"):
        await env.get_model_response(FakeClient(faults=Fault(500)), "m", ASK)


async def test_a_client_may_be_any_object_of_the_right_shape(rows: Rows) -> None:
    def create(**arguments: Any) -> Any:
        message = SimpleNamespace(content="4", tool_calls=None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    results = await vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([length])).a_generate(
        {"prompt": [ASK], "answer": ["4"]}, client, "m"
    )
    assert results.reward == [1.0]


# -- batches -----------------------------------------------------------------------------------------------------


async def test_run_rollouts_gives_completions_and_states_in_order(client: FakeClient, rows: Rows) -> None:
    env = vf.SingleTurnEnv(dataset=rows)
    prompts: Any = [[{"role": "user", "content": name}] for name in "abc"]
    done = await env.run_rollouts(
        client, "m", prompts, ["", "", ""], ["t", "t", "u"], [{}, {"k": 1}, {}], max_concurrent=2
    )
    assert [completion[0]["content"] for completion, _ in done] == ["re: a", "re: b", "re: c"]
    assert [(state["task"], state["info"]) for _, state in done] == [("t", {}), ("t", {"k": 1}), ("u", {})]
    assert client.max_in_flight <= 2


def test_evaluate_repeats_the_dataset_and_can_be_read_or_awaited(client: FakeClient, rows: Rows) -> None:
    env = vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([length]))
    results = env.evaluate(client, "m", num_examples=2, rollouts_per_example=2)
    assert results.answer == results["answer"] == ["a0", "a1", "a0", "a1"]
    assert results.metrics["length"] == results["metrics"]["length"] == [6.0] * 4

    async def later() -> Any:
        return await env.evaluate(client, "m", num_examples=2, rollouts_per_example=2)

    assert asyncio.run(later()).reward == results.reward
    assert env.evaluate_sync(client, "m", score_rollouts=False).reward == []
    assert env.generate_sync({"prompt": [ASK], "answer": [""]}, client, "m").reward == [8.0]


async def test_scoring_that_is_not_interleaved_is_one_call(client: FakeClient, rows: Rows) -> None:
    calls: list[int] = []

    class Counted(vf.Rubric):
        async def score_rollouts(self, prompts: Any, completions: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(len(prompts))
            return await super().score_rollouts(prompts, completions, *args, **kwargs)

    env = vf.SingleTurnEnv(dataset=rows, rubric=Counted([length]))
    columns = {"prompt": [ASK] * 3, "answer": [""] * 3}
    results = await env.a_generate(columns, client, "m", interleave_scoring=False)
    assert (calls, results.reward) == ([3], [8.0] * 3)


def test_make_dataset_has_the_classic_columns(client: FakeClient, rows: Rows) -> None:
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([length]))
    table = env.make_dataset(env.evaluate(client, "m", rollouts_per_example=2), 2)
    names = ["prompt", "completion", "answer", "task", "reward", "average_reward", "length", "num_turns"]
    assert table.column_names == names
    assert list(table["average_reward"]) == [6.0] * 6


def test_a_rows_info_may_be_json_text_and_may_bring_its_own_tools(client: FakeClient) -> None:
    tool = {"type": "function", "function": {"name": "own"}}
    rows = [
        {"question": "q", "info": '{"oai_tools": [{"type": "function", "function": {"name": "own"}}], "level": 2}'},
    ]
    env = vf.SingleTurnEnv(dataset=rows, oai_tools=[{"type": "function", "function": {"name": "common"}}])
    results = env.evaluate_sync(client, "m")
    assert client.requests[0].body["tools"] == [tool]
    assert results.info[0]["level"] == 2
    assert (results.answer, results.task) == ([""], ["default"])


def test_a_rubric_may_be_added_to_the_one_that_is_there(client: FakeClient, rows: Rows) -> None:
    env = vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([length]))
    env.add_rubric(vf.Rubric([lambda completion: 0.5]))
    env.add_rubric(vf.Rubric([lambda completion: 0.25]))
    assert len(env.rubric.rubrics) == 3  # type: ignore[attr-defined]
    assert env.evaluate_sync(client, "m").reward == [6.75] * 3


# -- teardown, rubrics added ------------------------------------------------------------------------------------


async def test_teardown_runs_marked_methods_once_whatever_they_raise(
    rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    class Env(vf.SingleTurnEnv):
        @vf.teardown(priority=2)
        def first(self) -> None:
            done.append("first")
            raise OSError("stuck")

        @vf.teardown
        async def second(self) -> None:
            done.append("second")

    env = Env(dataset=rows)
    await env.teardown()
    await env.teardown()
    assert done == ["first", "second"]
    assert "Env.first failed: OSError: stuck" in caplog.text


def test_a_script_that_never_tears_down_has_it_done_at_its_end() -> None:
    import subprocess
    import sys

    code = """
import verifiers as vf
from verifiers.testing import FakeClient
class Env(vf.SingleTurnEnv):
    @vf.teardown
    async def bye(self):
        print("torn down")
env = Env(dataset=[{"question": "q"}])
print(env.evaluate_sync(FakeClient("a"), "m").reward)
unused = Env(dataset=[{"question": "q"}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split("\n")[:2] == ["[0.0]", "torn down"]
    assert done.stdout.count("torn down") == 1
