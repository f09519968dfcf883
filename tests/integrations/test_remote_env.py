"""RemoteEnv: prompts and grades of a dataserver, for everything that takes an environment."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from remote_world import STAGES, RecordingServer, dataserver
from verifiers_dataserver.serving import serve_in_background

from verifiers.cli.evaluate import main as evaluate
from verifiers.data.batch_plan import BatchPlan, make_plan
from verifiers.data.curriculum import staged_curriculum_from
from verifiers.data.row_source import StagedRows
from verifiers.envs.datasets import row_fields
from verifiers.errors import ConfigError, InfraError
from verifiers.inference.endpoint import Endpoint, HttpBackend
from verifiers.integrations import dataserver as remote
from verifiers.integrations.dataserver import RemoteEnv
from verifiers.rollouts.rollout import Group, RolloutRequest
from verifiers.rollouts.run import Run
from verifiers.rubrics.rubric import Rubric
from verifiers.testing import FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey

pytestmark = pytest.mark.usefixtures("_quiet")


@pytest.fixture
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "verifiers")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[str]:
    with dataserver(tmp_path) as url:
        yield url


@pytest.fixture
def recorder() -> Iterator[RecordingServer]:
    with RecordingServer(sizes={"easy": 8, "hard": 8}) as server:
        yield server


def right(request: dict[str, Any]) -> str:
    """Answer as a policy that knows: rows are called "easy 3", and the answer is 3."""
    return str(request["messages"][-1]["content"].rpartition(" ")[2])


async def run_group(env: RemoteEnv, url: str, example_id: int, block_id: int | None = None) -> Group:
    """Make the four rollouts of a prompt, for an evaluation, or for the training of a block."""
    row = env.get_dataset()[example_id]
    requests = [
        RolloutRequest(RolloutKey(block_id or 0, example_id, i), row["prompt"], "", row["task"], env_info(row))
        for i in range(4)
    ]
    backend = HttpBackend(Endpoint(url))
    try:
        return await Run(env, backend, "fake", require_tokens=block_id is not None).run_group(requests)
    finally:
        await backend.close()


def env_info(row: Any) -> Any:
    return row_fields(row)[3]


# -- rows -------------------------------------------------------------------------------------------------------


def test_its_rows_are_the_curriculums_datasets_without_any_answer(world: str) -> None:
    env = RemoteEnv(world, eval_dataset="eval_set")
    dataset = env.get_dataset()
    assert len(dataset) == 48
    assert dataset[30]["prompt"] == [{"role": "user", "content": "hard 6"}]
    assert (dataset[30]["task"], dataset[30]["id"], dataset[30]["answer"]) == ("hard", 30, "")
    assert env_info(dataset[30]) == {"sample_id": "hard:6", "metadata": {"topic": "hard"}}
    assert [row["prompt"][0]["content"] for row in env.get_eval_dataset()] == [f"eval_set {i}" for i in range(4)]


def test_a_dataset_or_a_stage_can_be_chosen_and_then_no_curriculum_rules(world: str) -> None:
    assert {row["task"] for row in RemoteEnv(world, dataset="eval_set").get_dataset()} == {"eval_set"}
    staged = RemoteEnv(world, stage="middle")
    assert {row["task"] for row in staged.get_dataset()} == {"easy", "hard"}
    assert staged.row_source is None
    for wrong, words in (({"dataset": "esay"}, "no dataset 'esay'"), ({"stage": "x"}, "no stage 'x'")):
        with pytest.raises(ConfigError, match=words):
            RemoteEnv(world, **wrong)
    with pytest.raises(ConfigError, match="give one of them"):
        RemoteEnv(world, dataset="easy", stage="warm")
    with pytest.raises(ConfigError, match="given rubric=, which the dataserver decides"):
        RemoteEnv(world, rubric=Rubric())


# -- a trainer's plan -------------------------------------------------------------------------------------------


def plan_of(env: RemoteEnv, **sizes: Any) -> BatchPlan:
    values = {"per_device_train_batch_size": 8, "num_generations": 2, "max_steps": 6, "num_prompts": 48}
    return dataclasses.replace(make_plan(**{**values, **sizes}), source=env.row_source)


@pytest.mark.parametrize("sizes", [{}, {"num_iterations": 2}, {"gradient_accumulation_steps": 2}])
def test_a_plan_gets_the_rows_that_the_same_curriculum_gives_locally(world: str, sizes: Any) -> None:
    env = RemoteEnv(world)
    plan = plan_of(env, **sizes)
    local = StagedRows(
        staged_curriculum_from({"seed": 3, "stages": STAGES}), {"easy": range(24), "hard": range(24, 48)}
    )
    expected = dataclasses.replace(plan, source=local)
    assert [plan.example_ids(b) for b in range(plan.blocks)] == [expected.example_ids(b) for b in range(plan.blocks)]


def test_a_block_is_asked_for_once_with_all_that_decides_it(recorder: RecordingServer) -> None:
    env = RemoteEnv(recorder.url, seed=9)
    plan = plan_of(env, num_prompts=16)
    for _ in range(3):
        plan.example_ids(1)
    (body,) = recorder.calls("/v2/sample")
    assert body == {
        "optimizer_step": 1,
        "generation_step": 1,
        "batch_size": 4,
        "seed": 9,
        "rank": 0,
        "prompts_per_block": 4,
        "offset": 0,
        "first_blocks": [2, 4],
    }


# -- grades -----------------------------------------------------------------------------------------------------


async def test_a_group_is_one_request_and_its_rewards_are_joined_on_completion_index(
    recorder: RecordingServer,
) -> None:
    recorder.grade = lambda items: [
        {**item, "reward": float(len(item["completion"][0]["content"])), "metrics": {"m": 0.5}, "error": None}
        for item in reversed(items)
    ]
    env = await asyncio.to_thread(RemoteEnv, recorder.url)
    with FakeOpenAIServer(["a", "bb", "ccc", "dddd"]) as policy:
        group = await run_group(env, policy.url, 3)
    (body,) = recorder.calls("/v2/grade")
    assert [item["completion_index"] for item in body["items"]] == [0, 1, 2, 3]
    assert {item["sample_id"] for item in body["items"]} == {"easy:3"}
    # a token a letter, and the end of the text
    lengths = [(item["completion_tokens"], len(item["completion"][0]["content"])) for item in body["items"]]
    assert all(tokens == letters + 1 for tokens, letters in lengths), lengths
    assert [rollout.reward for rollout in group.rollouts] == [
        float(len(rollout.completion[0]["content"])) for rollout in group.rollouts
    ]
    assert group.rollouts[0].metrics == {"m": 0.5}


async def test_a_grade_in_training_is_asked_for_with_step_block_seed_and_rank(
    recorder: RecordingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes over each block: block 2 is first trained at step 4. Evaluations have neither."""
    monkeypatch.setenv("RANK", "0")
    env = await asyncio.to_thread(RemoteEnv, recorder.url, seed=9)
    drawn = await asyncio.to_thread(plan_of(env, num_prompts=16, num_iterations=2).example_ids, 2)
    fixed = await asyncio.to_thread(RemoteEnv, recorder.url, dataset="easy")
    with FakeOpenAIServer("x") as policy:
        await run_group(env, policy.url, drawn[0], block_id=2)
        await run_group(env, policy.url, drawn[0])
        await run_group(fixed, policy.url, 0, block_id=5)
    asked = [{name: body[name] for name in body if name != "items"} for body in recorder.calls("/v2/grade")]
    assert asked == [
        {"optimizer_step": 4, "generation_step": 2, "seed": 9, "rank": 0},
        {"rank": 0},
        {"generation_step": 5, "rank": 0},
    ]


