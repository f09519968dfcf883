"""A run file says what a run is evaluated on, and how; vf-train says what came of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import tiny_world

from verifiers.cli.train import main
from verifiers.evals.store import read_run

ENVIRONMENT = """
import verifiers as vf

def load_environment(letter, num_eval=0):
    def has(completion, **kwargs):
        return float(letter in completion[-1]["content"])

    rows = [{"question": f"{letter}{number}", "answer": ""} for number in range(8)]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows[:num_eval] or None, rubric=vf.Rubric(funcs=[has]))
"""

RUN = """
[environment]
id = "letters"
args = {{ letter = "a" }}

[eval_environments.vowel]
id = "letters"
args = {{ letter = "e", num_eval = 3 }}

[eval_environments.consonant]
id = "letters"
args = {{ letter = "t", num_eval = 2 }}

[model]
path = "{model}"

[server]
url = "{url}"

[trainer]
output_dir = "run"
max_steps = 2
per_device_train_batch_size = 4
num_generations = 4
max_completion_length = 8
eval_strategy = "steps"
eval_steps = 1
eval_max_concurrent = 2
eval_temperature = 0.9
num_generations_eval = 2
save_strategy = "steps"
save_steps = 1
save_total_limit = 1
load_best_model_at_end = true
metric_for_best_model = "vowel_reward"
bf16 = false
use_cpu = true
"""


def test_a_run_file_says_what_is_evaluated_and_the_command_what_came_of_it(
    model_dir: Path,
    server: tiny_world.EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "letters.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(RUN.format(model=model_dir, url=server.url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        assert main(["run.toml"]) == 0
    finally:
        sys.modules.pop("letters", None)
    shown = capsys.readouterr().out
    number = r"\d\.\d{3}"
    assert re.search(rf"^held-out reward of vowel at step 2: {number} ± {number} \(3 prompts\)$", shown, re.MULTILINE)
    assert re.search(r"^held-out reward of consonant at step 2: .* \(2 prompts\)$", shown, re.MULTILINE)
    assert re.search(rf"^best vowel_reward: {number} at step [12], whose weights are saved$", shown, re.MULTILINE)
    for name, letter, prompts in (("vowel", "e", 3), ("consonant", "t", 2)):
        run = read_run(tmp_path / "run" / "evals" / "step-1" / name)
        assert (run.metadata["env"], run.metadata["env_args"]["letter"]) == ("letters", letter)
        assert run.metadata["env_source"] is not None
        assert len(run.rows) == prompts * 2


def test_a_dry_run_tells_that_there_is_nothing_to_evaluate_on(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letters.py").write_text(ENVIRONMENT)
    text = RUN.format(model=model_dir, url="http://127.0.0.1:9/v1")
    start, end = text.index("[eval_environments.vowel]"), text.index("[model]")
    (tmp_path / "run.toml").write_text(text[:start] + text[end:])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        assert main(["run.toml", "--dry-run"]) == 2
    finally:
        sys.modules.pop("letters", None)
    assert "letters has no eval set; give it an eval_dataset" in capsys.readouterr().err
