"""vf-install: the installer's commands and failures are shown, and the installed verifiers stays as it is.

A recording program called uv stands on PATH in the place of the real one, which tests/docs/test_install_commands.py
runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from verifiers.cli.install import main

VERSION = metadata.version("verifiers")

# Installs a package's metadata and modules into the site directory or --target, or does what FAKE_UV says instead.
# A package that excludes the verifiers asked for beside it is refused, as a resolver does.
FAKE_UV = """#!{python}
import json, os, pathlib, sys, tomllib
from packaging.requirements import Requirement
arguments, mode = sys.argv[1:], os.environ.get("FAKE_UV", "install")
with open(os.environ["FAKE_RECORD"], "a") as record:
    record.write(json.dumps(arguments) + "\\n")
target = "--target" in arguments and arguments[arguments.index("--target") + 1]
site = pathlib.Path(target or os.environ["FAKE_SITE"])

def install(name, version, requires=(), files=(), entry_points=""):
    info = site / (name + "-" + version + ".dist-info")
    info.mkdir(exist_ok=True)
    lines = ["Metadata-Version: 2.1", "Name: " + name, "Version: " + version]
    (info / "METADATA").write_text("\\n".join(lines + ["Requires-Dist: " + line for line in requires]) + "\\n")
    (info / "entry_points.txt").write_text(entry_points)
    (info / "direct_url.json").write_text(json.dumps(dict(url=(files[0].parent.as_uri() if files else ""))))
    (info / "RECORD").write_text("".join(f"{file.name},,\\n" for file in files) + f"{info.name}/METADATA,,\\n")
    for file in files:
        (site / file.name).write_text(file.read_text())

if mode == "fail":
    sys.exit("fake uv: the index cannot be reached")
for argument in arguments if mode != "nothing" and "--dry-run" not in arguments else ():
    project = pathlib.Path(argument, "pyproject.toml")
    if project.is_file():
        table = tomllib.loads(project.read_text())["project"]
        for line in table["dependencies"]:
            needed = Requirement(line)
            pins = [other for other in arguments if other.startswith("verifiers") and "==" in other]
            if needed.name.lower() == "verifiers" and pins and (
                needed.url or not needed.specifier.contains(Requirement(pins[0]).specifier.__str__()[2:], True)
            ) and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                sys.exit("fake uv: no solution")
        skipped = table["version"] == "9" and "--force-reinstall" not in arguments and not target
        declared = table.get("entry-points", dict()).get("verifiers.environments", dict())
        lines = [name + " = " + value for name, value in declared.items()]
        files = list(project.parent.glob("*.py")) if mode != "empty" else []
        if not skipped:
            points = "[verifiers.environments]\\n" + "\\n".join(lines)
            install(table["name"], table["version"], table["dependencies"], files, points)
