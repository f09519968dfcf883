"""A clean virtual environment, in which pip installs what the pages print.

pip fetches packages from the registry; where that cannot be reached the tests skip. `pip install git+...` sees
committed files only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
ADDRESS = "https://repository.invalid/verifiers.git"
COMMAND = re.compile(r"(?:^ *|`)(pip install [^`\n]+?)(?= *(?:`|$)|  +#)", re.MULTILINE)


@dataclass(frozen=True)
class CleanEnvironment:
    """A virtual environment with nothing but pip, in which commands run with the tested versions.

    Attributes:
        folder: of the virtual environment.
        dist: where the wheels of this checkout are; its parent is where "dist/..." is installed from.
    """

    folder: Path
    dist: Path

    @classmethod
    def make(cls, folder: Path, dist: Path) -> CleanEnvironment:
        """Make the environment, and the wheels where no other has, or skip the test where packages cannot be had."""
        environment = cls(folder / "venv", dist)
        subprocess.run([sys.executable, "-m", "venv", str(environment.folder)], check=True)
        probe = subprocess.run(
            [folder / "venv/bin/pip", "download", "--quiet", "--no-deps", "--dest", folder / "probe", "hatchling"],
            capture_output=True,
            text=True,
        )
        if probe.returncode != 0:
            pytest.skip(f"the package registry cannot be reached: {probe.stderr.strip().splitlines()[-1]}")
        with FileLock(f"{dist}.lock"):
            if not dist.exists():
                environment.run(f"make dist DIST={dist}.part PYTHON={environment.folder}/bin/python")
                Path(f"{dist}.part").rename(dist)
        return environment

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables under which the commands run."""
        return {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.folder),
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "UV_CONSTRAINT": str(ROOT / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            # the documented form of address, which git takes from this checkout
            "URL": ADDRESS,
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
            "GIT_CONFIG_VALUE_0": ADDRESS,
        }

    def run(self, command: str, cwd: Path = ROOT) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=cwd,
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        return done.stdout

    def install(self, command: str, quick: bool = False) -> None:
        """Run an install command as printed, or by uv, which installs the same in a fraction of the time."""
        if quick:
            command = command.replace("pip install", "uv pip install", 1)
        self.run(command, cwd=self.dist.parent if "dist/" in command else ROOT)
