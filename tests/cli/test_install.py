"""vf-install: the installer's commands and failures are shown, and the installed verifiers stays as it is.

A recording program called uv stands on PATH in the place of the real one; the real ones are in test_whole_way.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from verifiers.cli.exit_codes import CommandFailedError
from verifiers.cli.install import main
from verifiers.cli.sources import PackageMetadata, Source, read_metadata

VERSION = metadata.version("verifiers")

# Installs a package's metadata and modules into the site directory, or does what FAKE_UV says instead.
FAKE_UV = """#!{python}
import json, os, pathlib, sys, tomllib
site, mode = pathlib.Path(os.environ["FAKE_SITE"]), os.environ.get("FAKE_UV", "install")
with open(os.environ["FAKE_RECORD"], "a") as record:
    record.write(json.dumps(sys.argv[1:]) + "\\n")

def install(name, version, files=(), entry_points=""):
    info = site / (name + "-" + version + ".dist-info")
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: " + name + "\\nVersion: " + version
                                   + "\\nRequires-Dist: verifiers\\n")
    (info / "entry_points.txt").write_text(entry_points)
    (info / "RECORD").write_text("".join(file.name + ",,\\n" for file in files))
    for file in files:
        (site / file.name).write_text(file.read_text())

if mode == "fail":
    sys.exit("fake uv: the index cannot be reached")
if mode == "replace":
    install("verifiers", "0.1.8")
for argument in sys.argv[1:] if mode != "nothing" else ():
    project = pathlib.Path(argument, "pyproject.toml")
    if project.is_file():
        table = tomllib.loads(project.read_text())["project"]
        declared = table.get("entry-points", dict()).get("verifiers.environments", dict())
        lines = [name + " = " + value for name, value in declared.items()]
        files = list(project.parent.glob("*.py")) if mode != "empty" else []
        install(table["name"], table["version"], files, "[verifiers.environments]\\n" + "\\n".join(lines))
