"""Promises of the container level, kept by a real podman. Those of every level are in test_sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from verifiers.errors import SandboxError
from verifiers.sandbox import open_sandbox
from verifiers.sandbox.container import ContainerSandbox
from verifiers.sandbox.spec import Sandbox, SandboxSpec

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("podman")]


def containers() -> list[str]:
    """Return the names of the sandboxes' containers, of whatever process."""
    command = ["podman", "ps", "--all", "--filter=label=verifiers.sandbox", "--format={{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def wait_until_removed(names: set[str]) -> None:
    end = time.monotonic() + 60
    while left := names.intersection(containers()):
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.1)


def top(sandbox: Sandbox) -> str:
    assert isinstance(sandbox, ContainerSandbox)
    return subprocess.run(["podman", "top", sandbox.name], capture_output=True, text=True, check=True).stdout


async def test_memory_and_files_are_held() -> None:
    spec = SandboxSpec("podman", memory_bytes=64 << 20, file_bytes=1 << 20, disk_bytes=8 << 20)
    async with await open_sandbox(spec) as sandbox:
        assert (await sandbox.run(["python3", "-c", "held = b'x' * (200 << 20)"])).exit_code == 128 + signal.SIGKILL
        await sandbox.run("head -c 20000000 /dev/zero > big")
        assert len(await sandbox.read("big")) == 1 << 20
        filled = await sandbox.run("for n in $(seq 20); do head -c 1000000 /dev/zero > $n; done")
        assert "No space left" in filled.stderr
        assert "Read-only" in (await sandbox.run("echo x > /usr/x")).stderr


async def test_a_fork_bomb_is_held_and_ends(marker: str, wait_until_gone: Callable[[str], None]) -> None:
    async with await open_sandbox(SandboxSpec("podman", processes=20)) as sandbox:
        bomb = "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.1)"
        running = asyncio.create_task(sandbox.run(["python3", "-c", bomb, marker], timeout_s=3))
        await asyncio.sleep(2)
        assert 10 < (await asyncio.to_thread(top, sandbox)).count(marker) <= 24
        # the command's time is over, or, where no process more can kill it, the sandbox's
        with contextlib.suppress(SandboxError):
            assert (await running).timed_out
        wait_until_gone(marker)


async def test_nothing_but_loopback_is_there_and_no_rights_are() -> None:
    async with await open_sandbox(SandboxSpec("podman")) as sandbox:
        assert (await sandbox.run("ls /sys/class/net")).stdout.split() == ["lo"]
        status = (await sandbox.run("cat /proc/self/status")).stdout
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert (await sandbox.run("kill -9 1; echo $?")).stdout == "1\n"


async def test_a_relay_cannot_be_stopped_by_the_commands() -> None:
    async with await open_sandbox(SandboxSpec("podman")) as sandbox:
        port = await sandbox.relay("/nowhere")
        await sandbox.run("kill -9 -1")
        assert (await sandbox.run("sleep 60", timeout_s=0.5)).timed_out
        code = f"import socket; socket.create_connection(('127.0.0.1', {port})).close(); print('listens')"
        assert (await sandbox.run(["python3", "-c", code])).stdout == "listens\n"


PROGRAM = """
import asyncio, sys
from verifiers.sandbox import open_sandbox
from verifiers.sandbox.spec import SandboxSpec

async def main():
    async with await open_sandbox(SandboxSpec("podman")) as sandbox:
        await sandbox.start(["sleep", sys.argv[1]])
        print(sandbox.name, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_a_killed_run_leaves_no_container(marker: str, wait_until_gone: Callable[[str], None]) -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, marker], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    name = program.stdout.readline().strip()
    assert name in containers()
    program.kill()
    program.wait()
    program.stdout.close()
    wait_until_gone(marker)
    wait_until_removed({name})


async def test_an_image_that_is_not_there_is_named() -> None:
    with pytest.raises(SandboxError, match="localhost/no-such-image"):
        await open_sandbox(SandboxSpec("podman", image="localhost/no-such-image"))
