"""No sandbox and no worker outlives the program that opened it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SANDBOX = """
import asyncio, sys
from verifiers.sandbox import open_sandbox
from verifiers.sandbox.spec import SandboxSpec

async def main():
    isolation, marker = sys.argv[1:]
    async with await open_sandbox(SandboxSpec(isolation=isolation)) as sandbox:
        await sandbox.run(f"setsid sleep {marker} > /dev/null 2>&1 &")
        await sandbox.start(["sleep", marker])
        print(sandbox.process.pid, flush=True)
        await sandbox.run(["sh", "-c", f"trap '' INT TERM HUP; sleep {marker}"], timeout_s=1000)

asyncio.run(main())
"""

WORKER = """
import sys
from verifiers.sandbox.worker_pool import WorkerPool

isolation, marker = sys.argv[1:]
pool = WorkerPool(workers=1, isolation=isolation, timeout_s=1000)
pool.call_blocking("os:getpid")
print(next(iter(pool._workers.all)).sandbox.process.pid, flush=True)
pool.call_blocking("subprocess:call", ["sleep", marker])
"""


@pytest.fixture
def program(
    isolation: str, marker: str, tmp_path: Path, count_of: Callable[[str], int]
) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], int]]]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> tuple[subprocess.Popen[str], int]:
        # an own session: an interrupt goes to the whole group, as from a terminal
        process = subprocess.Popen(
            [sys.executable, "-c", code, isolation, marker],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        started.append(process)
        assert process.stdout is not None
        first = int(process.stdout.readline())
        wanted = 1 if code == WORKER else 4
        end = time.monotonic() + 10
        # the shells of the first two, the commands, and the one that a shell waits for
        while count_of(marker) < wanted - 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        return process, first

    tmp_path.chmod(0o711)
    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_for_end(pid: int) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        # the process that inherited it collects it in its own time
        if state == "Z":
            return
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "end"),
    [
        pytest.param(SANDBOX, signal.SIGKILL, id="sandbox-killed"),
        pytest.param(SANDBOX, signal.SIGINT, id="sandbox-interrupted"),
        pytest.param(WORKER, signal.SIGKILL, id="worker-killed"),
        pytest.param(WORKER, signal.SIGTERM, id="worker-terminated"),
    ],
)
def test_nothing_outlives_the_program(
    program: Callable[[str], tuple[subprocess.Popen[str], int]],
    code: str,
    end: signal.Signals,
    marker: str,
    tmp_path: Path,
    wait_until_gone: Callable[[str], None],
) -> None:
    process, first = program(code)
    if end == signal.SIGINT:
        os.killpg(process.pid, end)
    else:
        process.send_signal(end)
    assert process.wait(10) != 0
    # the program's own arguments have the marker too
    wait_until_gone(marker)
    wait_for_end(first)
    assert os.listdir(tmp_path) == []


FORKED = SANDBOX.replace(
    "        print(",
    """        import os, time
        if os.fork() == 0:
            # a copy of the sandbox's socket stays open here, as in any process that was forked
            os.close(1)
            time.sleep(60)
            os._exit(0)
        print(""",
)


@pytest.mark.slow
def test_a_forked_child_that_holds_the_socket_keeps_nothing_alive(
    program: Callable[[str], tuple[subprocess.Popen[str], int]], tmp_path: Path
) -> None:
    assert FORKED != SANDBOX
    process, first = program(FORKED)
    process.kill()
    process.wait(10)
    started = time.monotonic()
    wait_for_end(first)
    assert time.monotonic() - started < 30
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_killing_the_watching_process_ends_a_bubblewrap_sandbox(
    contained: str, marker: str, wait_until_gone: Callable[[str], None], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SANDBOX, contained, marker], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        first = int(process.stdout.readline())
        # both at once, so that neither can clean up after the other
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(first, signal.SIGKILL)
        process.kill()
        process.wait(10)
        wait_until_gone(marker)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
