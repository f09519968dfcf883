"""Grading stored rollouts again: today's rubric, no inference, and never a zero for what cannot be graded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.evals.evaluation_run import finished_rollouts, iter_requests, run_units
from verifiers.evals.regrade import regrade
from verifiers.evals.store import ResultStore, read_run
from verifiers.inference.endpoint import ClientBackend
from verifiers.log import Redactor
from verifiers.rollouts.run import Run
from verifiers.rubrics.judge_rubric import judge_yes_no
from verifiers.testing import FakeClient, Fault

Func = Callable[..., Any]


def environment(*funcs: Func) -> vf.Environment:
    rows = [{"question": f"question {i}", "answer": str(i), "info": {"number": i}} for i in range(4)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric(list(funcs)))


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


async def stored(directory: Path, faults: Any = None) -> Path:
    directory.mkdir()  # noqa: ASYNC240
    env = environment(right)
    client = FakeClient(lambda body: body["messages"][-1]["content"].split()[-1], faults=faults)
    runner = Run(env, ClientBackend(client), "m")
    with ResultStore(directory, {"env": "e", "identity": "1f", "model": "m"}) as store:
        await run_units(runner, iter_requests(env.get_eval_dataset(), 2, None), store.append)
    return directory


async def test_rewards_of_turns_need_no_steps(tmp_path: Path) -> None:
    @vf.turn_reward
    def by_turn(completion: Any) -> list[float]:
        return [2.0] * len(completion)

    done = await regrade(environment(right, by_turn), read_run(await stored(tmp_path / "run")))
    assert done.after.mean_reward == 1.0
    assert done.after.values("by_turn") == {example: [2.0, 2.0] for example in range(4)}


async def test_the_same_rubric_gives_the_same_rewards(tmp_path: Path) -> None:
    run = read_run(await stored(tmp_path / "run"))
    done = await regrade(environment(right), run)
    assert (done.changed, done.before.mean_reward, done.after.mean_reward) == (0, 1.0, 1.0)
    again = read_run(done.directory)
    assert done.directory == tmp_path / "run-regraded-1"
    for row, before in zip(again.rows, run.rows, strict=True):
        assert {**row, "scoring_ms": 0} == {**before, "scoring_ms": 0}
    # else vf-eval would go on with it
    assert again.metadata["regraded_from"] == str(tmp_path / "run")
    assert "identity" not in again.metadata
    assert (await regrade(environment(right), run)).directory == tmp_path / "run-regraded-2"


async def test_todays_rubric_counts_and_the_run_stays_as_it_is(tmp_path: Path) -> None:
    directory = await stored(tmp_path / "run")
    before = (directory / "results.jsonl").read_bytes()

    def even(completion: Any, info: dict[str, Any], task: str) -> float:
        return float(info["number"] % 2 == 0 and completion[0].content.isdigit() and task == "default")

    def first(completions: list[Any]) -> list[float]:
        return [float(place == 0) for place in range(len(completions))]

    done = await regrade(environment(even, first), read_run(directory))
    assert (done.before.mean_reward, done.after.mean_reward, done.changed) == (1.0, 1.0, 4)
    rows = read_run(done.directory).rows
    assert [row["reward"] for row in rows] == [2.0, 1.0, 1.0, 0.0, 2.0, 1.0, 1.0, 0.0]
    assert rows[0]["metrics"] == {"even": 1.0, "first": 1.0}
    assert "right" not in rows[0]
    assert (directory / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "read",
    [
        lambda state: len(state.get("moves", [])),
        lambda state: len(state["responses"]),
        lambda state: 1.0 if state.get("won") else 0.0,
        lambda state: state.get("client").ask(),
    ],
    ids=["get", "index", "flag", "live"],
)
async def test_what_needs_the_live_state_is_a_failed_grade_and_no_zero(
    tmp_path: Path, read: Callable[[Any], float]
) -> None:
    def played(state: Any) -> float:
        return read(state)

    done = await regrade(environment(right, played), read_run(await stored(tmp_path / "run")))
    assert done.after.counts().outcomes == {"grading_error": 8}
    row = read_run(done.directory).rows[0]
    assert row["reward"] is None
    assert "which is not stored with a run" in row["error"]


async def test_what_failed_before_stays_failed_and_failed_grades_get_another_chance(tmp_path: Path) -> None:
    directory = await stored(tmp_path / "run", faults=[Fault(400)])
    lines = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    graded = next(line for line in lines if line["outcome"] == "completed")
    graded.update(outcome="grading_error", reward=None, error="GradingError: right: boom", metrics={})
    (directory / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = await regrade(environment(right), read_run(directory))
    assert done.before.counts().outcomes == {"provider_error": 1, "grading_error": 1, "completed": 6}
    assert done.after.counts().outcomes == {"provider_error": 1, "completed": 7}
    (failed,) = [row for row in read_run(done.directory).rows if row["outcome"] == "provider_error"]
    assert failed["error"] == next(line for line in lines if line["outcome"] == "provider_error")["error"]


async def test_a_reward_counts_as_right_from_where_it_did_before(tmp_path: Path) -> None:
    directory = await stored(tmp_path / "run")
    metadata = json.loads((directory / "metadata.json").read_text())
    (directory / "metadata.json").write_text(json.dumps({**metadata, "summary": {"right_from": 0.5}}))

    def half(completion: Any) -> float:
        return 0.5

    done = await regrade(environment(half), read_run(directory))
    summary = read_run(done.directory).metadata["summary"]
    assert (summary["right_from"], summary["pass_at_k"]["2"]["mean"]) == (0.5, 1.0)


async def test_a_run_without_rollouts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds no rollouts"):
        await regrade(environment(right), read_run(tmp_path))


async def test_a_judge_is_asked_again(tmp_path: Path) -> None:
    run = read_run(await stored(tmp_path / "run"))
    judge = FakeClient("no")
    rows = environment(right).eval_dataset
    rubric = vf.JudgeRubric(judge_client=judge, funcs=[judge_yes_no])
    done = await regrade(vf.SingleTurnEnv(eval_dataset=rows, rubric=rubric), run)
    assert (done.after.mean_reward, done.after.counts().scored) == (0.0, 8)
    assert judge.requests[0].body["max_completion_tokens"] == 4096


@pytest.mark.parametrize("name", ["generation", "outcome"])
async def test_rows_that_do_not_say_what_they_are_can_be_neither_graded_again_nor_resumed(
    name: str, tmp_path: Path
) -> None:
    directory = await stored(tmp_path / "run")
    lines = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    del lines[3][name]
    (directory / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=rf"results\.jsonl' has no {name}"):
        await regrade(environment(right), read_run(directory))
    with pytest.raises(ConfigError, match=rf"results\.jsonl' has no {name}"):
        finished_rollouts(directory, 2, whole_groups=False, redact=Redactor(()))
