"""vf-train ends, with its exit code, whatever the teardown of its environment waits for."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verifiers.cli import train
from verifiers.envs import lifecycle
from verifiers.errors import GenerationError

SOURCE = """
import threading
import verifiers as vf

BEGUN, OVER = threading.Event(), threading.Event()
DID = []


def good(completion):
    return 1.0


class Env(vf.SingleTurnEnv):
    @vf.teardown
    def wait(self):
        DID.append("teardown")
        BEGUN.set()
        OVER.wait(60)


def load_environment():
    rows = [{"question": str(number), "answer": ""} for number in range(8)]
    return Env(dataset=rows, rubric=vf.Rubric([good]))
"""

RUN = """
[environment]
id = "waiting_env"

[model]
path = "start"

[server]
launch = "embedded"

[trainer]
output_dir = "out"
per_device_train_batch_size = 4
gradient_accumulation_steps = 2
num_generations = 4
max_steps = 3
bf16 = false
use_cpu = true
"""


@pytest.fixture
def did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run nothing but an environment; return what happens at its end, in order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text("{}")
    (tmp_path / "waiting_env.py").write_text(SOURCE)
    (tmp_path / "run.toml").write_text(RUN)
    waiting_env = importlib.import_module("waiting_env")

    @contextlib.contextmanager
    def launched(*args: Any, **kwargs: Any) -> Iterator[Callable[[], str]]:
        try:
            yield lambda: "http://127.0.0.1:9/v1"
        finally:
            waiting_env.DID.append("server")

    monkeypatch.setattr("verifiers.train.processes.launch.starting_server", launched)
    monkeypatch.setattr(lifecycle, "TEARDOWN_WITHIN_S", 0.1)
    monkeypatch.setattr(train, "_TEARDOWN_AFTER_FAILURE_S", 0.1)
    yield waiting_env.DID
    waiting_env.OVER.set()
    del sys.modules["waiting_env"]


class Trained:
    """A trainer that has nothing to do."""

    fails = False
    state = SimpleNamespace(global_step=3)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def train(self, **kwargs: Any) -> None:
        if self.fails:
            raise GenerationError("it broke")

    def save_model(self) -> None:
        pass


@pytest.mark.parametrize("fails", [False, True], ids=["a run that ends well", "a run that fails"])
def test_a_teardown_that_hangs_keeps_neither_the_server_nor_the_command(
    did: list[str],
    fails: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Trained, "fails", fails)
    monkeypatch.setattr("verifiers.train.trainer.GRPOTrainer", Trained)
    monkeypatch.setattr("verifiers.train.evaluation.storage.evaluation_lines", lambda state, config: [])
    with caplog.at_level(logging.WARNING, "verifiers.envs"):
        code = train.main(["run.toml"])
    shown = capsys.readouterr()
    assert code == int(fails), shown.err
    assert ("it broke" in shown.err) == fails
    # its thread may need longer than the teardown is given
    assert sys.modules["waiting_env"].BEGUN.wait(30)
    assert did == ["server", "teardown"]
    assert "did not end within 0.1 s" in caplog.text
