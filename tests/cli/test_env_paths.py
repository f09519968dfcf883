"""Search paths for environments: the working directory, a path, ./environments, and where a run had it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli import evaluate, play, regrade

SOURCE = """
import verifiers as vf


def good(completion):
    return 1.0


def load_environment():
    return vf.SingleTurnEnv(eval_dataset=[{"question": "2+2?", "answer": "4"}], rubric=vf.Rubric([good]))
"""
ONE = ["-m", "fake", "-n", "1", "-r", "1"]


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("zz_"):
            del sys.modules[name]


def module(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(SOURCE)


@pytest.mark.parametrize(
    ("file", "given"),
    [
        ("zz_first.py", "zz-first"),
        ("zz_first.py", "zz_first.py"),
        ("deep/down/zz_first.py", "deep/down/zz_first.py"),
        ("deep/zz_first/zz_first.py", "deep/zz_first"),
        ("deep/zz_first/__init__.py", "deep/zz_first/"),
    ],
)
def test_an_environment_is_found_beside_the_command_or_by_its_path(file: str, given: str, results: Any) -> None:
    module(file)
    assert evaluate.main([given, *ONE]) == 0
    assert results.metadata["env"].replace("-", "_") == "zz_first"
    del sys.modules["zz_first"]
    assert play.main([given, "-i", "9"]) == 2


def test_the_working_directory_shadows_nothing(results: Any) -> None:
    module("zz_first.py")
    Path("random.py").write_text("raise RuntimeError")
    module("environments/zz_first/zz_first.py")
    assert evaluate.main(["zz-first", *ONE]) == 0
    assert results.metadata["env_directory"] == str(Path("environments/zz_first").resolve())
    assert sys.path[-1] == str(Path.cwd())


def test_a_stored_run_is_graded_again_without_saying_where_its_environment_is(
    results: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module("mine/zz_first/zz_first.py")
    path = list(sys.path)
    assert evaluate.main(["zz-first", "-p", "mine", *ONE]) == 0
    run = str(results.directory.resolve())
    del sys.modules["zz_first"]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.chdir("/")
    assert regrade.main([run]) == 0
    assert "reward: before 1.000, after 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["zz-first", "-p", "nowhere"], "--env-dir-path is 'nowhere', and there is no such directory."),
        (
            ["deep/zz_first.py"],
            "there is no file 'deep/zz_first.py'; give a module's path, or an environment's name.",
        ),
    ],
)
def test_a_place_that_does_not_exist_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([*arguments, *ONE]) == 2
    assert capsys.readouterr().err == f"vf-eval: {sentence}\n"


@pytest.mark.parametrize("name", ["my-env", "2fast", "json"])
def test_a_file_given_by_its_path_may_have_a_name_that_no_import_finds(name: str, results: Any) -> None:
    module(f"p/{name}.py")
    assert evaluate.main([f"p/{name}.py", *ONE]) == 0
    assert results.metadata["env"].replace("-", "_") == name.replace("-", "_")
    assert regrade.main([str(results.directory)]) == 0
    del sys.modules[f"verifiers_environment_{name.replace('-', '_')}"]
    assert "load_environment" not in vars(sys.modules["json"])


def test_an_edit_of_a_module_beside_the_environment_is_another_run(results: Any) -> None:
    Path("zz_helper.py").write_text("VALUE = 1.0\n")
    source = SOURCE.replace("import verifiers as vf", "import zz_helper\n\nimport verifiers as vf")
    Path("zz_uses.py").write_text(source.replace("return 1.0", "return zz_helper.VALUE"))
    for value in (1.0, 0.0):
        Path("zz_helper.py").write_text(f"VALUE = {value}\n")
        for name in ("zz_helper", "zz_uses"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        assert evaluate.main(["zz_uses.py", *ONE]) == 0
    assert len(list(Path("outputs/evals").glob("*/*"))) == 2
