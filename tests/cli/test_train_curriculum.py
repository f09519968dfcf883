"""vf-train with a curriculum: the file's stages over its environments, checked before anything is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verifiers.cli.train import main

RUN = """
[environments.short]
id = "toy-sums-env"

[environments.long]
id = "toy-sums-env"

[curriculum]
stages = [
    { name = "warm", until_step = 2, datasets = ["short"] },
    { name = "main", until_step = 4, datasets = ["short", { id = "long", weight = 3 }] },
]

[model]
path = "start"

[trainer]
per_device_train_batch_size = 4
gradient_accumulation_steps = 2
num_generations = 4
max_steps = 4
bf16 = false
use_cpu = true
"""


@pytest.fixture
def run_file(env_name: str) -> Path:
    Path("start").mkdir()
    Path("start/config.json").write_text("{}")
    path = Path("run.toml")
    path.write_text(RUN)
    return path


def replaced(old: str, new: str) -> str:
    assert old in RUN
    return RUN.replace(old, new)


def test_a_dry_run_prints_which_stage_holds_at_which_steps(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_file), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"\nstage warm +steps 0 to 1: short 1 of prompts, \d+ rows\n", shown.out)
    assert re.search(r"\nstage main +steps 2 to 3: short 0\.25 of prompts, .* long 0\.75 of prompts, ", shown.out)
    assert "epochs" not in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("table", ['levels = { datasets = ["short", "long"], window = 4 }', "pools = {}"])
def test_a_rule_that_adapts_is_shown_with_its_settings(
    run_file: Path, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin, end = RUN.index("stages = ["), RUN.index("[model]")
    run_file.write_text(RUN[:begin] + table + "\n\n" + RUN[end:])
    assert main([str(run_file), "--dry-run"]) == 0
    assert re.search(
        r"\ncurriculum +(levels short < long|datasets ).*; decides by the block before\n",
        capsys.readouterr().out,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            replaced('["short"] }', '["shrt"] }'),
            "stage 'warm' names dataset 'shrt', which is not there; there are: lo",
        ),
        (
            replaced("max_steps = 4", "max_steps = 12\nnum_iterations = 4").replace(
                "]\n\n[model]", '    { name = "late", datasets = ["long"] },\n]\n\n[model]'
            ),
            "stage 'main' of the curriculum ends at optimizer step 4, inside the block .* end it at step 8",
        ),
    ],
)
def test_a_mistake_in_the_curriculum_is_one_sentence_and_exit_code_2(
    run_file: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(text)
    assert main([str(run_file), "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (sentence,) = shown.err.strip().splitlines()
    assert re.match(f"vf-train: .*{message}", sentence), sentence
