"""An environment module that commands can find by name, and a directory to work in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = """
import verifiers as vf


def good(completion):
    return float(completion[-1]["content"] == "4")


def load_environment(column="question", n=6):
    rows = [{column: f"question {i}", "answer": "4"} for i in range(n)]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric([good]))
"""


@pytest.fixture
def env_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of an importable environment; the current directory is an empty temporary one."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "toy_sums_env.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [str(modules), *sys.path])
    monkeypatch.chdir(tmp_path)
    yield "toy-sums-env"
    sys.modules.pop("toy_sums_env", None)
