"""Every code block in README and docs runs as it stands.

Blocks of a page run in order and share one namespace, in an empty directory that is importable. A block with
`title="name.py"` is written to that file first; a TOML block titled *.toml is checked as `vf-train --dry-run` does.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import trl

from verifiers.cli.train import train
from verifiers.envs.datasets import count_trained_on
from verifiers.errors import ConfigError
from verifiers.train.config import GRPOConfig
from verifiers.train.models import check_model_path
from verifiers.train.run_file import load_run_file

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')


def blocks_of(page: Path) -> list[tuple[str, str | None, str]]:
    found = []
    for match in BLOCK.finditer(page.read_text()):
        title = TITLE.search(match["options"])
        found.append((match["language"], title[1] if title else None, match["code"]))
    return found


def check_run_file(path: Path) -> None:
    """Return what `vf-train --dry-run` checks: the environment is loaded, the sizes divide, eval sets exist."""
    model = Path(load_run_file(path).model.path)
    try:
        check_model_path(str(model))
    except ConfigError:
        # a directory that the page's reader has made
        (path.parent / model).mkdir(parents=True)
        (path.parent / model / "config.json").write_text("{}")
    assert train(str(path), dry_run=True) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    modules = set(sys.modules)
    for number, (language, title, code) in enumerate(blocks_of(page), 1):
        if title is not None:
            (tmp_path / title).write_text(code)
        if language == "toml":
            tomllib.loads(code)
            if title is not None:
                check_run_file(tmp_path / title)
        elif language == "python":
            exec(compile(code, f"{page.name}, block {number}", "exec"), namespace)
            if title is not None and "def load_environment" in code:
                env = namespace["load_environment"]()
                if env.eval_dataset is not None:
                    assert count_trained_on(env, env.eval_dataset) == 0, "eval rows are not trained on"
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def run_files() -> list[Path]:
    return sorted((ROOT / "examples").rglob("*.toml"))


@pytest.mark.parametrize("path", run_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_run_files_of_the_examples_pass_a_dry_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if 'engine = "ray"' in path.read_text():
        pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.chdir(tmp_path)
    # with the environments beside it
    shutil.copytree(path.parent, tmp_path, dirs_exist_ok=True)
    if path.parent.name == "terminal":
        make = runpy.run_path(str(path.with_name("make.py")))
        make["write_tasks"](Path("runs/terminal/tasks"), "debian:stable-slim", [("cup", "one")])
    check_run_file(tmp_path / path.name)


def settings_rows() -> dict[str, str]:
    """Return the settings of the page on run files, with what it says of their defaults."""
    part = (ROOT / "docs/reference/run-file.md").read_text().split("## `[trainer]`")[1]
    rows = [row.strip().strip("|").split(" | ") for row in part.splitlines() if row.startswith("| `")]
    return {cells[0].strip(" `"): cells[-1].strip() for cells in rows}


def test_every_setting_that_the_trainer_adds_is_on_the_page_with_its_default() -> None:
    theirs = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
    ours = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    added = {name for name, field in ours.items() if name not in theirs or field.default != theirs[name].default}
    rows = settings_rows()
    assert added - rows.keys() == set()
    assert rows.keys() - ours.keys() == set()
    for name, told in rows.items():
        default = ours[name].default
        if isinstance(default, bool):
            assert told == str(default).lower(), name
        elif isinstance(default, (int, float)):
            assert float(told) == default, name
        elif isinstance(default, str) and default and default != "none":
            assert told.strip("`") == default, name
        else:
            # None stands for what the words say
            assert told, name
