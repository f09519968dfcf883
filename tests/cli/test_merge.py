"""vf-eval --shard in several processes, and vf-merge: the run is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from verifiers.cli.compare import main as compare
from verifiers.cli.evaluate import main as evaluate
from verifiers.cli.stored_runs import export, merge
from verifiers.testing import FakeOpenAIServer


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


def test_a_disk_that_is_full_is_named(
    env_name: str, full_disk: Callable[[], AbstractContextManager[None]], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        assert evaluate([env_name, "-m", "fake", "--shard", f"{number}/2"]) == 0
    capsys.readouterr()
    with full_disk():
        assert merge([*map(str, Path("outputs/evals").glob("*/*-of-2")), "--output-dir", "merged"]) == 1
    assert "vf-merge: results cannot be written to 'merged': [Errno 27]" in capsys.readouterr().err


def test_a_shard_that_cannot_be_is_a_usage_error(env_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([env_name, "-m", "fake", "--shard", "9/8"]) == 2
    assert "there is no shard 9/8" in capsys.readouterr().err
    assert evaluate([env_name, "-m", "fake", "--shard", "1/8"]) == 2
    assert "5 prompts cannot be split into 8 shards" in capsys.readouterr().err
    assert not list(Path("outputs").glob("evals/*/*"))
