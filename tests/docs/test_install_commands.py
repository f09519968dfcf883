"""Every printed install command works in a clean virtual environment, and none fetches another project's verifiers.

What brings torch is resolved by a dry run, the rest is really installed, both by uv; test_tutorial.py installs the
trainer for real, by pip, as the first wheel here.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from clean_environment import COMMAND, ROOT, CleanEnvironment

import verifiers as vf
from verifiers.installation import EXTRAS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BRINGS_TORCH = re.compile(r"train|embedded|deepspeed")
# tests/vllm installs it by install.sh; the wheels of the second are those that a reader has carried along
SKIPPED = re.compile(r"verifiers-vllm|--no-index")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, dist: Path) -> Iterator[CleanEnvironment]:
    made = CleanEnvironment.make(tmp_path_factory.mktemp("install"), dist)
    # the wheels were built in isolation; here the tools that build are fetched once, not for each of the commands
    made.run("pip install --quiet uv hatchling editables setuptools wheel")
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("UV_NO_BUILD_ISOLATION", "1")
        yield made


def install(clean: CleanEnvironment, command: str) -> None:
    """Run an install command, or resolve it where it would bring torch."""
    if BRINGS_TORCH.search(command):
        command = command.replace("pip install", "pip install --dry-run --quiet", 1)
    clean.install(command, quick=True)


def installed_version(clean: CleanEnvironment) -> str:
    # -I: the files of the checkout are not on the path
    return clean.run("python -I -c 'import importlib.metadata as m; print(m.version(\"verifiers\"))'").strip()


def printed_commands() -> list[str]:
    """Return each install command of the READMEs and the documentation, once."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    pages = [name for name in listed.split() if not name.startswith("tests/")]
    found = [command for name in pages for command in COMMAND.findall((ROOT / name).read_text())]
    return [command for command in dict.fromkeys(found) if not SKIPPED.search(command)]


def test_make_dist_builds_a_wheel_of_each_package(clean: CleanEnvironment) -> None:
    names = sorted(path.name.partition("-")[0] for path in clean.dist.iterdir())
    assert names == ["verifiers", "verifiers_dataserver", "verifiers_embedded", "verifiers_vllm"]


def test_every_printed_command_installs_what_is_built_here(clean: CleanEnvironment) -> None:
    commands = printed_commands()
    assert len(commands) >= 10
    for command in commands:
        install(clean, command)
        if "verifiers" in command and not BRINGS_TORCH.search(command):
            assert installed_version(clean) == vf.__version__, command
            clean.run("uv pip uninstall --quiet verifiers verifiers-dataserver")


def test_an_installed_wheel_evaluates_and_its_errors_name_commands_that_work(
    clean: CleanEnvironment, tmp_path: Path
) -> None:
    clean.run("pip install --quiet dist/verifiers-*.whl", cwd=clean.dist.parent)
    clean.run("vf-init first-try && vf-eval first-try -m fake && vf-install first-try", cwd=tmp_path)
    # what is installed is what runs: not the files it came from
    clean.run("rm -r environments && vf-list | grep first-try && vf-eval first-try -m fake --fresh", cwd=tmp_path)
    hint = "from verifiers.installation import install_hint as hint; print(hint({!r}))"
    for part in [*sorted({*EXTRAS.values()}), "sandbox", "embedded", "dataserver"]:
        shown = clean.run(f'python -I -c "{hint.format(part)}"')
        command = re.search("`(.*)`", shown)
        assert command is not None, shown
        install(clean, command[1])
        assert installed_version(clean) == vf.__version__, command[1]
    clean.run("vf-dataserver --help")
