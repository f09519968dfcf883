"""The server's process group: all of it ends, no matter which process ends first. A script stands in for vLLM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from verifiers_vllm.supervision import process_lives

SOURCE = Path(__file__).parents[3] / "servers/vllm"

FAKE = """
import http.server, os, signal, subprocess, sys, threading, time

def main():
    # an engine process that does not listen to SIGTERM
    engine = subprocess.Popen([sys.executable, "-c", "import signal, time\\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(600)"])
    open(os.environ["PIDS"], "w").write(f"{os.getpid()} {engine.pid}")
    port = int(sys.argv[sys.argv.index("--port") + 1])
    if "--broken" in sys.argv:
        for said in (sys.stdout, sys.stderr):
            print("WARNING This can cause errors like `OSError: [Errno 24] Too many open files`.", file=said)
        print("(EngineCore pid=7) ERROR 11-27 [core.py:9] RuntimeError: operator torchvision::nms does not exist")
        print("RuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr)
        sys.exit(3)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def start(
    spawn: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start vf-vllm with the stand-in and wait until it is ready; kill what is left."""
    package = tmp_path / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    for directory in (package, package.parent, package.parent.parent):
        (directory / "__init__.py").touch()
    (package / "main.py").write_text(FAKE)
    information = tmp_path / "vllm-0.32.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{SOURCE}", "PIDS": str(tmp_path / "pids")}

    def begin(*arguments: str, ready: bool = True) -> subprocess.Popen[str]:
        arguments = ("--model", "owner/name", "--port-file", str(tmp_path / "port"), *arguments)
        process = spawn("verifiers_vllm", *arguments, **environment)
        if ready:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert f"listening on http://127.0.0.1:{(tmp_path / 'port').read_text().strip()}" in line
        return process

    yield begin
    if (tmp_path / "pids").exists():
        for pid in (tmp_path / "pids").read_text().split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue


def group(tmp_path: Path) -> list[int]:
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def assert_ended(pids: list[int], within_s: float) -> None:
    until = time.monotonic() + within_s
    while any(map(process_lives, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in pids if process_lives(pid)]


@pytest.mark.slow
def test_sigterm_ends_the_server_and_an_engine_that_does_not_listen(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start()
    server, engine = group(tmp_path)
    assert os.getpgid(server) == os.getpgid(engine) != os.getpgid(process.pid)
    process.terminate()
    assert process.wait(timeout=15) == 0
    assert_ended([server, engine], 1.0)


@pytest.mark.parametrize("victim", ["vf-vllm", "server"])
def test_kill_dash_nine_of_either_leaves_no_orphan(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, victim: str
) -> None:
    process = start()
    server, engine = group(tmp_path)
    os.kill(process.pid if victim == "vf-vllm" else server, signal.SIGKILL)
    assert_ended([server, engine], 60.0)
    assert process.wait(timeout=60) in (-signal.SIGKILL, 1)


@pytest.mark.slow
def test_the_end_of_the_parent_ends_it(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process = start("--parent-pid", str(parent.pid))
    parent.kill()
    parent.wait()
    assert process.wait(timeout=15) == 1
    assert_ended(group(tmp_path), 1.0)


def test_a_server_that_cannot_start_ends_the_command_with_a_sentence(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("--broken", ready=False)
    said, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "vf-vllm: vLLM could not be started (exit code 3): RuntimeError: " in errors
    assert "(EngineCore pid=7) ERROR" in said
    assert "root cause above" in errors
    assert not (tmp_path / "port").exists()
    assert_ended(group(tmp_path), 20.0)