async def test_a_completion_that_the_server_cannot_grade_is_a_grading_error_and_no_zero(
    recorder: RecordingServer,
) -> None:
    def grade(items: list[dict[str, Any]]) -> Any:
        return [
            {**items[0], "reward": 0.0, "metrics": {}, "error": None},
            {**items[1], "reward": None, "metrics": {}, "error": "mine: the grader raised ValueError"},
            {**items[2], "reward": 1.0, "metrics": {}, "error": None},
        ]

    recorder.grade = grade
    env = await asyncio.to_thread(RemoteEnv, recorder.url)
    with FakeOpenAIServer("x") as policy:
        group = await run_group(env, policy.url, 0)
    outcomes = [rollout.outcome for rollout in group.rollouts]
    assert outcomes == [Outcome.COMPLETED, Outcome.GRADING_ERROR, Outcome.COMPLETED, Outcome.GRADING_ERROR]
    assert [rollout.reward for rollout in group.rollouts] == [0.0, None, 1.0, None]
    assert "mine: the grader raised ValueError" in str(group.rollouts[1].failure)
    assert "no result for it" in str(group.rollouts[3].failure)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let waits between tries take no time."""
    monkeypatch.setattr(remote, "_BACKOFF_S", 0.0)


@pytest.mark.usefixtures("quick")
async def test_rollouts_of_a_server_that_stays_away_are_grading_errors(recorder: RecordingServer) -> None:
    env = await asyncio.to_thread(RemoteEnv, recorder.url)
    recorder.faults["/v2/grade"] = [503] * 4
    with FakeOpenAIServer("x") as policy:
        group = await run_group(env, policy.url, 0)
        assert len(recorder.calls("/v2/grade")) == 4
        recorder.__exit__()
        gone = await run_group(env, policy.url, 0)
        recorder.__enter__()
    for rollout in [*group.rollouts, *gone.rollouts]:
        assert (rollout.outcome, rollout.reward) == (Outcome.GRADING_ERROR, None)
    assert "as scripted" in str(group.rollouts[0].failure)


async def test_a_refusal_is_not_repeated(recorder: RecordingServer) -> None:
    env = await asyncio.to_thread(RemoteEnv, recorder.url)
    recorder.faults["/v2/grade"] = [400]
    with FakeOpenAIServer("x") as policy:
        group = await run_group(env, policy.url, 0)
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.GRADING_ERROR] * 4
    assert len(recorder.calls("/v2/grade")) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/meta", 3),
        ("/v2/meta", {}),
        ("/v2/rows", [1]),
        ("/v2/rows", {"samples": 3, "total": 2}),
        ("/v2/rows", {"samples": [], "total": 2**70}),
        ("/v2/sample", {}),
        ("/v2/sample", {"samples": 3}),
        ("/v2/sample", {"samples": []}),
    ],
)
def test_an_answer_of_another_kind_ends_the_run_with_the_route_that_gave_it(
    recorder: RecordingServer, path: str, body: Any
) -> None:
    recorder.bodies[path] = body
    with pytest.raises(
        InfraError, match=rf"to {path} is not a dataserver's|{path} answered 200 with|\d+ samples and gave 0"
    ):
        plan_of(RemoteEnv(recorder.url), num_prompts=16).example_ids(0)


@pytest.mark.usefixtures("quick")
def test_prompts_are_asked_for_again_and_then_the_run_ends_with_a_sentence(recorder: RecordingServer) -> None:
    recorder.faults["/v2/meta"] = [502, 504]
    env = RemoteEnv(recorder.url)
    assert len(recorder.calls("/v2/meta")) == 3
    recorder.faults["/v2/sample"] = [500] * 4
    with pytest.raises(InfraError, match=r"gave no answer: .*/v2/sample answered 500.*after 4 attempts"):
        plan_of(env, num_prompts=16).example_ids(0)


def test_rows_that_a_restarted_server_has_under_old_names_are_refused(tmp_path: Path) -> None:
    """Its answers would grade prompts that they do not belong to."""
    with dataserver(tmp_path) as url:
        env = RemoteEnv(url)
    for file in tmp_path.glob("*.jsonl"):
        file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    with (
        serve_in_background(tmp_path / "config.yaml", port=int(url.rpartition(":")[2])),
        pytest.raises(ConfigError, match="is not as it was when this run began"),
    ):
        plan_of(env).example_ids(0)


# -- everything else --------------------------------------------------------------------------------------------


def test_vf_eval_takes_it_by_name(world: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = f'{{"url": "{world}", "eval_dataset": "eval_set"}}'
    with FakeOpenAIServer(right) as policy:
        code = evaluate(
            [
                "verifiers.integrations.dataserver",
                "-a",
                arguments,
                "-m",
                "fake",
                "-b",
                policy.url,
                "-n",
                "4",
                "-r",
                "2",
            ]
        )
    assert code == 0


def test_a_token_goes_with_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_A_TEST", "sesame")
    with dataserver(tmp_path, token="sesame") as url:
        env = RemoteEnv(url, token_var="TOKEN_OF_A_TEST", dataset="easy")
        with FakeOpenAIServer(right) as policy:
            assert env.evaluate_sync(policy.url, "fake", num_examples=2).reward == [1.0, 1.0]
        with pytest.raises(ConfigError, match="answered 401"):
            RemoteEnv(url)
        monkeypatch.delenv("TOKEN_OF_A_TEST")
        with pytest.raises(ConfigError, match="TOKEN_OF_A_TEST"):
            RemoteEnv(url, token_var="TOKEN_OF_A_TEST")
