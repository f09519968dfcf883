"""The demo: no word is both trained on and evaluated on."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def load(name: str) -> ModuleType:
    """Import one of the demo's scripts by its path, and undo what it does to the process."""
    spec = importlib.util.spec_from_file_location(f"demo_{name}", DEMO / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", [*sys.path]):
        spec.loader.exec_module(module)
    return module


def test_eval_words_are_neither_shown_nor_trained_on() -> None:
    pytest.importorskip("reasoning_gym_env", reason="needs the environment package", exc_type=ImportError)
    run = load("tiny")
    env, shown, eval_pairs = run.environment_and_pairs()
    trained = set(env.get_dataset()["question"])
    assert len(eval_pairs) >= 300
    assert {question for question, _ in eval_pairs} == set(env.get_eval_dataset()["question"])
    assert {question for question, _ in shown} <= trained
    assert not trained & {question for question, _ in eval_pairs}
