"""vf-list: the installed environments, found without running any of their code."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli.list import main

AddPackage = Callable[..., Path]

CLASSIC = "raise RuntimeError('looking must not run anything')\ndef load_environment(): pass\n"


@pytest.fixture
def add_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddPackage:
    """Put an installed package's metadata and files into a site directory."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])

    def add(name: str, files: dict[str, str], requires: str = "verifiers", entry_points: str = "") -> Path:
        info = site / f"{name.replace('-', '_')}-0.1.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\nSummary: About {name}.\n{needs}"
        )
        if entry_points:
            info.joinpath("entry_points.txt").write_text(f"[verifiers.environments]\n{entry_points}\n")
        for path, text in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
        info.joinpath("RECORD").write_text("".join(f"{path},,\n" for path in files))
        importlib.invalidate_caches()
        return site

    return add


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    assert main(["--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return {row["name"]: row for row in json.loads(line)}


def test_entry_points_are_listed_without_importing_them(
    add_package: AddPackage, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"zz_pack/__init__.py": CLASSIC, "zz_pack/inner.py": CLASSIC}
    site = add_package("zz-toys", files, entry_points="zz-one = zz_pack\nzz-two = zz_pack.inner:make")
    found = listed(capsys)
    assert found["zz-one"] == {
        "name": "zz-one",
        "distribution": "zz-toys",
        "version": "0.1",
        "summary": "About zz-toys.",
        "entry_point": "zz_pack",
        "where": str(site / "zz_pack/__init__.py"),
        "origin": None,
    }
    assert found["zz-two"]["where"] == str(site / "zz_pack/inner.py")
    assert {name for name in found if name.startswith("zz")} == {"zz-one", "zz-two"}
    assert "zz_pack" not in sys.modules


def test_a_classic_package_without_entry_point_is_listed_by_its_module(
    add_package: AddPackage, capsys: pytest.CaptureFixture[str]
) -> None:
    site = add_package("zz-classic", {"zz_other_name.py": CLASSIC}, requires="verifiers>=0.1.4")
    row = listed(capsys)["zz-other-name"]
    assert (row["distribution"], row["entry_point"]) == ("zz-classic", None)
    assert row["where"] == str(site / "zz_other_name.py")
    assert "zz_other_name" not in sys.modules


@pytest.mark.parametrize(
    ("source", "is_environment"),
    [
        ("from .inner import load_environment", True),
        ("load_environment = make", True),
        ("try:\n    from .a import load_environment\nexcept ImportError:\n    pass", True),
        ("class A:\n    def load_environment(self): pass", False),
        ("'''load_environment'''", False),
        ("def load_environment(:", False),
    ],
)
def test_what_counts_is_a_load_environment_of_the_module_itself(
    add_package: AddPackage, capsys: pytest.CaptureFixture[str], source: str, is_environment: bool
) -> None:
    add_package("zz-classic", {"zz_classic/__init__.py": source})
    assert ("zz-classic" in listed(capsys)) == is_environment


def test_an_editable_classic_package_is_found_where_its_files_are(
    add_package: AddPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "zz_by_path.py").write_text(CLASSIC)
    add_package("zz-editable", {"_zz_editable.pth": f"{project}\n"})
    # what the interpreter does with the path file at its start
    monkeypatch.setattr(sys, "path", [*sys.path, str(project)])
    assert listed(capsys)["zz-by-path"]["where"] == str(project / "zz_by_path.py")


def test_a_module_that_is_missing_is_told(add_package: AddPackage, capsys: pytest.CaptureFixture[str]) -> None:
    add_package("zz-broken", {}, entry_points="zz-broken = zz_nowhere.inner:load_environment")
    assert listed(capsys)["zz-broken"]["where"] is None
    assert main([]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("zz-broken"))
    assert line.endswith("missing: zz_nowhere.inner:load_environment")


def test_with_nothing_installed_it_says_how_to_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("verifiers.cli.list.distributions", lambda: iter(()))
    assert main([]) == 0
    assert "vf-init" in capsys.readouterr().out
    assert main(["--json"]) == 0
    assert capsys.readouterr().out == "[]\n"
