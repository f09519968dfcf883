"""The command: one line that a parent can parse, and an end that leaves no process behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from verifiers_dataserver.cli import main

from verifiers.server_process import process_lives

# processes that start in seconds take many on a busy machine
pytestmark = pytest.mark.timeout(240)


def url_of(process: subprocess.Popen[str]) -> str:
    """Return the address in the line that a server prints once it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"listening on (http://\S+)$", line.strip())
    if not found:
        process.kill()
        raise AssertionError(line + process.communicate()[1])
    return found[1]


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=15) as response:
        return json.load(response)


def children_of(pid: int) -> set[int]:
    """Return all processes below a process."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[1]) == pid:
            child = int(stat.parent.name)
            found |= {child} | children_of(child)
    return found


def gone(pids: set[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(map(process_lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(process_lives, pids))


@pytest.fixture
def configuration(configure: Any, python: Any, tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "answer": "0.5"}\n')
    datasets = {
        "d": {"jsonl": "rows.jsonl", "graders": ["half"]},
        "hang": {"jsonl": "rows.jsonl", "graders": ["hang"]},
    }
    graders = {"half": python("half", timeout_s=10.0), "hang": python("hang", timeout_s=60.0)}
    return str(configure({"datasets": datasets, "graders": graders}))


@pytest.fixture
def plain(configure: Any, tmp_path: Path) -> str:
    """Write a configuration without processes to start."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "answer": "0.5"}\n')
    return str(configure({"datasets": {"d": {"jsonl": "rows.jsonl", "graders": ["exact"]}}}))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 0),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_it_serves_until_a_signal_and_leaves_no_process_behind(
    spawn: Any, configuration: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    port_file = tmp_path / "port"
    process = spawn("verifiers_dataserver", configuration, "--port-file", str(port_file))
    url = url_of(process)
    item = {"sample_id": "d:0", "completion": "x", "completion_index": 0}
    assert post(f"{url}/v2/grade", {"items": [item]})["results"][0]["reward"] == 0.5
    assert url.endswith(":" + port_file.read_text().strip())
    # a grade that never ends must not hold the end up
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as waiting:
        body = json.dumps({"items": [{**item, "sample_id": "hang:0"}]}).encode()
        head = f"POST /v2/grade HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        waiting.sendall(head + body)
        children = children_of(process.pid)
        assert children
        started = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert time.monotonic() - started < 20
    assert gone(children)


@pytest.mark.slow
def test_it_ends_when_its_parent_has_ended(spawn: Any, plain: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = spawn("verifiers_dataserver", plain, "--parent-pid", str(parent.pid))
    url_of(process)
    parent.communicate(b"\n")
    assert process.wait(timeout=30) == 0


def test_a_port_in_use_is_found_out_before_anything_is_loaded(plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main([plain, "--port", str(port)]) == 2
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err


def test_another_address_than_loopback_is_warned_of_without_a_token(
    run_command: Any, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run_command(main, plain, "--host", "0.0.0.0")
    assert (ended.code, "not only for this machine" in ended.err) == (0, True)
    monkeypatch.setenv("A_TOKEN_OF_TESTS", "x")
    ended = run_command(main, plain, "--host", "0.0.0.0", "--token-var", "A_TOKEN_OF_TESTS")
    assert (ended.code, ended.err) == (0, "")
