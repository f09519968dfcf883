"""Merged shards are the evaluation; what is not a whole set of shards is refused by name."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import verifiers as vf
from verifiers.data.sampler import Shard
from verifiers.errors import ConfigError
from verifiers.evals.evaluation_run import EvaluationRun, open_run
from verifiers.evals.merge import merge_runs
from verifiers.evals.store import RESULTS, ResultStore, iter_rows, read_metadata, read_run
from verifiers.evals.summary import load_prices
from verifiers.inference.endpoint import ClientBackend
from verifiers.rollouts.run import Run
from verifiers.testing import FakeClient

PLAN: dict[str, Any] = {
    "env": "sums",
    "env_version": "1",
    "env_source": "1f",
    "env_args": {},
    "prompts": "2e",
    "prompts_trained_on": 0,
    "model": "m",
    "base_url": "http://h/v1",
    "sampling_args": {"temperature": 1.0},
    "seed": 3,
    "versions": {"python": "3"},
    "git": None,
}
OF_THE_CLOCK = ("started", "started_at", "sessions", "merged_from")


def odd(completion: Any) -> float:
    return float(int(completion[-1]["content"]) % 2)


def tenth(completion: Any) -> float:
    return len(completion[-1]["content"]) / 10


def distance(completions: list[Any]) -> list[float]:
    lengths = [len(one[-1]["content"]) for one in completions]
    return [float(length - min(lengths)) for length in lengths]


def reply(body: dict[str, Any]) -> str:
    """Return a number that depends on the prompt and the sampling seed; some prompts cannot be graded."""
    number = int(body["messages"][-1]["content"].split()[-1])
    return "no number" if number % 5 == 4 else str(random.Random(f"{number} {body['seed']}").randrange(1000))


def environment(prompts: int, *, compares: bool) -> vf.Environment:
    rows = [{"question": f"question {i}", "answer": "", "task": f"task {i % 3}"} for i in range(prompts)]
    rubric = vf.Rubric([odd, tenth, distance] if compares else [odd, tenth])
    return vf.SingleTurnEnv(eval_dataset=rows, rubric=rubric, message_type="chat")


def evaluated(root: Path, env: vf.Environment, each: int, shard: Shard | None = None, **plan: Any) -> Path:
    """Run an evaluation, or a shard of it, and return its directory."""
    dataset = env.rows_to_evaluate()
    whole = {**PLAN, "num_examples": len(dataset), "rollouts_per_example": each, **plan}
    run = open_run(whole | ({} if shard is None else {"shard": str(shard)}), env, root)
    with ResultStore(run.directory, {**run.metadata, "status": "running"}) as store:
        runner = Run(env, ClientBackend(FakeClient(reply)), "m", {"temperature": 1.0})
        asyncio.run(run.run(runner, dataset, store.append))
        finish(run, store)
    return run.directory


def finish(run: EvaluationRun, store: ResultStore) -> None:
    store.write_metadata(summary=run.summary(1.0, right_from=0.5), status="finished")


def comparable(directory: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return metadata and rows without what depends on the clock."""
    metadata = read_metadata(directory)
    for name in OF_THE_CLOCK:
        metadata.pop(name, None)
    metadata["summary"] = {n: v for n, v in metadata["summary"].items() if n not in ("seconds", "loop_lag_ms")}
    assert metadata["summary"]["scored"] > 0
    rows = read_run(directory).rows
    for row in rows:
        assert row.pop("generation_ms") >= 0
        assert row.pop("scoring_ms") >= 0
    return metadata, rows


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    prompts=st.integers(1, 11),
    count=st.integers(1, 11),
    each=st.integers(1, 4),
    compares=st.booleans(),
    seed=st.data(),
)
def test_merged_shards_are_the_unsharded_run(
    tmp_path_factory: pytest.TempPathFactory, prompts: int, count: int, each: int, compares: bool, seed: Any
) -> None:
    root, env, count = tmp_path_factory.mktemp("merge"), environment(prompts, compares=compares), min(count, prompts)
    shards = [evaluated(root, env, each, Shard(number, count)) for number in range(1, count + 1)]
    merged = merge_runs(seed.draw(st.permutations(shards)), root / "merged")
    straight = evaluated(root / "straight", env, each)
    assert comparable(merged) == comparable(straight)
    rows = [json.dumps(row) for directory in shards for row in iter_rows(directory)]
    assert sorted(rows) == sorted(json.dumps(row) for row in iter_rows(merged))
    failures = [row for directory in shards for row in read_lines(directory)]
    assert len(read_lines(merged)) == len(failures)


def read_lines(directory: Path) -> list[str]:
    path = directory / "failures.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_each_shard_is_resumed_by_itself_and_the_merged_run_by_the_unsharded_command(tmp_path: Path) -> None:
    env = environment(4, compares=False)
    first, second = (evaluated(tmp_path, env, 2, Shard(number, 2)) for number in (1, 2))
    assert (first.name[8:], second.name[8:]) == ("-1-of-2", "-2-of-2")
    plan = {**PLAN, "num_examples": 4, "rollouts_per_example": 2}
    again = open_run({**plan, "shard": "2/2"}, env, tmp_path)
    assert (again.directory, again.is_complete) == (second, True)
    merged = merge_runs([second, first / "results.jsonl"], tmp_path)
    metadata = read_metadata(merged)
    assert [session["shard"] for session in metadata["sessions"]] == ["1/2", "2/2"]
    assert (metadata["merged_from"], metadata["summary"]["seconds"]) == ([str(first), str(second)], 2.0)
    continued = open_run(plan, env, tmp_path)
    assert (continued.directory, continued.is_complete) == (merged, True)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    env = environment(5, compares=False)
    return [evaluated(tmp_path_factory.mktemp("shards"), env, 1, Shard(number, 3)) for number in (1, 2, 3)]