print("fake uv was here")
"""

Recorded = Callable[[], list[list[str]]]


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Put the recording installer first on PATH; what it was called with, its fixed beginning checked and cut."""
    programs, site, record = tmp_path / "bin", tmp_path / "site", tmp_path / "record"
    programs.mkdir()
    site.mkdir()
    program = programs / "uv"
    program.write_text(FAKE_UV.replace("{python}", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("FAKE_SITE", str(site))
    monkeypatch.setenv("FAKE_RECORD", str(record))
    monkeypatch.setattr(sys, "base_prefix", "/not/a/virtual/environment")
    monkeypatch.chdir(tmp_path)

    def calls() -> list[list[str]]:
        found = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        for call in found:
            assert call[:4] == ["pip", "install", "--python", sys.executable]
        return [call[4:] for call in found]

    return calls


def write_package(
    directory: str, name: str = "zz-env", requires: str = '["verifiers"]', entry_point: bool = True
) -> Path:
    module = name.replace("-", "_")
    package = Path(directory)
    package.mkdir(parents=True)
    declared = f'[project.entry-points."verifiers.environments"]\n{name} = "{module}:load_environment"\n'
    (package / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "0.3"\ndependencies = {requires}\n{declared if entry_point else ""}'
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
    assert f"installed zz-env 0.3; verifiers {VERSION} is as it was" in shown
    (environment,) = (line for line in shown if "environment zz-env" in line)
    assert "entry point zz_env:load_environment" in environment
    assert str(Path("site/zz_env.py").resolve()) in environment


@pytest.mark.parametrize("given", ["./elsewhere", "ABSOLUTE"])
def test_a_path_is_installed_and_may_be_used_in_place(uv: Recorded, given: str) -> None:
    package = write_package("elsewhere")
    assert main([str(package) if given == "ABSOLUTE" else given, "-e"]) == 0
    assert uv() == [["-e", str(package), f"verifiers=={VERSION}"]]


def test_a_name_is_looked_for_where_p_says(uv: Recorded) -> None:
    package = write_package("mine/zz_env")
    assert main(["zz_env", "-p", "mine"]) == 0
    assert uv()[0][0] == str(package)


def test_a_classic_package_is_reported_by_its_module(uv: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    write_package("environments/zz_env", requires='["verifiers>=0.1.4"]', entry_point=False)
    assert main(["zz-env"]) == 0
    assert "environment zz-env (module, " in capfd.readouterr().out


def test_no_deps_installs_the_package_alone(uv: Recorded) -> None:
    package = write_package("environments/zz_env", requires='["verifiers", "zz-other"]')
    assert main(["zz-env", "--no-deps"]) == 0
    assert uv() == [["--no-deps", str(package)]]


def test_a_dry_run_prints_the_command_and_runs_nothing(uv: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    write_package("environments/zz_env")
    assert main(["zz-env", "--dry-run"]) == 0
    assert uv() == []
    (command,) = capfd.readouterr().out.splitlines()
    assert command.startswith("$ ")


@pytest.mark.parametrize("pin", ["verifiers>=0.1.4", "verifiers[train]", "Verifiers>0.1", f"verifiers=={VERSION}"])
def test_pins_that_the_installed_version_meets_pass(uv: Recorded, pin: str) -> None:
    write_package("environments/zz_env", requires=json.dumps([pin]))
    assert main(["zz-env"]) == 0
    extra = "[train]" if "[train]" in pin else ""
    assert uv()[0][1] == f"verifiers{extra}=={VERSION}"


@pytest.mark.parametrize(
    "pin",
    [
        "verifiers>=0.1.5,<0.2",
        "verifiers==0.1.8",
        "verifiers[all]~=0.1.3",
        "verifiers<1.0",
        "verifiers @ git+https://example.invalid/verifiers",
    ],
)
def test_a_pin_that_excludes_the_installed_version_is_named_and_nothing_is_run(
    uv: Recorded, pin: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_package("environments/zz_env", requires=json.dumps([pin, "zz-other"]))
    assert main(["zz-env"]) == 2
    assert uv() == []
    shown = capfd.readouterr()
    assert shown.out == ""
    (sentence,) = shown.err.strip().splitlines()
    assert f"zz-env requires {pin}, which excludes the installed verifiers {VERSION}" in sentence
    assert "--ignore-pin" in sentence


def test_a_pin_for_another_platform_does_not_count(uv: Recorded) -> None:
    requires = ["verifiers==0.1.8; sys_platform == 'no-such'", "verifiers==0.1.8; extra == 'old'", "verifiers"]
    write_package("environments/zz_env", requires=json.dumps(requires))
    assert main(["zz-env"]) == 0


def test_with_ignore_pin_the_dependencies_are_installed_without_the_excluding_one(uv: Recorded) -> None:
    package = write_package("environments/zz_env", requires='["verifiers<0.2", "zz-other>=1", "zz-last"]')
    assert main(["zz-env", "--ignore-pin"]) == 0
    assert uv() == [[f"verifiers=={VERSION}", "zz-other>=1", "zz-last"], ["--no-deps", str(package)]]


def test_a_failing_installer_is_exit_code_1_and_nothing_is_reported_as_installed(
    uv: Recorded, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_package("environments/zz_env", requires='["verifiers<0.2", "zz-other"]')
    monkeypatch.setenv("FAKE_UV", "fail")
    assert main(["zz-env", "--ignore-pin"]) == 1
    assert len(uv()) == 1, "nothing is run after a command that failed"
    shown = capfd.readouterr()
    assert "installed zz-env" not in shown.out
    assert "fake uv: the index cannot be reached" in shown.err
    assert "the package was not installed: the command above ended with exit code 1" in shown.err


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("nothing", "the installer reported success, but zz-env is not installed"),
        ("replace", f"verifiers {VERSION} of .* was replaced by 0.1.8"),
        ("empty", "its environment 'zz-env' cannot work: .* 'zz_env:load_environment'"),
    ],
)
def test_what_an_installer_reports_is_checked(
    uv: Recorded, mode: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_package("environments/zz_env")
    monkeypatch.setenv("FAKE_UV", mode)
    assert main(["zz-env"]) == 1
    shown = capfd.readouterr()
    assert "installed zz-env" not in shown.out

    assert re.search(message, shown.err)


def test_without_uv_it_is_pip_of_this_interpreter(
    uv: Recorded, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package = write_package("environments/zz_env")
    expected = f"-m pip install --disable-pip-version-check {package} verifiers=={VERSION}"
    # outside of a virtual environment uv would refuse
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert main(["zz-env", "--dry-run"]) == 0
    monkeypatch.setattr(sys, "base_prefix", "/elsewhere")
    (Path("bin") / "uv").unlink()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["zz-env", "--dry-run"]) == 0
    for line in capfd.readouterr().out.splitlines():
        assert line == f"$ {sys.executable} {expected}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing-like-it"], "there is no package 'nothing-like-it' in './environments' (it has zz_env"),
        (["zz-emv"], "(it has zz_env"),
        (["zz-env", "-p", "nowhere"], "there is no directory 'nowhere' to look for 'zz-env' in"),
        (["beside"], "there is a directory 'beside' here: write './beside' for it"),
        (["./nowhere"], "there is no directory 'nowhere'"),
        (["./bare"], "'bare' is no package: it has no pyproject.toml"),
        (["./broken"], "broken/pyproject.toml' cannot be read"),
        (["./odd"], "odd has the requirement 'two words', which is none"),
        (["./itself"], "'./itself' is verifiers itself, which vf-install never replaces"),
        (["https://example.invalid/a.git"], "is no git URL that can be installed; write it as 'git+https://...'"),
        (["zz.whl", "-e"], "-e works with a directory only"),
        (["bad.whl"], "'bad.whl' is no wheel that can be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(
    uv: Recorded, arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_package("environments/zz_env")
    write_package("beside")
    write_package("odd", name="odd", requires='["two words"]')
    write_package("itself", name="verifiers")
    Path("bare").mkdir()
    Path("broken").mkdir()
    Path("broken/pyproject.toml").write_text("[project")
    write_wheel(Path("zz.whl"))
    Path("bad.whl").write_text("no zip")
    assert main(arguments) == 2
    assert uv() == []
    shown = capfd.readouterr()
    assert shown.out == ""
    (sentence,) = shown.err.strip().splitlines()
    assert sentence.startswith("vf-install: ")
    assert message in sentence


def write_wheel(path: Path, requires: str = "verifiers<0.2") -> None:
    text = f"Metadata-Version: 2.1\nName: zz-wheel\nVersion: 1\nRequires-Dist: {requires}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("zz_wheel-1.dist-info/METADATA", text)


def test_the_pin_inside_a_wheel_counts_too(uv: Recorded, capfd: pytest.CaptureFixture[str]) -> None:
    write_wheel(Path("zz_wheel-1-py3-none-any.whl"))
    assert main(["zz_wheel-1-py3-none-any.whl"]) == 2
    assert "zz-wheel requires verifiers<0.2, which excludes" in capfd.readouterr().err


@pytest.mark.parametrize("built", [True, False])
def test_requirements_that_only_a_build_tells_are_read_from_the_wheel(tmp_path: Path, built: bool) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "pyproject.toml").write_text('[project]\nname = "zz-wheel"\ndynamic = ["dependencies"]\n')
    write_wheel(tmp_path / "ready.whl", requires="verifiers>=0.1.4")
    # stands for an installer that builds a wheel into a directory
    code = f"import shutil, sys; shutil.copy({str(tmp_path / 'ready.whl')!r}, sys.argv[1])" if built else "exit(3)"
    source = Source(str(package), package, is_directory=True)
    if not built:
        with pytest.raises(CommandFailedError, match="could not be built"):
            read_metadata(source, [sys.executable, "-c", code])
        return
    metadata = read_metadata(source, [sys.executable, "-c", code])
    assert metadata == PackageMetadata("zz-wheel", ("verifiers>=0.1.4",))


def git(*arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *arguments], cwd="repo", capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(uv: Recorded) -> str:
    """URL of a repository with a package in a directory; the commit before its last is the tag `old`."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    package = write_package("repo/environments/zz_env", requires='["verifiers==0.1.8"]')
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    git("tag", "old")
    (package / "pyproject.toml").write_text((package / "pyproject.toml").read_text().replace("==0.1.8", ">=0.1.4"))
    git("commit", "--quiet", "-a", "-m", "second")
    return f"git+{Path('repo').resolve().as_uri()}"


def test_of_a_git_url_the_commit_that_was_read_is_the_one_installed(
    repository: str, uv: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    # the program in uv's place does not clone, so that the check after the installation fails
    assert main([f"{repository}#subdirectory=environments/zz_env"]) == 1
    commit = git("rev-parse", "HEAD")
    assert uv() == [[f"{repository}@{commit}#subdirectory=environments/zz_env", f"verifiers=={VERSION}"]]
    assert "zz-env is not installed" in capfd.readouterr().err


def test_the_pin_of_the_revision_asked_for_is_the_one_that_counts(
    repository: str, uv: Recorded, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{repository}@old#subdirectory=environments/zz_env"]) == 2
    assert "zz-env requires verifiers==0.1.8" in capfd.readouterr().err
    assert uv() == []


def test_a_new_commit_of_an_installed_version_is_installed_anew(
    repository: str, uv: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["./repo/environments/zz_env"]) == 0
    assert main([f"{repository}#subdirectory=environments/zz_env"]) == 0
    commit = git("rev-parse", "HEAD")
    target = f"{repository}@{commit}#subdirectory=environments/zz_env"
    assert uv()[1:] == [[f"verifiers=={VERSION}"], ["--force-reinstall", "--no-deps", target]]


@pytest.mark.parametrize(
    ("suffix", "code", "message"),
    [
        ("", 2, "the repository itself is no package"),
        ("#subdirectory=environments/none", 2, "the repository has no directory 'environments/none'"),
        ("#subdirectory=../../..", 2, "the repository has no directory"),
        ("@nope#subdirectory=environments/zz_env", 2, "no branch, tag or commit 'nope'"),
        ("@--upload-pack=x", 2, "no usable revision after the @"),
        ("/missing", 1, "git could not fetch"),
    ],
)
def test_a_git_url_that_leads_nowhere_is_one_sentence(
    repository: str, uv: Recorded, suffix: str, code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([repository + suffix]) == code
    (sentence,) = capfd.readouterr().err.strip().splitlines()
    assert message in sentence
    assert uv() == []