print("fake uv was here")
"""

TASKS = Path(__file__).parents[1] / "integrations/harbor_tasks"

Recorded = Callable[[], list[list[str]]]


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Put the recording installer first on PATH; returns its calls without their fixed beginning."""
    programs, site, record = tmp_path / "bin", tmp_path / "site", tmp_path / "record"
    programs.mkdir()
    site.mkdir()
    program = programs / "uv"
    program.write_text(FAKE_UV.replace("{python}", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("FAKE_SITE", str(site))
    monkeypatch.setenv("FAKE_RECORD", str(record))
    monkeypatch.setattr(sys, "base_prefix", "/not/a/virtual/environment")
    monkeypatch.chdir(tmp_path)

    def calls() -> list[list[str]]:
        found = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        for call in found:
            assert call[:4] == ["pip", "install", "--python", sys.executable]
        return [call[4:] for call in found if "--target" not in call]

    return calls


def write_package(
    directory: str,
    name: str = "zz-env",
    requires: str = '["verifiers"]',
    entry_point: bool = True,
    version: str = "0.3",
) -> Path:
    module = name.replace("-", "_")
    package = Path(directory)
    package.mkdir(parents=True)
    declared = f'[project.entry-points."verifiers.environments"]\n{name} = "{module}:load_environment"\n'
    (package / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "{version}"\ndependencies = {requires}\n'
        + (declared if entry_point else "")
    )
    (package / f"{module}.py").write_text("def load_environment(): pass\n")
    return package.resolve()


def test_a_name_is_installed_from_the_environments_directory(uv: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    package = write_package("environments/zz_env")
    assert main(["zz-env"]) == 0
    # the installed version by its exact number, so that no installer looks for another
    assert uv() == [[str(package), f"verifiers=={VERSION}"]]
    shown = capfd.readouterr().out.splitlines()
    (command,) = (line for line in shown if line.startswith("$ "))
    assert command.endswith(f"uv pip install --python {sys.executable} {package} verifiers=={VERSION}")
    assert shown.index(command) < shown.index("fake uv was here")
    (environment,) = (line for line in shown if "installed zz-env 0.3: environment zz-env" in line)
    assert "entry point zz_env:load_environment" in environment
    assert str(Path("site/zz_env.py").resolve()) in environment


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["./mine/zz_env", "--editable"], [["-e", "PACKAGE", f"verifiers=={VERSION}"]]),
        (["zz-env", "-p", "mine", "--no-deps"], [["--force-reinstall", "--no-deps", "PACKAGE"]]),
        (["zz-env", "-p", "mine", "--dry-run"], [["--dry-run", "PACKAGE", f"verifiers=={VERSION}"]]),
    ],
)
def test_paths_and_flags_become_the_installers_arguments(
    uv: Recorded, arguments: list[str], expected: list[list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    package = str(write_package("mine/zz_env"))
    assert main([argument.replace("PACKAGE", package) for argument in arguments]) == 0
    assert uv() == [[argument.replace("PACKAGE", package) for argument in call] for call in expected]
    assert ("installed zz-env 0.3" in capfd.readouterr().out) == ("--dry-run" not in arguments)


def test_a_classic_package_is_reported_by_its_module(uv: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    write_package("environments/zz_env", requires='["verifiers>=0.1.4"]', entry_point=False)
    assert main(["zz-env"]) == 0
    assert "environment zz-env (module, " in capfd.readouterr().out


@pytest.mark.parametrize(("place", "name"), [("My Tasks", "my-tasks"), ("My Tasks/files", "files")])
def test_task_folders_become_a_package_named_after_their_directory(
    uv: Recorded, capfd: pytest.CaptureFixture[str], place: str, name: str
) -> None:
    shutil.copytree(TASKS / "files", "My Tasks/files")
    assert main([f"./{place}"]) == 0
    [[package, _]] = uv()
    assert Path(package).name == name
    # only the installer needs it
    assert not Path(package).exists()
    assert f"environment {name} (entry point {name.replace('-', '_')}:load_environment" in capfd.readouterr().out
    assert main([f"./{place}", "--editable"]) == 2
    (Path(place) / "task.toml").write_text('[environment]\nos = "windows"\n')
    assert main([f"./{place}"]) == 2


def test_a_git_url_goes_to_the_installer_as_it_is(uv: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    url = "git+https://example.invalid/a.git@v1#subdirectory=environments/zz_env"
    assert main([f"zz-env @ {url}", "--dry-run"]) == 0
    assert uv() == [["--dry-run", url, f"verifiers=={VERSION}"]]


def test_a_package_that_the_installer_skips_as_installed_is_installed_again(uv: Recorded) -> None:
    package = write_package("environments/zz_env", version="9")
    assert main(["zz-env"]) == 0
    assert uv() == [[str(package), f"verifiers=={VERSION}"], ["--force-reinstall", "--no-deps", str(package)]]


@pytest.mark.parametrize(
    ("pin", "code"),
    [
        ("verifiers>=0.1.4", 0),
        ("verifiers==0.1.8; sys_platform == 'no-such'", 0),
        ("verifiers>=0.1.5,<0.2", 2),
        ("verifiers @ git+https://a", 2),
    ],
)
def test_a_pin_that_excludes_the_installed_version_is_named_in_one_sentence(
    uv: Recorded, pin: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    write_package("environments/zz_env", requires=f'["{pin}", "zz-other"]')
    assert main(["zz-env"]) == code
    if code:
        assert os.listdir("site") == []
        *_, sentence = capfd.readouterr().err.strip().splitlines()
        assert re.search(r"zz-env requires verifiers.+, which excludes the installed", sentence)
        assert "--ignore-pin" in sentence


def test_with_ignore_pin_the_dependencies_are_installed_without_the_excluding_one(uv: Recorded) -> None:
    package = write_package("environments/zz_env", requires='["verifiers<0.2", "zz-other>=1", "zz-last"]')
    assert main(["zz-env", "--ignore-pin"]) == 0
    assert uv() == [
        [f"verifiers=={VERSION}", "zz-other>=1", "zz-last"],
        ["--force-reinstall", "--no-deps", str(package)],
    ]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fail", "the package was not installed: the command above ended with exit code 1"),
        ("nothing", "no environment was installed for"),
        ("empty", "its environment 'zz-env' cannot work: .* 'zz_env:load_environment'"),
    ],
)
def test_an_installation_that_failed_is_never_reported_as_done(
    uv: Recorded, mode: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_package("environments/zz_env")
    monkeypatch.setenv("FAKE_UV", mode)
    assert main(["zz-env"]) == 1
    shown = capfd.readouterr()
    assert "installed zz-env" not in shown.out
    assert re.search(message, shown.err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-like-it"], "there is no package 'nothing-like-it' in './environments' (it has zz_env"),
        (["zz-env", "-p", "nowhere"], "there is no package 'zz-env' in 'nowhere' (it has no packages)"),
        (["beside"], "or give the package's path, such as './my_env'"),
        (["./nowhere"], "there is no 'nowhere'"),
        (["./bare"], "'bare' is not a package: it has no pyproject.toml"),
        (["https://example.invalid/a.git"], "is not a git URL that can be installed; write it as 'git+https://...'"),
        (["git+https://example.invalid/a.git", "--editable"], "--editable works with a directory only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(
    uv: Recorded,
    arguments: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_package("environments/zz_env")
    write_package("beside")
    Path("bare").mkdir()
    assert main(arguments) == 2
    assert uv() == []
    shown = capfd.readouterr()
    assert shown.out == ""
    (sentence,) = shown.err.strip().splitlines()
    assert sentence.startswith("vf-install: ")
    assert message in sentence
