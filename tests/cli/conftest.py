"""An environment module that commands can find by name, and a directory to work in."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from verifiers.testing import FakeOpenAIServer

SOURCE = """
import verifiers as vf


def good(completion):
    return float(completion[-1]["content"] == "4")


def load_environment(column="question", n=6):
    rows = [{column: f"question {i}", "answer": "4"} for i in range(n)]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric([good]))
"""


@pytest.fixture(autouse=True)
def _own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries of endpoints of the user who runs the tests have no part in them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def env_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of an importable environment; the current directory is an empty temporary one."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "toy_sums_env.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [str(modules), *sys.path])
    monkeypatch.chdir(tmp_path)
    yield "toy-sums-env"
    sys.modules.pop("toy_sums_env", None)


@pytest.fixture
def server() -> Iterator[FakeOpenAIServer]:
    """Return an endpoint that always has the right answer."""
    with FakeOpenAIServer("4") as server:
        yield server


class Results:
    """The one run below ./outputs/evals, as it is on disk when asked."""

    @property
    def directory(self) -> Path:
        (directory,) = Path("outputs/evals").glob("*/*")
        return directory

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of results.jsonl."""
        return [json.loads(line) for line in (self.directory / "results.jsonl").read_text().splitlines()]

    @property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "metadata.json").read_text())
        return found


@pytest.fixture
def results() -> Results:
    return Results()


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which every write to a file fails."""

    @contextmanager
    def full() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            # pytest's own output may be a file
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return full
