"""Printed install commands name the verifiers that is installed, never the other project of that name on PyPI."""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from verifiers.installation import install_hint

ROOT = Path(__file__).parents[1]
FOREIGN = re.compile(r"pip install [^`\n]*?\bverifiers(-\w+)?(\[[\w,]+\])?(?!['\"]? ?(==|@)|[-\w/.\[])")
"""An install command that a package index would answer with another project."""


def installed_from(monkeypatch: pytest.MonkeyPatch, origin: object) -> None:
    def distribution(name: str) -> object:
        return SimpleNamespace(read_text=lambda file: None if origin is None else json.dumps(origin))

    monkeypatch.setattr(metadata, "distribution", distribution)


def test_an_extra_is_asked_of_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"verifiers": "1.2", "verifiers-embedded": "3"}.__getitem__)
    assert install_hint("rg") == "install it by `pip install 'verifiers[rg]==1.2'`"
    assert (
        install_hint("json", of="verifiers-embedded") == "install it by `pip install 'verifiers-embedded[json]==3'`"
    )


def test_files_that_are_not_installed_name_their_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", none)
    assert f"pip install -e '{ROOT}[rg]'" in install_hint("rg")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": ROOT.as_uri(), "dir_info": {"editable": True}}, f"pip install {ROOT}/servers/embedded"),
        (
            {"url": "https://host/a.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "pip install 'verifiers-embedded @ git+https://host/a.git@c0ffee#subdirectory=servers/embedded'",
        ),
        (
            {"url": ROOT.as_uri(), "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            f"pip install 'verifiers-embedded @ git+{ROOT.as_uri()}@c0ffee#subdirectory=servers/embedded'",
        ),
    ],
)
def test_a_server_comes_from_where_verifiers_came_from(
    monkeypatch: pytest.MonkeyPatch, origin: object, command: str
) -> None:
    installed_from(monkeypatch, origin)
    assert install_hint("embedded") == f"install it by `{command}`"


def test_vllm_gets_a_place_of_its_own_from_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_from(monkeypatch, {"url": ROOT.as_uri(), "dir_info": {}})
    assert install_hint("vllm") == f"install it by `{ROOT}/servers/vllm/install.sh cuda`"


def test_a_server_is_the_wheel_beside_the_wheel_of_verifiers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("verifiers-1.0-py3-none-any.whl", "verifiers_embedded-0.1-py3-none-any.whl"):
        (tmp_path / name).touch()
    installed_from(monkeypatch, {"url": (tmp_path / "verifiers-1.0-py3-none-any.whl").as_uri(), "archive_info": {}})
    assert f"pip install {tmp_path}/verifiers_embedded-0.1-py3-none-any.whl`" in install_hint("embedded")


@pytest.mark.parametrize(
    ("origin", "place"),
    [
        (None, "the place that verifiers was installed from"),
        (
            {"url": "https://me:secret@host/verifiers-1.0-py3-none-any.whl?sig=1", "archive_info": {}},
            "the place that verifiers was installed from, https://host/verifiers-1.0-py3-none-any.whl",
        ),
    ],
)
def test_a_place_that_is_no_repository_gets_no_made_up_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, origin: object, place: str
) -> None:
    installed_from(monkeypatch, origin)
    monkeypatch.setattr("verifiers.installation._CHECKOUT", tmp_path / "lib" / "site-packages")
    assert install_hint("embedded") == f"install verifiers-embedded from {place}"


def test_no_printed_command_asks_an_index_for_a_package_of_ours() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    kept = [name for name in listed if Path(name).suffix in (".py", ".md", ".sh", ".toml") and name[:6] != "tests/"]
    found = [f"{name}: {hit[0]}" for name in kept for hit in FOREIGN.finditer((ROOT / name).read_text())]
    assert found == []
    assert FOREIGN.search("pip install 'verifiers[rg]'")
    assert FOREIGN.search("pip install verifiers-embedded")
    assert not FOREIGN.search("pip install 'verifiers[rg]==1.0'")
    assert not FOREIGN.search('pip install "verifiers-embedded @ git+$URL"')
    assert not FOREIGN.search("pip install dist/verifiers-1.0-py3-none-any.whl")
