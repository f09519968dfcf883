"""The way from an empty directory to a score, with the real installers, as docs/guides/packages.md shows it.

The installers fetch the build backend from the package registry; where that cannot be reached the tests skip.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PAGE = (Path(__file__).parents[2] / "docs/guides/packages.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """Make a virtual environment that sees what is installed here and takes what is installed into it."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    # a path file that lets the other site directory's own path files count, too
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(site) / "zz_outer.pth").write_text(line)
    return python


def require_registry(python: str) -> None:
    """Skip where pip cannot get the build backend."""
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", "backend", "hatchling"]
    done = subprocess.run(command, capture_output=True, text=True)
    shutil.rmtree("backend", ignore_errors=True)
    if done.returncode != 0:
        pytest.skip(f"the package registry cannot be reached: {done.stderr.strip().splitlines()[-1]}")


def run(python: str, command: str) -> str:
    """Run a documented command with the commands' modules of this interpreter; its output."""
    modules = {"vf-init": "init", "vf-install": "install", "vf-eval": "evaluate", "vf-list": "list"}
    name, *arguments = shlex.split(command)
    # the installer that every machine has: no uv, which looks into its own environment only
    environment = {**os.environ, "PATH": "/usr/bin:/bin"}
    call = [python, "-m", f"verifiers.cli.{modules[name]}", *arguments]
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_init_install_eval_works_from_an_empty_directory_as_the_page_says(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    require_registry(python)
    start, serve, evaluate, *_ = blocks("sh")
    script, *_ = blocks("python")
    Path("solve.py").write_text(script)

    init, install = start.splitlines()
    assert "environments/foo/" in run(python, init)
    shown = run(python, install)
    assert "installed foo 0.1.0: environment foo (entry point foo:load_environment" in shown
    assert "\nfoo " in run(python, "vf-list")
    # what is installed is what runs: not the files it came from
    shutil.rmtree("environments")

    assert serve.startswith("python -m verifiers.testing --port 8000 ")
    command = [python, "-u", *shlex.split(serve.replace("8000", "0"))[1:]]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = re.search(r"http://\S+/v1", server.stdout.readline())
        assert url is not None
        shown = run(python, evaluate.strip().replace("http://127.0.0.1:8000/v1", url[0]))
    finally:
        server.kill()
        server.communicate()
    assert "reward: mean 1.000" in shown
    assert "15 rollouts of 5 prompts" in shown
