"""vf-train: everything is checked before the server is waited for, and a mistake is one sentence."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import TrainerState

from verifiers.cli.launch import main as launch
from verifiers.cli.main import Command, CommandFailedError
from verifiers.cli.train import main
from verifiers.data.batch_plan import make_plan
from verifiers.errors import GenerationError
from verifiers.monitoring.run_log import read_run
from verifiers.train.checkpoint.checkpoint import mark_complete
from verifiers.train.checkpoint.run_directory import lock_output_dir

RUN = """
[environment]
id = "toy-sums-env"

[model]
path = "start"

[trainer]
per_device_train_batch_size = 4
gradient_accumulation_steps = 2
num_generations = 4
max_steps = 3
bf16 = false
use_cpu = true
"""
MIXTURE = """
[environments.short]
id = "toy-sums-env"

[environments.long]
id = "toy-sums-env"
"""


@pytest.fixture
def run_file(env_name: str) -> Path:
    Path("start").mkdir()
    Path("start/config.json").write_text("{}")
    path = Path("run.toml")
    path.write_text(RUN)
    return path


def test_a_dry_run_prints_the_plan_in_prompts_and_completions_and_stops(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_file), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert re.search(r"batch plan +prompts +completions\n", shown.out)
    assert re.search(r"per block +2 +8\n", shown.out)
    assert re.search(r"blocks in the run +3 for 3 optimizer steps\n", shown.out)
    assert shown.err == ""
    assert not Path("outputs").exists()


@pytest.mark.parametrize("table", ['levels = { datasets = ["short", "long"], window = 4 }', "pools = {}"])
def test_a_rule_that_adapts_is_shown_with_its_settings(
    run_file: Path, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(f"{MIXTURE}\n[curriculum]\n{table}\n\n{RUN[RUN.index('[model]') :]}")
    assert main([str(run_file), "--dry-run"]) == 0
    assert re.search(
        r"\ncurriculum +(levels short < long|datasets ).*; decides by the block before\n",
        capsys.readouterr().out,
    )


def test_a_line_comes_before_torch_is_loaded(tmp_path: Path) -> None:
    # in place of torch: it ends the process as it is imported
    (tmp_path / "torch.py").write_text("print('torch is loaded', flush=True)\nraise SystemExit(7)\n")
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "verifiers.cli.train", "run.toml"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **paths}, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["vf-train: run.toml; loading torch takes some seconds", "torch is loaded"]


def test_an_environment_beside_the_run_file_is_found_from_any_directory(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    rows = "[{'question': str(n), 'answer': ''} for n in range(8)]"
    (beside / "not_installed.py").write_text(
        f"import verifiers as vf\n\ndef load_environment():\n"
        f"    return vf.SingleTurnEnv(dataset={rows}, rubric=vf.Rubric([len]))\n"
    )
    text = replaced("toy-sums-env", "not_installed").replace('"start"', f'"{Path("start").resolve()}"')
    (beside / "run.toml").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main([str(beside / "run.toml"), "--dry-run"]) == 0
    assert "8 prompts" in capsys.readouterr().out


def replaced(old: str, new: str) -> str:
    assert old in RUN
    return RUN.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            replaced("num_generations", "num_generation"),
            r"\[trainer\] has an unknown key 'num_generation'; did you mean",
        ),
        (RUN + '[server]\nargs = ["--thread", "1"]\n', r"\[server\] args has no effect without launch"),
        (replaced("[model]", "[modle]"), "the file has an unknown key 'modle'; did you mean 'model'"),
        (replaced('id = "toy-sums-env"', ""), r"environment\.id: Field required"),
        (replaced('"start"', '"./nowhere"'), "model path './nowhere' does not exist; give a directory written by"),
        (replaced('"start"', '"./modules"'), "model path './modules' has no config.json"),
        (replaced("toy-sums-env", "toy-sum-env"), "There is no environment 'toy-sum-env'.*'toy_sums_env'"),
        (RUN + '[server]\nurl = "http://x/v1"\nlaunch = "embedded"\n', r"\[server\] has both url and launch"),
        (RUN + '[teacher]\nmodel = "t"\n', r"\[teacher\] needs either url .* or path"),
        (RUN + '[teacher]\nurl = "http://x/v1"\npath = "t"\n', r"\[teacher\] needs either url .* or path"),
        (
            replaced("max_steps = 3", 'max_steps = 3\nserver_urls = ["http://x/v1"]')
            + '[server]\nurl = "http://y/v1"\n',
            r"\[server\] has url and \[trainer\] has server_urls, so one would be ignored",
        ),
        (
            RUN + '[eval_environment]\nid = "toy-sums-env"\n[eval_environments.a]\nid = "toy-sums-env"\n',
            r"has both \[eval_environment\] and \[eval_environments\]",
        ),
        (
            replaced("max_steps = 3", 'max_steps = 3\nresume_from_checkpoint = "a"'),
            r"resume_from_checkpoint has no effect here: .* train\(resume_from_checkpoint=\.\.\.\)",
        ),
        ("[environment", "the run file 'run.toml' cannot be read"),
        (
            replaced("max_steps = 3", 'max_steps = 3\noutput_dir = "run.toml/below"'),
            "output_dir 'run.toml/below' cannot be written to: Not a directory",
        ),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_and_exit_code_2(
    run_file: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(text)
    assert main([str(run_file), "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (sentence,) = shown.err.strip().splitlines()
    assert re.match(f"vf-train: .*{message}", sentence), sentence


@pytest.fixture
def lives(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what happens, in order, to the server of a run, which is none."""
    noted: list[str] = []

    @contextlib.contextmanager
    def starting(*_: object, **__: object) -> Iterator[Callable[[], str]]:
        noted.append("begins")
        try:
            yield lambda: noted.append("is waited for") or "http://127.0.0.1:9/v1"
        finally:
            noted.append("ends")

    monkeypatch.setattr("verifiers.train.processes.launch.starting_server", starting)
    return noted


