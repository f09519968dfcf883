"""A run that was killed is resumed: nothing finished is lost or done twice."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import verifiers as vf
from verifiers.evals.evaluation_run import (
    find_run,
    fingerprint,
    finished_rollouts,
    open_run,
    run_identity,
    scores_whole_groups,
)
from verifiers.evals.store import METADATA, RESULTS, ResultStore
from verifiers.evals.summary import run_summary
from verifiers.log import Redactor
from verifiers.rollouts.rollout import Rollout
from verifiers.testing import FakeOpenAIServer
from verifiers.types import Outcome, RolloutKey

ENVIRONMENT = """
import verifiers as vf


def good(completion, answer):
    return float(completion[-1]["content"] == answer)


def even(completion):
    return float(int(completion[-1]["content"]) % 2 == 0)


def load_environment(n=500):
    rows = [{"question": f"question {i}", "answer": str(i % 5 % 3)} for i in range(n)]
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([good, even], weights=[1.0, 0.25]))
"""

ENV = vf.SingleTurnEnv(eval_dataset=[{"question": "q"}])
PLAN: dict[str, Any] = {
    "env": "sums",
    "env_version": None,
    "env_source": "1f",
    "env_args": {"n": 4},
    "prompts": "2e",
    "model": "m",
    "base_url": "http://h/v1",
    "sampling_args": {"temperature": 1.0},
    "num_examples": 2,
    "rollouts_per_example": 2,
    "seed": 3,
}


def row(example: int, generation: int, reward: float | None) -> dict[str, Any]:
    outcome = "provider_error" if reward is None else "completed"
    return {"example_id": example, "generation": generation, "outcome": outcome, "reward": reward, "attempts": 1}


def write(directory: Path, rows: list[dict[str, Any]]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in rows))


@pytest.mark.parametrize("name", PLAN)
def test_another_plan_is_another_run(name: str) -> None:
    assert run_identity({**PLAN, "started": 1, "git": {"revision": "abc"}}) == run_identity(PLAN)
    assert run_identity({**PLAN, name: "another"}) != run_identity(PLAN)


def keep(path: Path, metadata: dict[str, Any]) -> None:
    path.mkdir(parents=True)
    (path / "metadata.json").write_text(json.dumps(metadata))


def test_the_newest_run_of_the_same_identity_continues(tmp_path: Path) -> None:
    for name, seed, started in (("a", 3, 1.0), ("b", 3, 2.0), ("c", 4, 3.0)):
        plan = {**PLAN, "seed": seed}
        keep(tmp_path / name, {**plan, "identity": run_identity(plan), "started_at": started})
    keep(tmp_path / "e", {**PLAN, "identity": run_identity(PLAN), "started_at": "yesterday"})
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "metadata.json").write_text('{"identity": "sa')
    assert find_run(tmp_path, PLAN) == tmp_path / "b"
    assert find_run(tmp_path, {**PLAN, "seed": 5}) is None
    assert find_run(tmp_path / "missing", PLAN) is None


@pytest.mark.parametrize(
    ("change", "is_part"),
    [
        ({}, True),
        ({"num_examples": 3}, True),
        ({"rollouts_per_example": 3}, True),
        ({"num_examples": 1}, False),
        ({"rollouts_per_example": 1}, False),
        ({"num_examples": 3, "seed": 4}, False),
        ({"num_examples": 3, "shard": "1/2"}, False),
        # as a stranger's metadata.json may have them
        ({"num_examples": 3, "before": {"rollouts_per_example": "2"}}, False),
        ({"num_examples": 3, "before": {"num_examples": None}}, False),
    ],
)
def test_a_run_of_fewer_rollouts_of_the_same_rows_continues(
    tmp_path: Path, change: dict[str, Any], is_part: bool
) -> None:
    rows = Dataset.from_list([{"question": str(number)} for number in range(3)])

    def plan_of(plan: dict[str, Any], rows: Dataset) -> dict[str, Any]:
        return {**plan, "prompts": fingerprint(rows.select(range(plan["num_examples"])))}

    smaller = plan_of(PLAN, rows)
    keep(tmp_path / "a", {**smaller, "identity": run_identity(smaller), **change.get("before", {})})
    plan = plan_of({**PLAN, **{name: value for name, value in change.items() if name != "before"}}, rows)
    asked = rows.select(range(plan["num_examples"]))
    assert (find_run(tmp_path, plan, asked) is not None) == is_part
    others = Dataset.from_list([{"question": "another"}, *rows.to_list()[1:]])
    assert find_run(tmp_path, plan_of(plan, others), others.select(range(plan["num_examples"]))) is None


def test_prompts_that_changed_are_noticed() -> None:
    rows = [{"question": f"q{i}", "answer": "a"} for i in range(600)]
    before = fingerprint(vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric()).get_eval_dataset())
    rows[599]["answer"] = "b"
    after = fingerprint(vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric()).get_eval_dataset())
    assert before != after


def test_what_failed_is_left_to_do_and_the_last_line_counts(tmp_path: Path) -> None:
    write(tmp_path, [row(0, 0, None), row(0, 1, 1.0), row(1, 0, None), row(0, 0, 0.5)])
    results, done = finished_rollouts(tmp_path, 2, whole_groups=False, redact=Redactor(()))
    assert done == {0: {0, 1}, 1: set()}
    assert (len(results), results.scored, results.mean_reward) == (3, 2, 0.75)


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_parts_also_of_killed_ones(tmp_path: Path) -> None:
    run = open_run(PLAN, ENV, tmp_path)
    for ends_after_s, seconds in ((5.0, 5.0), (10.0, 15.0), (-20.0, 15.0)):
        with ResultStore(run.directory, {**run.metadata, "status": "running"}):
            write(run.directory, [row(0, 0, 1.0)])
        began_s = (run.directory / METADATA).stat().st_mtime
        os.utime(run.directory / RESULTS, (began_s, began_s + ends_after_s))
        run = open_run(PLAN, ENV, tmp_path)
        assert run.summary(2.0)["seconds"] == pytest.approx(seconds + 2.0)
    with ResultStore(run.directory, run.metadata) as store:
        store.write_metadata(summary=run.summary(2.0), status="stopped")
    assert open_run(PLAN, ENV, tmp_path).summary(1.0)["seconds"] == pytest.approx(18.0)


def test_where_rollouts_are_compared_a_group_that_lacks_one_is_done_again_whole(tmp_path: Path) -> None:
    write(tmp_path, [row(0, 0, 1.0), row(0, 1, 0.0), row(1, 0, 1.0), row(1, 1, None)])
    results, done = finished_rollouts(tmp_path, 2, whole_groups=True, redact=Redactor(()))
    assert done == {0: {0, 1}}
    for generation in (0, 1):
        results.add_rollout(Rollout(RolloutKey(0, 1, generation), Outcome.COMPLETED, [], [], reward=0.0))
    assert run_summary(results, {}, 1.0)["rewards"]["reward"]["mean"] == 0.25
    assert (len(results), results.scored, results.mean_reward) == (4, 4, 0.25)


def test_rubrics_that_may_compare_rollouts_are_scored_in_whole_groups() -> None:
    def alone(completion: Any) -> float:
        return 1.0

    def together(completions: list[Any]) -> list[float]:
        return [0.0 for _ in completions]

    class Own(vf.Rubric):
        async def score_rollouts(self, *args: Any, **kwargs: Any) -> Any:
            return await super().score_rollouts(*args, **kwargs)

    assert not scores_whole_groups(vf.Rubric([alone]))
    assert not scores_whole_groups(vf.RubricGroup([vf.Rubric([alone]), vf.Rubric([alone])]))
    assert scores_whole_groups(vf.Rubric([together]))
    assert scores_whole_groups(Own([alone]))
    assert scores_whole_groups(vf.RubricGroup([vf.Rubric([alone]), Own([alone])]))


def answer_of(body: dict[str, Any]) -> str:
    number = int(body["messages"][-1]["content"].split()[-1])
    return str(number % 3)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ten_kills_cost_nothing_that_was_finished(tmp_path: Path) -> None:
    (tmp_path / "kill_sums_env.py").write_text(ENVIRONMENT)
    chance = random.Random(7)
    with FakeOpenAIServer(answer_of, latency_s=0.02) as server:
        url = server.url
        command = [sys.executable, "-m", "verifiers.cli.evaluate", "kill-sums-env", "-m", "policy", "-b", url]
        command += ["-n", "-1", "-r", "4", "-c", "16", "--seed", "1", "--json"]
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

        def start(root: str) -> subprocess.Popen[str]:
            process = [*command, "--output-dir", str(tmp_path / root)]
            return subprocess.Popen(process, env=env, cwd=tmp_path, stdout=-1, stderr=-1, text=True)

        kept: list[bytes] = []
        for kill in range(10):
            process = start("killed")
            found = list((tmp_path / "killed").glob("*/*/results.jsonl"))
            before = lines_of(found[0]) if found else 0
            if kill % 5 == 4:
                time.sleep(chance.uniform(0.0, 1.0))  # at its start, where nothing has run yet
            else:
                wanted = before + chance.randrange(1, 180)
                while not found or lines_of(found[0]) < wanted:
                    assert process.poll() is None, process.communicate()[1]
                    found = list((tmp_path / "killed").glob("*/*/results.jsonl"))
                    time.sleep(chance.uniform(0.0, 0.01))
            process.send_signal(signal.SIGKILL)
            process.communicate()
            (results,) = (tmp_path / "killed").glob("*/*/results.jsonl")
            lines = results.read_bytes().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            # what was there before this process is there still, untouched
            assert whole[: len(kept)] == kept
            kept = whole
        assert 100 < len(kept) < 2000
        done = start("killed")
        out, err = done.communicate(timeout=60)
        assert done.returncode == 0, err
        asked = server.request_count
        straight = start("straight")
        straight_out, err = straight.communicate(timeout=60)
        assert straight.returncode == 0, err
    rows = [json.loads(line) for line in results.read_bytes().splitlines()]
    assert len(rows) == 2000
    assert len({(row["example_id"], row["generation"]) for row in rows}) == 2000
    # what was in flight at a kill is asked again, and nothing else
    assert 2000 <= asked <= 2000 + 10 * 16
    summaries = [json.loads(text) for text in (out, straight_out)]
    for summary in summaries:
        for name in ("seconds", "results", "loop_lag_ms"):
            del summary[name]
    assert summaries[0] == summaries[1]
    assert summaries[0]["rollouts"] == 2000
    assert not re.search("nan|null", json.dumps(summaries[0]["rewards"]))
