"""vf-eval --shard in several processes, and vf-merge: the run is that of one process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli.compare import main as compare
from verifiers.cli.evaluate import main as evaluate
from verifiers.cli.stored_runs import export, merge
from verifiers.evals.store import read_metadata, read_run
from verifiers.testing import FakeOpenAIServer

NOT_COMPARABLE = ("seconds", "loop_lag_ms", "results")


def by_chance(body: dict[str, Any]) -> str:
    """Answer right or wrong by the prompt and the sampling seed."""
    return str(4 + random.Random(f"{body['messages'][-1]['content']} {body['seed']}").randrange(2))


def summary_of(text: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(text).items() if name not in NOT_COMPARABLE}


def rows_of(directory: Path) -> list[dict[str, Any]]:
    rows = read_run(directory).rows
    return [{name: row[name] for name in row if not name.endswith("_ms")} for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_eight_processes_make_the_run_of_one(env_name: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'modules'}:{os.environ.get('PYTHONPATH', '')}"}
    with FakeOpenAIServer(by_chance) as server:
        command = [sys.executable, "-m", "verifiers.cli.evaluate", env_name, "-a", '{"n": 30}', "-m", "policy"]
        command += ["-b", server.url, "-n", "-1", "-r", "4", "--seed", "5", "--json", "--output-dir"]
        jobs = [
            subprocess.Popen([*command, "runs", "--shard", f"{n}/8"], env=env, stdout=-1, stderr=-1, text=True)
            for n in range(1, 9)
        ]
        for job in jobs:
            _, err = job.communicate(timeout=200)
            assert job.returncode == 0, err
        straight = subprocess.run([*command, "straight"], env=env, capture_output=True, text=True, timeout=100)
        assert straight.returncode == 0, straight.stderr
    merged = subprocess.run(
        [
            sys.executable,
            "-m",
            "verifiers.cli.main",
            "merge",
            *map(str, Path("runs").glob("*/*-of-8")),
            "--output-dir",
            "all",
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert merged.returncode == 0, merged.stderr
    (run,), (one,) = Path("all").glob("*/*"), Path("straight").glob("*/*")
    assert f"8 shards: {run}/results.jsonl" in merged.stdout
    assert rows_of(run) == rows_of(one)
    assert summary_of(json.dumps(read_metadata(run)["summary"])) == summary_of(straight.stdout)
    assert 0.2 < read_metadata(run)["summary"]["rewards"]["reward"]["mean"] < 0.8


def test_a_merged_run_is_shown_compared_exported_and_complete(
    env_name: str, server: FakeOpenAIServer, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [env_name, "-m", "policy", "-b", server.url, "-n", "6", "-r", "2"]
    for number in (1, 2):
        assert evaluate([*command, "--shard", f"{number}/2"]) == 0
    assert "toy-sums-env / policy, shard 2/2" in capsys.readouterr().out
    shards = sorted(map(str, Path("outputs/evals").glob("*/*-of-2")))
    assert merge([shards[0]]) == 2
    assert "vf-merge: of 2 shards these are missing:" in capsys.readouterr().err
    assert merge(shards) == 0
    (run,) = {str(path) for path in Path("outputs/evals").glob("*/*")} - set(shards)
    assert f"2 shards: {run}/results.jsonl" in capsys.readouterr().out
    assert (Path(run) / "report.html").is_file()
    asked = server.request_count
    assert evaluate(command) == 0
    assert "already complete" in capsys.readouterr().err
    assert server.request_count == asked == 12
    assert evaluate([*command, "--fresh"]) == 0
    (fresh,) = {str(path) for path in Path("outputs/evals").glob("*/*")} - {run, *shards}
    assert compare([run, fresh]) == 0
    assert "6 prompts in pairs of 6 in common" in capsys.readouterr().out
    assert export([run, "--format", "sft"]) == 0
    assert "6 rows" in capsys.readouterr().out


def test_a_shard_that_cannot_be_is_a_usage_error(env_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([env_name, "-m", "fake", "--shard", "9/8"]) == 2
    assert "there is no shard 9/8" in capsys.readouterr().err
    assert evaluate([env_name, "-m", "fake", "--shard", "1/8"]) == 2
    assert "5 prompts cannot be split into 8 shards" in capsys.readouterr().err
    assert not list(Path("outputs").glob("evals/*/*"))