@pytest.mark.parametrize("setting", ['output_dir = "run.toml/below"', 'report_to = "tensorbord"'])
def test_what_would_end_the_run_is_told_without_waiting_for_the_server(
    run_file: Path, setting: str, lives: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = replaced("max_steps = 3", f"max_steps = 3\n{setting}") + '[server]\nlaunch = "embedded"\n'
    run_file.write_text(text)
    before = sorted(path.name for path in Path().iterdir())
    assert main([str(run_file)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert sorted(path.name for path in Path().iterdir()) == before
    assert lives == ["begins", "ends"]


WAITING = """
import threading
import verifiers as vf

BEGUN, OVER = threading.Event(), threading.Event()


class Env(vf.SingleTurnEnv):
    @vf.teardown
    def wait(self):
        LIVES.append("teardown")
        BEGUN.set()
        OVER.wait(60)


def load_environment():
    rows = [{"question": str(number), "answer": ""} for number in range(8)]
    return Env(dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))
"""


@pytest.mark.parametrize("fails", [False, True], ids=["a run that ends well", "a run that fails"])
def test_a_teardown_that_hangs_keeps_neither_the_server_nor_the_command(
    run_file: Path,
    lives: list[str],
    fails: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Trainer:
        state = TrainerState(global_step=3)

        def __init__(self, *_: object, **__: object) -> None: ...

        def train(self, **_: object) -> None:
            if fails:
                raise GenerationError("it broke")

        def save_model(self) -> None: ...

    monkeypatch.setattr("verifiers.train.trainer.GRPOTrainer", Trainer)
    monkeypatch.setattr("verifiers.envs.lifecycle.TEARDOWN_WITHIN_S", 0.1)
    monkeypatch.setattr("verifiers.cli.train._TEARDOWN_AFTER_FAILURE_S", 0.1)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("waiting_env.py").write_text(WAITING)
    waiting_env = importlib.import_module("waiting_env")
    vars(waiting_env)["LIVES"] = lives
    run_file.write_text(replaced("toy-sums-env", "waiting_env") + '[server]\nlaunch = "embedded"\n')
    try:
        with caplog.at_level(logging.WARNING, "verifiers.envs"):
            code = main([str(run_file)])
        shown = capsys.readouterr()
        assert code == int(fails), shown.err
        assert ("it broke" in shown.err) == fails
        # its thread may need longer than the teardown is given
        assert waiting_env.BEGUN.wait(30)
        assert lives == ["begins", "is waited for", "ends", "teardown"]
        assert "did not end within 0.1 s" in caplog.text
    finally:
        waiting_env.OVER.set()
        del sys.modules["waiting_env"]


def test_the_same_command_resumes_and_fresh_starts_again(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    class Trainer:
        def __init__(self, *_: object, **__: object) -> None:
            self.state = TrainerState(global_step=3)

        def train(self, resume_from_checkpoint: bool) -> None:
            asked.append(resume_from_checkpoint)
            output.mkdir(parents=True, exist_ok=True)
            ended = {"status": "finished", "ended": time.time()}
            (output / "run.json").write_text(json.dumps({**read_run(output), **ended}))

        def save_model(self) -> None:
            if len(asked) in (1, 5):
                raise CommandFailedError("the disk is full")

    output = Path("outputs/toy-sums-env")
    monkeypatch.setattr("verifiers.train.trainer.GRPOTrainer", Trainer)
    # a run whose model is not saved has something left to do, and so has one that is to have more steps
    assert [main([str(run_file)]) for _ in range(3)] == [1, 0, 0]
    assert (
        capsys.readouterr().out.splitlines()[-1] == f"finished: 3 steps in {output}; --fresh starts again at step 0"
    )
    assert asked == [True, True]
    run_file.write_text(replaced("max_steps = 3", "max_steps = 6"))
    assert main([str(run_file), "--resume"]) == 0
    assert main([str(run_file), "--fresh"]) == 0
    assert asked == [True, True, True, False]
    # saved before, but not what it then trained
    assert main([str(run_file), "--fresh"]) == 1
    assert main([str(run_file)]) == 0
    assert asked[4:] == [False, True]
    # what was trained with another seed is another run
    run_file.write_text(replaced("max_steps = 3", "max_steps = 3\nseed = 7"))
    assert main([str(run_file)]) == 0
    assert asked[6:] == [True]
    assert main([str(run_file), "--fresh", "--resume"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_fit_is_told_before_anything_is_loaded(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(per_device_train_batch_size=4, num_generations=4, max_steps=3, num_prompts=8, seed=7)
    checkpoint = Path("outputs/toy-sums-env/checkpoint-2")
    checkpoint.mkdir(parents=True)
    mark_complete(checkpoint, plan, 2)
    lock = lock_output_dir(checkpoint.parent)
    assert main([str(run_file)]) == 1
    lock.release()
    assert "another run writes to outputs/toy-sums-env" in capsys.readouterr().err
    assert main([str(run_file)]) == 1
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(
        r"was written with seed=7, and this run has 42: .*--fresh.* or give another output_dir", sentence
    )


def test_a_model_that_is_nowhere_is_one_sentence_whatever_the_server_says(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = replaced('"start"', '"nobody/this-model"') + '[server]\nlaunch = "embedded"\n'
    run_file.write_text(text)
    assert main([str(run_file)]) == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert re.match(r"vf-train: the model 'nobody/this-model' cannot be loaded \(.*\); give a directory", sentence)


@pytest.mark.parametrize(("command", "flags"), [(main, []), (launch, ["--k8s"])])
def test_without_the_train_extra_the_command_that_adds_it_is_named(
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Command,
    flags: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "verifiers.train.config", raising=False)
    assert command([str(run_file), *flags]) == 2
    assert re.search(r"needs torch, .*pip install .*\[train\]", capsys.readouterr().err)


def test_a_file_that_is_missing_is_named(env_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.toml"]) == 2
    assert capsys.readouterr().err == (
        "vf-train: the run file 'nowhere.toml' does not exist; see examples/ for one to start from.\n"
    )
