"""`import verifiers`: quick, free of heavy libraries, and true to its table of names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import verifiers

STUB = ast.parse(Path(verifiers.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
PUBLIC = {
    alias.asname or alias.name: (f"verifiers.{statement.module}", alias.name)
    for statement in STUB.body
    if isinstance(statement, ast.ImportFrom) and statement.level
    for alias in statement.names
}
"""The module of each public name and its name there, as type checkers read them."""

HEAVY = ["torch", "transformers", "trl", "datasets", "openai", "aiohttp", "pydantic", "numpy", "ray"]


def in_a_new_process(code: str) -> Any:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    return json.loads(result.stdout)


def test_import_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import time, sys, json; started = time.process_time(); import verifiers; "
        "seconds = time.process_time() - started; "
        f"print(json.dumps([seconds, [name for name in {HEAVY} if name in sys.modules]]))"
    )
    seconds, heavy = in_a_new_process(code)
    assert heavy == []
    assert seconds < 0.3


def test_a_rubric_and_a_parser_need_nothing_heavy() -> None:
    code = (
        "import sys, json, verifiers as vf; vf.Rubric(funcs=[], parser=vf.ThinkParser(vf.extract_boxed_answer)); "
        "vf.State, vf.ConfigError, vf.stop, vf.load_environment, vf.setup_logging; "
        f"print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )
    assert in_a_new_process(code) == []


def test_every_public_name_resolves() -> None:
    for name, (module, attribute) in PUBLIC.items():
        if module.startswith("verifiers.train") and importlib.util.find_spec("torch") is None:
            continue
        assert getattr(verifiers, name) is getattr(importlib.import_module(module), attribute)
        assert name in dir(verifiers)
    assert not {"annotations", "sys"} & {*dir(verifiers)}


NEED_AN_EXTRA = {"MCPEnv", "ReasoningGymEnv", "TextArenaEnv"}


def test_star_import_brings_every_name_but_those_that_need_an_extra() -> None:
    train = {name for name, (module, _) in PUBLIC.items() if module.startswith("verifiers.train")}
    assert set(verifiers.__all__) == set(PUBLIC) - train - NEED_AN_EXTRA
    code = "import sys, json; from verifiers import *; print(json.dumps([Rubric.__name__, 'torch' in sys.modules]))"
    assert in_a_new_process(code) == ["Rubric", False]


def test_modules_that_packages_reach_through_vf_are_there() -> None:
    for name in ("types", "errors", "parsers", "rubrics", "envs", "utils"):
        assert getattr(verifiers, name).__name__ == f"verifiers.{name}"


@pytest.mark.parametrize("missing", ["torch", "trl", "transformers", "peft"])
def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def no_extra(module: str) -> Any:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=f"{missing}.nn")

    monkeypatch.delitem(vars(verifiers), "GRPOTrainer", raising=False)
    monkeypatch.setattr(importlib, "import_module", no_extra)
    with pytest.raises(AttributeError, match=rf"GRPOTrainer needs {missing}.*pip install 'verifiers\[train\]=="):
        _ = verifiers.GRPOTrainer


def test_a_fault_of_our_own_is_not_taken_for_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(module: str) -> Any:
        raise ImportError("cannot import name 'x'", name="verifiers.train.trainer")

    monkeypatch.delitem(vars(verifiers), "GRPOTrainer", raising=False)
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ImportError, match="cannot import name 'x'"):
        _ = verifiers.GRPOTrainer


def test_an_unknown_name_is_a_plain_attribute_error() -> None:
    assert not hasattr(verifiers, "NoSuchThing")


def test_the_version_is_that_of_the_distribution_or_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    # what is read is kept: set it first, so that the test leaves the module as it was
    monkeypatch.setitem(vars(verifiers), "__version__", "kept")
    del verifiers.__version__
    monkeypatch.setattr(metadata, "version", not_installed)
    assert verifiers.__version__ == "1.0.0.dev0"
    del verifiers.__version__
    monkeypatch.setattr(metadata, "version", lambda name: f"9.9 of {name}")
    assert verifiers.__version__ == "9.9 of verifiers"
