"""vf-init: what it writes runs as it is, and it never writes half of it or over something."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import verifiers as vf
from verifiers.cli.init import main

KINDS = ("single-turn", "multi-turn", "tool")


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files_under(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_package_is_written_with_its_test_and_the_next_commands_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["my-env"]) == 0
    package = Path("environments/my_env")
    assert files_under(package) == {"README.md", "my_env.py", "pyproject.toml", "tests/test_my_env.py"}
    assert os.listdir("environments") == ["my_env"], "nothing temporary is left"
    project = tomllib.loads((package / "pyproject.toml").read_text())
    assert project["build-system"]["build-backend"] == "hatchling.build"
    assert project["project"]["name"] == "my-env"
    assert project["project"]["dependencies"] == ["verifiers>=1.0.0.dev0"]
    entry_points = project["project"]["entry-points"]["verifiers.environments"]
    assert entry_points == {"my-env": "my_env:load_environment"}
    shown = capsys.readouterr().out
    for command in ("vf-install my-env", "vf-play my-env", "vf-eval my-env"):
        assert command in shown


@pytest.mark.parametrize(
    ("kind", "multi_file"), [("single-turn", False), ("multi-turn", True), ("tool", False), ("tool", True)]
)
def test_every_template_passes_its_own_tests_as_it_is(
    kind: str, multi_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["my-env", "--kind", kind, *(["--multi-file"] if multi_file else [])]) == 0
    shipped = tomllib.loads(Path("environments/my_env/pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert shipped["targets"]["wheel"] == (
        {"packages": ["my_env"]} if multi_file else {"only-include": ["my_env.py"]}
    )
    assert Path("environments/my_env/my_env/__init__.py").exists() == multi_file
    monkeypatch.syspath_prepend(str(tmp_path / "environments/my_env"))
    try:
        tests = runpy.run_path("environments/my_env/tests/test_my_env.py")
        names = [name for name in tests if name.startswith("test_")]
        assert len(names) >= 2
        for name in names:
            tests[name]()
        assert vf.check(vf.load_environment("my_env")).is_right
    finally:
        for module in [name for name in sys.modules if name.partition(".")[0] == "my_env"]:
            del sys.modules[module]


def test_templates_are_formatted_and_free_of_lint() -> None:
    for kind in KINDS:
        assert main([f"one-{kind}", "--kind", kind]) == 0
        assert main([f"several-{kind}", "--kind", kind, "--multi-file"]) == 0
    for command in (["format", "--check"], ["check", "--select", "E,F,B,UP"]):
        ruff = [sys.executable, "-m", "ruff", command[0], "--isolated", "--no-cache", *command[1:], "environments"]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Env", "the name 'My-Env' cannot name a package"),
        ("../up", "'../up' cannot name"),
        ("class", "'class' is a keyword of Python"),
        ("random", "'random' would hide Python's own module random"),
        ("verifiers", "'verifiers' is already installed"),
        ("yaml", "'yaml' would hide the installed module yaml"),
    ],
)
def test_a_name_that_cannot_be_a_package_is_one_sentence_and_exit_code_2(
    name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--", name]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (sentence,) = shown.err.strip().splitlines()
    assert re.match(f"vf-init: .*{message}", sentence)
    assert not Path("environments").exists()


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ("environments/my_env/notes.txt", "exists already"),
        ("environments/my_env", "exists already"),
        ("environments", "cannot be written"),
    ],
)
def test_what_is_there_is_never_overwritten(present: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(present)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    assert main(["my-env"]) == 2
    assert message in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert files_under(Path()) == {present}


def test_a_package_whose_writing_fails_is_not_there_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text = Path.write_text

    def full_disk(self: Path, *args: str, **kwargs: str) -> int:
        if self.name == "README.md":
            raise OSError(28, "No space left on device")
        return write_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full_disk)
    assert main(["my-env", "-p", "elsewhere"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert os.listdir("elsewhere") == []


def test_a_model_is_made_where_it_is_asked_for_and_never_over_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warm_start = pytest.importorskip("verifiers.train.tiny_model.warm_start", reason="needs the train extra")

    def make(directory: Path) -> SimpleNamespace:
        directory.mkdir(parents=True)
        return SimpleNamespace(accuracy=0.36, seconds=40.0)

    monkeypatch.setattr(warm_start, "make_tiny_model", make)
    assert main(["--model", "tiny"]) == main(["models/mine", "--model", "tiny"]) == 0
    assert Path("tiny").is_dir()
    assert "vf-serve --model models/mine" in capsys.readouterr().out
    assert main(["--model", "tiny"]) == 2
    assert "'tiny' exists already" in capsys.readouterr().err
