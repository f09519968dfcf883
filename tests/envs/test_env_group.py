"""EnvGroup: rows of several environments, each played, scored and torn down by its own."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import verifiers as vf
from verifiers.evals.evaluation_run import iter_requests
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.rollout import ScoredBlock
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient
from verifiers.types import Outcome

ASK = [{"role": "user", "content": "?"}]


def loud(completion: Any, task: str) -> float:
    return float(len(completion[-1]["content"]))


def named(task: str, state: Any) -> float:
    """Return the task that reward functions see, as a number."""
    assert task == state["task"]
    return float({"code": 1, "custom": 2, "env_0": 3}.get(task, 9))


def rows(*questions: str, **more: Any) -> list[dict[str, Any]]:
    return [{"question": question, "answer": question, **more} for question in questions]


class Chatty(vf.MultiTurnEnv):
    """Two turns; of the first generation."""

    async def setup_state(self, state: Any, **kwargs: Any) -> Any:
        state["set_up_by"] = "chatty"
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "more"}], state


async def modern(env: Any, client: FakeClient, rollouts: int = 1, **sampling: Any) -> ScoredBlock:
    runner = Run(env, ClientBackend(client), "m", {**env.sampling_args, **sampling})
    return ScoredBlock(0, await runner.run_groups(iter_requests(env.get_eval_dataset(), rollouts, None)))


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(
        lambda body: f"re: {(body.get('messages') or [{'content': body.get('prompt')}])[-1]['content']}"
    )


@pytest.fixture
def group() -> vf.EnvGroup:
    math = vf.SingleTurnEnv(dataset=rows("m0", "m1"), rubric=vf.Rubric([loud]), sampling_args={"temperature": 0.3})
    code = Chatty(
        max_turns=2,
        dataset=rows("c0", info={"level": 1}),
        rubric=vf.Rubric([named], [0.5]),
        oai_tools=[{"type": "function", "function": {"name": "run"}}],
    )
    return vf.EnvGroup([math, code], env_names=["math", "code"])


def test_datasets_are_concatenated_with_the_environments_names_as_tasks(group: vf.EnvGroup) -> None:
    table = group.get_dataset()
    assert list(table["task"]) == ["math", "math", "code"]
    assert list(table["id"]) == [0, 1, 2]
    assert [prompt[-1]["content"] for prompt in table["prompt"]] == ["m0", "m1", "c0"]
    assert list(table["info"]) == [None, None, {"level": 1}]
    assert group.env_map == dict(zip(["math", "code"], group.envs, strict=True))
    assert group.get_env_for_task("code") is group.envs[1]
    assert group.get_env_for_task("no such task") is group.envs[0]
    assert vf.EnvGroup(group.envs).env_names == ["env_0", "env_1"]
    assert [len(group.get_dataset(n=2)), len(group.get_eval_dataset())] == [2, 3]


async def test_each_row_is_played_and_scored_by_its_own_environment(group: vf.EnvGroup, client: FakeClient) -> None:
    block = await modern(group, client, rollouts=2)
    assert [rollout.outcome for rollout in block] == [Outcome.COMPLETED] * 6
    assert [rollout.task for rollout in block] == ["math"] * 4 + ["code"] * 2
    assert [rollout.reward for rollout in block] == [6.0] * 4 + [0.5] * 2
    # a mean over a metric is over the rollouts that have it
    assert [set(rollout.metrics) for rollout in block] == [{"loud"}] * 4 + [{"named"}] * 2
    assert [rollout.turns for rollout in block] == [1] * 4 + [2] * 2
    assert block.rollouts[-1].state["set_up_by"] == "chatty"
    by_temperature = [request.body.get("temperature") for request in client.requests]
    assert sorted(by_temperature, key=str) == [0.3] * 4 + [None] * 4
    assert all(("tools" in request.body) == ("temperature" not in request.body) for request in client.requests)


async def test_sampling_arguments_of_the_run_win_over_an_environments_own(client: FakeClient) -> None:
    own = {"temperature": 0.3, "extra_body": {"min_p": 0.1, "top_k": 5}}
    group = vf.EnvGroup([vf.SingleTurnEnv(dataset=rows("q"), sampling_args=own)], sampling_args={"top_p": 0.9})
    await modern(group, client, temperature=1.0, extra_body={"top_k": 7})
    body = client.requests[0].body
    assert (body["temperature"], body["top_p"], body["min_p"], body["top_k"]) == (1.0, 0.9, 0.1, 7)


def test_the_classic_calls_give_every_rollout_all_metrics(group: vf.EnvGroup, client: FakeClient) -> None:
    results = group.evaluate(client, "m")
    assert results.reward == [6.0, 6.0, 0.5]
    assert results.metrics == {
        "loud": [6.0, 6.0, 0.0],
        "named": [0.0, 0.0, 1.0],
        "num_turns": [float(len(state["trajectory"])) for state in results.state],
    }
    assert group.rubric.get_reward_func_names() == ["loud", "named"]
    again = group.evaluate_sync(client, "m", interleave_scoring=False)
    assert (again.reward, again.metrics) == (results.reward, results.metrics)


async def test_a_task_that_nobody_has_scores_0_in_the_classic_call_and_is_a_grading_error_in_a_run(
    group: vf.EnvGroup, client: FakeClient
) -> None:
    rubric: Any = group.rubric
    state = vf.State(task="chess", completion=[])
    score = await rubric.score_rollout([], [], "", state, "chess", {})
    assert (score.reward, score.metrics) == (0.0, {"loud": 0.0, "named": 0.0})
    assert state["grading_errors"][0]["error"].startswith(
        "ConfigError: no environment of the group has the task 'chess'"
    )
    by_state = await rubric.score_rollout(vf.State(task="chess", completion=[]))
    assert by_state.reward == 0.0
    runner = Run(group, ClientBackend(client), "m")
    requests = iter_requests([{"prompt": ASK, "task": "chess"}], 2, None)
    played = (await runner.run_groups(requests))[0]
    assert [rollout.outcome for rollout in played.rollouts] == [Outcome.GRADING_ERROR] * 2
    assert [rollout.reward for rollout in played.rollouts] == [None, None]


async def test_a_task_column_is_kept_and_tasks_that_two_environments_share_are_told_apart(client: FakeClient) -> None:
    one = vf.SingleTurnEnv(dataset=rows("a", task="custom"), rubric=vf.Rubric([named]))
    two = vf.SingleTurnEnv(dataset=rows("b", task="custom"), rubric=vf.Rubric([loud]))
    three = vf.SingleTurnEnv(dataset=rows("c", task="one"), rubric=vf.Rubric([named]))
    group = vf.EnvGroup([one, two, three], ["one", "two", "three"])
    assert list(group.get_dataset()["task"]) == ["custom", "two/custom", "three/one"]
    block = await modern(group, client)
    assert [rollout.metrics for rollout in block] == [{"named": 2.0}, {"loud": 5.0}, {"named": 9.0}]


async def test_groups_may_hold_groups_with_the_same_names(group: vf.EnvGroup, client: FakeClient) -> None:
    inner = vf.EnvGroup([vf.SingleTurnEnv(dataset=rows("x"), rubric=vf.Rubric([named])), group])
    outer = vf.EnvGroup([vf.SingleTurnEnv(dataset=rows("o"), rubric=vf.Rubric([loud])), inner])
    assert list(outer.get_dataset()["task"]) == ["env_0", "env_1/env_0", "math", "math", "code"]
    block = await modern(outer, client)
    assert [rollout.metrics for rollout in block] == [
        {"loud": 5.0}, {"named": 3.0}, {"loud": 6.0}, {"loud": 6.0}, {"named": 1.0},
    ]  # fmt: skip
    assert [rollout.task for rollout in block] == list(outer.get_dataset()["task"])
    assert outer.evaluate_sync(client, "m").reward == [5.0, 3.0, 6.0, 6.0, 0.5]
    assert outer.rubric.get_reward_func_names() == ["loud", "named"]


async def test_a_member_may_compare_the_rollouts_of_a_group(client: FakeClient) -> None:
    def place(completions: Any) -> list[float]:
        return [float(number) for number in range(len(completions))]

    ranked = vf.SingleTurnEnv(dataset=rows("a"), rubric=vf.Rubric([place]))
    group = vf.EnvGroup([ranked, vf.SingleTurnEnv(dataset=rows("b"), rubric=vf.Rubric([loud]))])
    block = await modern(group, client, rollouts=3)
    assert [rollout.reward for rollout in block] == [0.0, 1.0, 2.0, 5.0, 5.0, 5.0]
    results = await group.a_evaluate(client, "m", rollouts_per_example=2)
    assert sorted(results.reward) == [0.0, 1.0, 5.0, 5.0]


def test_columns_that_differ_are_brought_together() -> None:
    one = vf.SingleTurnEnv(dataset=rows("a", info={"level": 1}, source="web"))
    talk = [{"role": "user", "content": "b", "name": "ann"}]
    two = vf.SingleTurnEnv(dataset=[{"prompt": talk, "answer": "b", "info": {"tags": ["x"]}}])
    three = vf.SingleTurnEnv(dataset=rows("c", info='{"level": 3}'))
    table = vf.EnvGroup([one, two, three]).get_dataset()
    assert list(table["source"]) == ["web", None, None]
    requests = [group[0] for group in iter_requests(table, 1, None)]
    assert [request.info for request in requests] == [{"level": 1}, {"tags": ["x"]}, {"level": 3}]
    assert [request.prompt for request in requests][1] == talk
    assert requests[0].prompt == [{"role": "user", "content": "a"}]


def answering(answer: Any) -> vf.Environment:
    return vf.SingleTurnEnv(dataset=[{"question": "a", "answer": answer}])


def test_what_cannot_be_one_group_is_refused_with_a_sentence() -> None:
    chat, text = vf.SingleTurnEnv(dataset=rows("a")), vf.SingleTurnEnv(dataset=rows("a"), message_type="completion")
    numbered = vf.SingleTurnEnv(dataset=[{"question": "a", "answer": 4}])
    with pytest.raises(ValueError, match="at least one environment"):
        vf.EnvGroup([])
    with pytest.raises(ValueError, match="Number of env_names must match number of envs: 1 names"):
        vf.EnvGroup([chat, chat], ["x"])
    with pytest.raises(ValueError, match="envs hold 'wordle'; give environments"):
        vf.EnvGroup([chat, "wordle"])  # type: ignore[list-item]
    for one, other in ((4, 4.5), ({"a": 1}, {"b": 2})):
        with pytest.raises(ValueError, match="The column 'answer' holds different things"):
            vf.EnvGroup([answering(one), answering(other)])
    vf.EnvGroup([answering({"a": 1, "b": 2}), answering({"b": 2, "a": 3})])
    with pytest.raises(ValueError, match="must all be different"):
        vf.EnvGroup([chat, chat], ["x", "x"])
    with pytest.raises(ValueError, match=r"'env_0' is chat, 'env_1' is completion.*make a group of each"):
        vf.EnvGroup([chat, text])
    with pytest.raises(ValueError, match=r"The column 'answer' holds different things.*in 'env_1'"):
        vf.EnvGroup([chat, numbered])
    with pytest.raises(ValueError, match="add it to the rubric of one of its environments"):
        vf.EnvGroup([chat]).rubric.add_reward_func(loud)


def test_evaluation_rows_are_those_of_every_environment(caplog: pytest.LogCaptureFixture) -> None:
    both = vf.SingleTurnEnv(dataset=rows("t"), eval_dataset=rows("e"))
    train = vf.SingleTurnEnv(dataset=rows("u"))
    evaluated = vf.SingleTurnEnv(eval_dataset=rows("v"))
    with caplog.at_level(logging.ERROR, logger="verifiers"):
        group = vf.EnvGroup([both, train, evaluated])
    assert list(group.get_dataset()["answer"]) == ["t", "u"]
    assert list(group.get_eval_dataset()["answer"]) == ["e", "u", "v"]
    assert list(group.get_eval_dataset()["task"]) == ["env_0", "env_1", "env_2"]


@pytest.mark.parametrize("evaluated", [True, False])
def test_the_first_rows_to_evaluate_alternate_between_environments(evaluated: bool) -> None:
    kind = "eval_dataset" if evaluated else "dataset"
    envs = [
        vf.SingleTurnEnv(**{kind: rows(*(f"{name}{n}" for n in range(count)))})
        for name, count in (("a", 5), ("b", 2), ("c", 3))
    ]
    group = vf.EnvGroup(envs)
    shown = list(group.rows_to_evaluate(7)["answer"])
    assert shown == ["a0", "b0", "c0", "a1", "b1", "c1", "a2"]
    assert list(group.rows_to_evaluate(100)["answer"]) == [*shown, "c2", "a3", "a4"]
    everything = [f"{name}{n}" for name, count in (("a", 5), ("b", 2), ("c", 3)) for n in range(count)]
    assert list(group.rows_to_evaluate()["answer"]) == list(group.get_eval_dataset()["answer"]) == everything
    if not evaluated:
        assert list(group.get_dataset(3)["answer"]) == everything[:3]


def test_tokens_are_made_with_the_tools_of_the_rollouts_environment(group: vf.EnvGroup) -> None:
    seen: list[Any] = []

    class Tokenizer:
        def apply_chat_template(self, conversation: Any, tools: Any = None, **_: Any) -> list[int]:
            seen.append(tools)
            return [1] * sum(len(message["content"] or "") for message in conversation)

    for task in ("math", "code"):
        group.process_env_results_vllm([ASK], [[]], [vf.State(task=task, responses=[], info={})], [0.0], Tokenizer())
    assert [tools and tools[0]["function"]["name"] for tools in seen] == [None, "run"]
