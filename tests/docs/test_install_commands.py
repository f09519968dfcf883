"""Every printed install command works in a clean virtual environment, and none fetches another project's verifiers.

What brings torch is resolved by `pip install --dry-run`, the rest is really installed. pip fetches packages from the
registry; where that cannot be reached the tests skip. `pip install git+...` sees committed files only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import verifiers as vf
from verifiers.installation import EXTRAS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
ADDRESS = "https://repository.invalid/verifiers.git"
COMMAND = re.compile(r"(?:^ *|`)(pip install [^`\n]+?)(?= *(?:`|$)|  +#)", re.MULTILINE)
BRINGS_TORCH = re.compile(r"train|embedded|deepspeed")
# tests/vllm installs it by install.sh
SKIPPED = re.compile(r"verifiers-vllm")


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment with nothing but pip, in which commands run with the tested versions."""

    folder: Path
    dist: Path

    def run(self, command: str, cwd: Path = ROOT) -> str:
        variables = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # the documented form of address, which git takes from this checkout
            "URL": ADDRESS,
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
            "GIT_CONFIG_VALUE_0": ADDRESS,
        }
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=cwd,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        return done.stdout

    def install(self, command: str) -> None:
        """Run an install command as printed, or as a dry run where it would bring torch."""
        if BRINGS_TORCH.search(command):
            command = command.replace("pip install", "pip install --dry-run --quiet", 1)
        self.run(command, cwd=self.dist.parent if "dist/" in command else ROOT)

    def uninstall(self) -> None:
        self.run("pip uninstall --yes --quiet verifiers verifiers-dataserver")

    def version(self) -> str:
        # -I: the files of the checkout are not on the path
        return self.run("python -I -c 'import importlib.metadata as m; print(m.version(\"verifiers\"))'").strip()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CleanEnvironment]:
    folder = tmp_path_factory.mktemp("install")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    environment = CleanEnvironment(folder / "venv", folder / "dist")
    probe = subprocess.run(
        [folder / "venv/bin/pip", "download", "--quiet", "--no-deps", "--dest", folder / "probe", "hatchling"],
        capture_output=True,
        text=True,
    )
    if probe.returncode != 0:
        pytest.skip(f"the package registry cannot be reached: {probe.stderr.strip().splitlines()[-1]}")
    environment.run(f"make dist DIST={environment.dist} PYTHON={environment.folder}/bin/python")
    return environment


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
        clean.install(command)
        if "verifiers" in command and not BRINGS_TORCH.search(command):
            assert clean.version() == vf.__version__, command
            clean.uninstall()


def test_an_installed_wheel_evaluates_and_its_errors_name_commands_that_work(
    clean: CleanEnvironment, tmp_path: Path
) -> None:
    clean.run("pip install --quiet dist/verifiers-*.whl", cwd=clean.dist.parent)
    clean.run("vf-init first-try && vf-eval first-try -m fake && vf-install first-try", cwd=tmp_path)
    hint = "from verifiers.installation import install_hint as hint; print(hint({!r}))"
    for part in [*sorted({*EXTRAS.values()}), "sandbox", "embedded", "dataserver"]:
        shown = clean.run(f'python -I -c "{hint.format(part)}"')
        command = re.search("`(.*)`", shown)
        assert command is not None, shown
        clean.install(command[1])
        assert clean.version() == vf.__version__, command[1]
    clean.run("vf-dataserver --help")
