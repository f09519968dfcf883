"""vf-compare: one sentence that says which run is better, and refusals that say how to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli.compare import main


def write_run(directory: Path, rewards: dict[int, list[float | None]], **metadata: Any) -> str:
    directory.mkdir()
    rows = [
        {
            "example_id": example,
            "generation": generation,
            "prompt": f"question {example}",
            "answer": "4",
            "task": "default",
            "outcome": "timed_out" if reward is None else "completed",
            "reward": reward,
            "metrics": {},
        }
        for example, of_prompt in rewards.items()
        for generation, reward in enumerate(of_prompt)
    ]
    (directory / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {"env": "sums", "env_args": {}, "model": "m", "num_examples": 10, "rollouts_per_example": 2}
    (directory / "metadata.json").write_text(json.dumps({**about, **metadata}))
    return str(directory)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    a = write_run(tmp_path / "a", {n: [1.0, 0.0] for n in range(10)})
    return [a, write_run(tmp_path / "b", {n: [1.0, float(n < 8)] for n in range(10)}, model="[bold]n")]


def test_a_sentence_says_which_run_is_better(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(runs) == 0
    shown = capsys.readouterr().out
    assert f"A: {runs[0]}: 20 of 20 rollouts of 10 prompts scored" in shown
    assert "model: 'm' in A, '[bold]n' in B" in shown
    assert "reward: A 0.500, B 0.900, B - A +0.400, 95 % interval +0.249 .. +0.551, p 0.0078" in shown
    assert "reward: B is better; 10 prompts in pairs of 10 in common; B won 8, tied 2, lost 0" in shown
    assert "detectable with 80 % power: 0.2" in shown


def test_json_is_one_line_for_machines(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*runs, "--json", "--metric", "reward", "--metric", "pass@2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    first, second = json.loads(line)["comparisons"]
    assert (first["verdict"], first["wins"], first["p"], first["paired"]) == ("B is better", 8, 2 / 2**8, True)
    assert first["a"]["counts"]["rollouts"] == 20
    assert (second["metric"], second["difference"]["mean"]) == ("pass@2", 0)


def test_different_prompts_end_with_2_unless_told(
    runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(tmp_path / "c", {n: [1.0, 1.0] for n in range(1, 13)})
    assert main([runs[0], other]) == 2
    complaint = capsys.readouterr().err
    assert "9 in common, 1 only in A, 3 only in B" in complaint
    assert "--on-common-prompts" in complaint
    assert main([runs[0], other, "--on-common-prompts"]) == 0
    shown = capsys.readouterr().out
    assert "9 prompts in pairs of 9 in common" in shown
    assert "1 prompts only in A" in shown
    assert main([runs[0], other, "--unpaired-ok"]) == 0
    assert "unpaired, 10 prompts against 12, 9 in common" in capsys.readouterr().out


def test_nothing_to_compare_ends_with_1(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = write_run(tmp_path / "e", {n: [None] for n in range(10)})
    assert main([runs[0], nothing]) == 1
    assert "no prompt has a value in both runs for reward" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more", [["--metric", "nothing"], ["--confidence", "95"], ["--permutation-seed", "-1"], ["--metric", "pass@0"]]
)
def test_mistakes_in_the_command_end_with_2(
    runs: list[str], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*runs, *more]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
