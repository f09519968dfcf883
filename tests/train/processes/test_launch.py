"""Starting a server from another environment: which interpreter, and what is said where that cannot be."""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verifiers.errors import ConfigError, WeightSyncError
from verifiers.train.config import GRPOConfig
from verifiers.train.processes.launch import launched_server, share_cores

SERVER = """
import argparse, http.server, os, pathlib, signal, subprocess, threading, time

def main():
    command = argparse.ArgumentParser()
    for name in ("--model", "--port", "--port-file", "--parent-pid", "--extra"):
        command.add_argument(name)
    given = command.parse_args()
    if given.extra == "fail":
        raise SystemExit("the model is too large")
    if given.extra == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "60"])
        pathlib.Path(given.model, "child").write_text(str(child.pid))
    pathlib.Path(given.model, "started").write_text(str(os.getpid()))
    server = http.server.HTTPServer(("127.0.0.1", int(given.port)), http.server.SimpleHTTPRequestHandler)
    partial = pathlib.Path(given.port_file + ".partial")
    partial.write_text(str(server.server_port))
    partial.rename(given.port_file)
    server.serve_forever()
"""


@pytest.fixture
def other_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name an interpreter with a server named "odd" that this one does not have."""
    packages = tmp_path / "packages"
    (packages / "odd-1.dist-info").mkdir(parents=True)
    (packages / "odd-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    (packages / "odd-1.dist-info/entry_points.txt").write_text("[verifiers.servers]\nodd = odd_server:main\n")
    (packages / "odd_server.py").write_text(SERVER)
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    monkeypatch.setenv("VERIFIERS_ODD_PYTHON", str(interpreter))


@pytest.mark.usefixtures("other_environment")
def test_a_server_of_another_environment_is_started_and_ended(tmp_path: Path) -> None:
    with launched_server("odd", str(tmp_path)) as url:
        with urllib.request.urlopen(url.removesuffix("/v1"), timeout=60) as response:
            assert response.status == 200
        pid = int((tmp_path / "started").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.usefixtures("other_environment")
def test_a_server_that_dies_in_a_run_is_named_with_its_exit_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with launched_server("odd", str(tmp_path)):
        pid = int((tmp_path / "started").read_text())
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert "the odd server has ended by itself, with code -9" in caplog.text


@pytest.mark.usefixtures("other_environment")
def test_a_server_that_ends_at_its_start_is_named_with_the_end_of_its_output(tmp_path: Path) -> None:
    with (
        pytest.raises(WeightSyncError, match=r"the odd server ended with code 1: .*too large"),
        launched_server("odd", str(tmp_path), args=["--extra", "fail"]),
    ):
        pass


@pytest.mark.parametrize(
    ("python", "error", "message"),
    [
        (None, ConfigError, r"named 'odd' is installed .*VERIFIERS_ODD_PYTHON"),
        ("/no/such/python", ConfigError, r"'/no/such/python', does not exist \(VERIFIERS_ODD_PYTHON\)"),
        (sys.executable, WeightSyncError, "no rollout server named odd is installed for"),
    ],
    ids=["unknown", "no interpreter", "not installed there"],
)
def test_a_server_that_is_not_there_is_refused_with_how_to_name_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str | None, error: type[Exception], message: str
) -> None:
    if python is not None:
        monkeypatch.setenv("VERIFIERS_ODD_PYTHON", python)
    with pytest.raises(error, match=message), launched_server("odd", str(tmp_path)):
        pass


@pytest.mark.usefixtures("other_environment")
def test_a_server_that_hangs_is_killed_soon_after_a_failure_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifiers.train.processes.launch._END_AFTER_FAILURE_S", 0.3)
    pids: list[int] = []

    def fail() -> None:
        with launched_server("odd", str(tmp_path), args=["--extra", "hang"]):
            pids.extend(int((tmp_path / name).read_text()) for name in ("started", "child"))
            raise InterruptedError

    begun = time.monotonic()
    with pytest.raises(InterruptedError):
        fail()
    assert time.monotonic() - begun < 30
    deadline = time.monotonic() + 30
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        # a child of a process that is gone is somebody else's to reap
        return bool(Path(f"/proc/{pid}/cmdline").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("settings", "chosen", "threads"),
    [
        ({"num_batches_ahead": 1}, None, 4),
        ({"num_batches_ahead": 0}, None, 2),
        ({"num_batches_ahead": 1, "server_url": "http://gpu-7:8000/v1"}, None, 2),
        ({"num_batches_ahead": 1}, "3", 2),
    ],
    ids=["both at one time", "in turns", "another machine", "OMP_NUM_THREADS"],
)
def test_the_trainer_takes_half_of_the_cores_where_its_server_works_on_them_at_one_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], chosen: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    torch.set_num_threads(2)
    args = GRPOConfig(str(tmp_path), use_cpu=True, **settings)
    said = share_cores(overlaps=args.shared_device == "cores" and args.num_batches_ahead > 0)
    assert torch.get_num_threads() == threads
    assert (said is not None) == (threads == 4)
