"""A run in a real terminal: the table is drawn and left as it was, also by Ctrl-C, and nothing writes across it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import tiny_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_in_terminal(
    command: list[str], *, interrupt_at: str | None = None, deadline_s: float = 90.0
) -> tuple[str, int]:
    """Return a program's output on a terminal of 100 columns, and its end; Ctrl-C once it has written a text."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True
    )
    os.close(follower)
    written, until = b"", time.monotonic() + deadline_s
    try:
        while time.monotonic() < until:
            ready, _, _ = select.select([leader], [], [], 0.2)
            if ready:
                try:
                    part = os.read(leader, 65536)
                except OSError:
                    break
                if not part:
                    break
                written += part
            if interrupt_at is not None and interrupt_at.encode() in written:
                process.send_signal(signal.SIGINT)
                interrupt_at = None
        return written.decode(errors="replace"), process.wait(timeout=10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(leader)


def command(model_dir: Path, url: str, output_dir: Path, **settings: object) -> list[str]:
    given = {"model": str(model_dir), "url": url, "output_dir": str(output_dir), "env": "single"}
    script = Path(__file__).parent / "run_training.py"
    return [sys.executable, str(script), json.dumps({**given, "settings": settings})]


def test_a_finished_run_leaves_its_last_table_and_the_bottleneck(
    model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path
) -> None:
    written, code = run_in_terminal(command(model_dir, server.url, tmp_path / "run", max_steps=30))
    assert code == 0, written[-2000:]
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r", "\n")
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    assert any("step 30/30  elapsed" in line for line in lines)
    assert lines[-1] == f"report: {tmp_path / 'run' / 'report.html'}"
    # once, under the last table
    last = max(number for number, line in enumerate(lines) if line.startswith("step 30/30"))
    assert sum(line.startswith("try: ") for line in lines[last:]) == 1
    assert not any("; try " in line for line in lines)
    # drawn again in place, and the cursor is given back
    assert "\x1b[1A\x1b[2K" in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_ctrl_c_ends_the_table_and_leaves_a_report(
    model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path
) -> None:
    started = command(model_dir, server.url, tmp_path / "run", max_steps=100_000)
    written, code = run_in_terminal(started, interrupt_at="overlap ratio")
    assert code != 0
    assert "KeyboardInterrupt" in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert '"stoppedBy":"Ctrl-C"' in (tmp_path / "run" / "report.html").read_text()
