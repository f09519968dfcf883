"""vf-gateway as a process: the page's walk-through, and its end by signals with everything stored."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from verifiers.cli.gateway import main
from verifiers.cli.main import DONE
from verifiers.evals.store import read_run

PAGE = Path(__file__).parents[2] / "docs/guides/agents.md"
KEY = "0123456789abcdef-of-the-gateway"
GATEWAY = [sys.executable, "-m", "verifiers.cli.gateway", "-m", "fake"]


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VF_GATEWAY_KEY", KEY)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "-m is missing"),
        (["-m", "fake", "--rollout-timeout", "0"], "--rollout-timeout is 0"),
        (["-m", "fake", "-S", '{"temprature": 1}'], "did you mean 'temperature'?"),
        (["-m", "fake", "--port", "99999"], "port is 99999"),
        (["-m", "fake", "-c", "0"], "max_concurrent is 0"),
        (["-m", "fake", "--host", "192.0.2.1"], "give another host"),
    ],
)
def test_bad_flags_are_one_sentence(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    assert text in capsys.readouterr().err


def test_a_short_key_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VF_GATEWAY_KEY", "secret")
    assert main(["-m", "fake", "--port", "0"]) == 2
    assert "VF_GATEWAY_KEY has 6 characters" in capsys.readouterr().err


def stored() -> Any:
    (directory,) = Path("outputs/evals").glob("*/*")
    return read_run(directory)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="the page uses curl and jq")
def test_the_walk_through_of_the_page_runs() -> None:
    (code,) = re.findall(r"^```sh\n(export VF_GATEWAY_KEY.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    port = free_port()
    code = code.replace("8100", str(port)).replace("vf-gateway", f"vf-gateway --port {port}")
    # installed it is a command of its own; `exec`, so that $! is its process
    code = f'vf-gateway() {{ exec "{sys.executable}" -m verifiers.cli.gateway "$@"; }}\n{code}'
    done = subprocess.run(["bash", "-euc", code], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert '"outcome":"completed"' in done.stdout
    assert "1 sessions, 1 with a reward" in done.stdout
    run = stored()
    assert (run.metadata["env"], run.metadata["status"]) == ("sums", "finished")
    assert run.rows[0]["metrics"].keys() == {"length", "posted_reward"}
    assert (run.directory / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_signal_ends_it_in_order_and_open_sessions_are_stored() -> None:
    process = subprocess.Popen(
        [*GATEWAY, "--port", "0", "--drain-timeout", "0.5"], stdout=-1, stderr=-1, text=True, env=dict(os.environ)
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    url = line.split()[3]
    request = urllib.request.Request(
        f"{url}/sessions", b'{"prompt": "?"}', {"Authorization": f"Bearer {KEY}"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        session = json.load(response)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == DONE, err
    assert "1 sessions, 0 with a reward" in out
    assert KEY not in line + out + err
    (row,) = stored().rows
    assert (row["outcome"], row["info"]["session_id"]) == ("cancelled", session["id"])