@pytest.fixture
def shards(stored: list[Path], tmp_path: Path) -> Iterator[list[Path]]:
    """Three shards in a, b and c, that a test may change."""
    yield [Path(shutil.copytree(one, tmp_path / name)) for one, name in zip(stored, "abc", strict=True)]
    assert not (tmp_path / "out").exists()


def change(directory: Path, **metadata: Any) -> Path:
    (directory / "metadata.json").write_text(json.dumps({**read_metadata(directory), **metadata}))
    return directory


def refusal(shards: list[Path], **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        merge_runs(shards, shards[0].parent / "out", **options)
    return str(refused.value).replace(f"{shards[0].parent}/", "")


def test_shards_whose_last_line_lost_its_end_make_a_whole_run(shards: list[Path], tmp_path: Path) -> None:
    straight = read_run(merge_runs(shards, tmp_path / "straight")).rows
    for directory in shards:
        os.truncate(directory / RESULTS, (directory / RESULTS).stat().st_size - 1)
    assert read_run(merge_runs(shards, tmp_path / "merged")).rows == straight


def test_a_merge_that_a_full_disk_ends_is_no_finished_run(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "copyfileobj", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        merge_runs(shards, tmp_path / "merged")
    assert read_metadata(next((tmp_path / "merged").glob("*/*")))["status"] == "running"


def test_a_missing_or_doubled_shard_is_named(shards: list[Path]) -> None:
    a, b, c = shards
    assert refusal([b]) == "of 3 shards these are missing: 1/3, 3/3."
    assert refusal([a, b, c, b]) == "shard 2/3 is there twice: 'b' and 'b'; give one of them."


def test_an_unfinished_shard_is_named(shards: list[Path]) -> None:
    change(shards[1], status="stopped")
    assert refusal(shards) == "shard 2/3 ('b') is unfinished; run its command again to finish it."
    change(shards[1], status="finished")
    results = shards[1] / "results.jsonl"
    results.write_text(results.read_text().replace('"example_id": 4', '"example_id": 3'))
    assert refusal(shards) == (
        "shard 2/3 ('b') should hold 2 rollouts, of which 1 are missing, and holds 1 of others; copy all of it."
    )


def test_shards_of_another_evaluation_are_named_with_what_differs(shards: list[Path], tmp_path: Path) -> None:
    env = environment(5, compares=False)
    other = evaluated(tmp_path / "other", env, 1, Shard(3, 3), model="n", env_version="2")
    said = refusal([*shards[:2], other])
    assert said.startswith(
        f"shard 1/3 ('a') and shard 3/3 ('{other.relative_to(tmp_path)}') are of different evaluations"
    )
    assert said.endswith("(env_version: '1' and '2', model: 'm' and 'n').")
    change(shards[1], identity="0", env_args={"key": "[REDACTED]"})
    change(shards[0], env_args={"key": "[REDACTED]"})
    assert refusal(shards).endswith("shard 2/3 ('b') are of different evaluations (in what is not stored).")
    four = evaluated(tmp_path / "four", env, 1, Shard(4, 4))
    assert refusal([shards[0], four]).endswith("are of different numbers of shards.")


def test_what_is_no_shard_is_named(shards: list[Path], tmp_path: Path) -> None:
    whole = evaluated(tmp_path / "whole", environment(2, compares=False), 1)
    assert refusal([shards[0], whole]).endswith(
        "is not a shard of a run; give directories that vf-eval --shard wrote."
    )
    (tmp_path / "empty").mkdir()
    assert refusal([shards[0], tmp_path / "empty"]).startswith("'empty' is not a shard of a run")


def test_statistics_of_other_settings_are_refused(shards: list[Path], tmp_path: Path) -> None:
    summary = read_metadata(shards[2])["summary"]
    change(shards[2], summary={**summary, "right_from": 1.0})
    assert refusal(shards).startswith("shard 1/3 ('a') has right_from 0.5 and shard 3/3 ('c') 1.0;")
    change(shards[2], summary=summary)
    (tmp_path / "prices.toml").write_text("[m]\nprompt = 1\ncompletion = 2\n")
    assert "were run without prices" in refusal(shards, prices=load_prices(tmp_path / "prices.toml"))
    for one in shards:
        change(one, summary={**read_metadata(one)["summary"], "currency": "USD", "cost": 1.0})
    assert "were run with prices" in refusal(shards)


def test_evaluations_from_python_take_the_same_prompts() -> None:
    env = environment(7, compares=False)
    results = env.evaluate_sync(FakeClient("4"), "m", rollouts_per_example=2, shard=(2, 3))
    assert [prompt[-1]["content"] for prompt in results.prompt] == ["question 1", "question 4"] * 2
