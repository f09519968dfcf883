"""A server process with a model that was taught three answers, and other people's clients in a venv of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from client_world import CLIENTS, KEY, LITELLM, PROXY_KEY, running, taught_model


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the base URL, without /v1, of a `vf-serve` that asks for KEY and calls its model "taught"."""
    directory = taught_model(tmp_path_factory.mktemp("clients") / "model")
    command = [sys.executable, "-m", "verifiers_embedded", "--model", str(directory), "--port", "0", "--seed", "0"]
    command += ["--threads", "1", "--served-model-name", "taught", "--api-key-var", "VF_TEST_KEY"]
    process = subprocess.Popen(
        [*command, "--parent-pid", str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VF_TEST_KEY": KEY},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "listening on " in line, line
    yield line.rpartition("listening on ")[2].strip()
    process.terminate()
    process.communicate(timeout=10)


Run = Callable[..., str]


@pytest.fixture
def run(server: str, tmp_path: Path) -> Run:
    """Run a program of the clients' venv, in an empty folder; its output. Skips where there is no such venv."""
    if not (CLIENTS / "python").exists():
        pytest.skip("the clients are not installed; run: make test-clients")

    def begin(*command: str, timeout_s: float = 100.0, **environment: str) -> str:
        known = {
            "HOME": str(tmp_path),
            "PATH": os.environ["PATH"],
            "VF_BASE": server,
            "OPENAI_BASE_URL": f"{server}/v1",
            "OPENAI_API_KEY": KEY,
            **LITELLM,
            **environment,
        }
        done = subprocess.run(
            [str(CLIENTS / command[0]), *command[1:]],
            cwd=tmp_path,
            env=known,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    return begin


PROXY = """
model_list:
  - model_name: taught
    litellm_params: {model: openai/taught, api_base: SERVER/v1, api_key: os.environ/VF_TEST_KEY}
general_settings: {master_key: os.environ/VF_PROXY_KEY}
litellm_settings: {telemetry: false, num_retries: 0}
router_settings: {num_retries: 0}
"""


@pytest.fixture(scope="session")
def proxy(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the base URL, without /v1, of litellm's proxy in front of the server; it has a key of its own."""
    if not (CLIENTS / "litellm").exists():
        pytest.skip("the clients are not installed; run: make test-clients")
    directory = tmp_path_factory.mktemp("proxy")
    (directory / "config.yaml").write_text(PROXY.replace("SERVER", server))
    command = [str(CLIENTS / "litellm"), "--config", "config.yaml", "--num_workers", "1"]
    keys = {"VF_TEST_KEY": KEY, "VF_PROXY_KEY": PROXY_KEY}
    with running(command, "/health/liveliness", directory, **keys, **LITELLM) as url:
        yield url


@pytest.fixture
def scripts() -> Path:
    return Path(__file__).parent / "scripts"


@pytest.fixture
def curl() -> str:
    found = shutil.which("curl")
    if found is None:
        pytest.skip("there is no curl on this machine")
    return found
