"""A server's command in this process, for all that does not need a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Main = Callable[[list[str]], int]


class Ended(NamedTuple):
    """Exit code and output of a command, and what was answered while it listened."""

    code: int
    out: str
    err: str
    answer: Any


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that runs a Python module in a process, which ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(module: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Ended]:
    """Return a function that runs a command here until it listens, calls `ask` with its URL, and sends a signal."""
    port_file = tmp_path / "port-of-command"
    # set by the commands for their process; put back after the test
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")

    def run(
        main: Main,
        *arguments: str,
        ask: Callable[[str], Any] | None = None,
        number: signal.Signals = signal.SIGTERM,
    ) -> Ended:
        answers: list[Any] = []
        finished = threading.Event()

        def client() -> None:
            while not port_file.exists():
                if finished.is_set():
                    return
                time.sleep(0.005)
            try:
                if ask is not None:
                    answers.append(ask(f"http://127.0.0.1:{port_file.read_text().strip()}"))
            finally:
                os.kill(os.getpid(), number)

        thread = threading.Thread(target=client)
        thread.start()
        try:
            code = main([*arguments, "--port", "0", "--port-file", str(port_file)])
        finally:
            finished.set()
            thread.join()
            port_file.unlink(missing_ok=True)
        output = capsys.readouterr()
        return Ended(code, output.out, output.err, answers[0] if answers else None)

    return run
