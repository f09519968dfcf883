"""vf-regrade: old and new means side by side, in a run of its own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli import evaluate, regrade
from verifiers.evals.store import read_run
from verifiers.testing import FakeOpenAIServer


@pytest.fixture
def run(env_name: str, capsys: pytest.CaptureFixture[str]) -> Path:
    with FakeOpenAIServer(["4", "5"]) as server:
        assert evaluate.main([env_name, "-b", server.url, "-m", "m", "-n", "2", "-r", "2", "-c", "1"]) == 0
    capsys.readouterr()
    (directory,) = Path("outputs/evals").glob("*/*")
    # the rubric that is edited afterwards is imported again
    del sys.modules["toy_sums_env"]
    return directory


def edit(old: str, new: str) -> None:
    path = Path("modules/toy_sums_env.py")
    path.write_text(path.read_text().replace(old, new))


def test_means_before_and_after_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit('"4")\n', '"4") / 4\n')
    assert regrade.main([str(run)]) == 0
    shown = capsys.readouterr().out
    assert "reward: before 0.500, after 0.125, difference -0.375" in shown
    assert "4 rollouts: 4 completed; 2 rewards are others than before" in shown
    assert sorted(row["reward"] for row in read_run(f"{run}-regraded-1").rows) == [0.0, 0.0, 0.25, 0.25]


def test_a_disk_that_is_full_is_named(
    run: Path, full_disk: Callable[[], AbstractContextManager[None]], capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk():
        assert regrade.main([str(run)]) == 1
    assert f"vf-regrade: results cannot be written to '{run.resolve().parent}': [Errno 27]" in capsys.readouterr().err


def test_the_result_is_one_line_of_json_for_machines(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert regrade.main([str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["rewards"]["reward"] == {"before": 0.5, "after": 0.5}
    assert (result["changed"], result["rollouts"], result["outcomes"]) == (0, 4, {"completed": 4})
    assert Path(result["results"]).name == f"{run.name}-regraded-1"


@pytest.mark.parametrize(("field", "value"), [("env", 3), ("env_args", 3), ("env_directory", {"a": 1})])
def test_a_run_that_names_no_environment_is_one_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any
) -> None:
    path = run / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert regrade.main([str(run)]) == 2
    assert "which name no environment" in capsys.readouterr().err


def test_what_is_no_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert regrade.main([str(tmp_path)]) == 2
    assert "holds no results.jsonl" in capsys.readouterr().err
    (tmp_path / "results.jsonl").write_text("")
    assert regrade.main([str(tmp_path)]) == 2
    assert "give it with --env" in capsys.readouterr().err
