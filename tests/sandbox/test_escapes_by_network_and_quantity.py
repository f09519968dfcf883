"""Escapes over the network, and by using up what the machine has; see test_escapes.py."""

from __future__ import annotations

import os
import resource
import socket
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verifiers.sandbox import open_sandbox
from verifiers.sandbox.agent_sandbox import AgentSandbox
from verifiers.sandbox.spec import IsolationLevel, RunResult, Sandbox, SandboxSpec


async def python(sandbox: Sandbox, code: str, *, timeout_s: float = 60) -> RunResult:
    return await sandbox.run(["python3", "-c", textwrap.dedent(code)], timeout_s=timeout_s)


# --- network

NETWORK = """
import socket, sys
def attempt(name, family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as sock:
            sock.settimeout(1)
            sock.connect(address)
            sock.send(b"x")
        print(name, "reached")
    except OSError as error:
        print(name, "stopped")
port, abstract, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
attempt("loopback", socket.AF_INET, ("127.0.0.1", port))
attempt("loopback6", socket.AF_INET6, ("::1", port))
attempt("outside", socket.AF_INET, ("192.0.2.1", 80))
attempt("datagram", socket.AF_INET, ("192.0.2.1", 53), socket.SOCK_DGRAM)
attempt("outside6", socket.AF_INET6, ("2001:db8::1", 80))
attempt("abstract", socket.AF_UNIX, "\\0" + abstract)
attempt("path", socket.AF_UNIX, path)
try:
    socket.getaddrinfo("example.org", 80)
    print("names reached")
except OSError:
    print("names stopped")
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[list[str], list[socket.socket]]]:
    tmp_path.chmod(0o755)
    tcp = socket.create_server(("127.0.0.1", 0))
    abstract, unix = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    name, path = f"test-{uuid.uuid4().hex}", str(tmp_path / "socket")
    abstract.bind("\0" + name)
    unix.bind(path)
    os.chmod(path, 0o777)
    listening = [tcp, abstract, unix]
    try:
        for server in listening:
            server.listen()
            server.setblocking(False)
        yield [str(tcp.getsockname()[1]), name, path], listening
    finally:
        for server in listening:
            server.close()


async def test_no_network_can_be_reached(
    sealed: AgentSandbox, servers: tuple[list[str], list[socket.socket]]
) -> None:
    result = await sealed.run(["python3", "-c", NETWORK, *servers[0]], timeout_s=15)
    tried = dict(line.split() for line in result.stdout.splitlines())
    assert set(tried.values()) == {"stopped"}, tried
    assert len(tried) == 8
    for server in servers[1]:
        with pytest.raises(BlockingIOError):
            server.accept()


async def test_the_servers_of_the_network_test_can_be_reached(
    servers: tuple[list[str], list[socket.socket]],
) -> None:
    """Without this the test before would pass for servers that nobody can reach."""
    async with await open_sandbox(SandboxSpec(isolation="process")) as sandbox:
        result = await sandbox.run(["python3", "-c", NETWORK, *servers[0]], timeout_s=15)
    assert "loopback reached" in result.stdout
    assert "abstract reached" in result.stdout


# --- quantities


async def test_a_gigabyte_of_output_costs_neither_memory_nor_time(box: AgentSandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await box.run("head -c 1000000000 /dev/zero; head -c 1000000000 /dev/zero >&2", timeout_s=15)
    assert len(result.stdout) == box.spec.output_bytes
    assert result.dropped_bytes > 50 << 20
    # killed as a flood, long before the end
    assert result.exit_code == -9
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 64 << 10


async def test_output_a_little_over_the_limit_is_counted_and_the_command_continues(box: AgentSandbox) -> None:
    result = await box.run("head -c 3000000 /dev/zero; echo done >&2; exit 5")
    assert (len(result.stdout), result.stderr, result.exit_code) == (1 << 20, "done\n", 5)
    assert result.dropped_bytes == 3_000_000 - (1 << 20)


async def test_ten_gigabytes_cannot_be_allocated(box: AgentSandbox) -> None:
    result = await python(box, "data = bytearray(10 << 30); print('allocated')")
    assert result.exit_code != 0
    assert "MemoryError" in result.stderr
    slowly = "data = []\nwhile True: data.append(bytes(64 << 20))"
    result = await python(box, slowly)
    assert "MemoryError" in result.stderr


@pytest.mark.slow
async def test_many_processes_together_cannot_hold_more_than_one_may(contained: str) -> None:
    code = """
        import os, time
        for _ in range(10):
            if os.fork() == 0:
                data = bytearray(b"x") * (200 << 20)
                time.sleep(60)
                os._exit(0)
        time.sleep(60)
        """
    async with await open_sandbox(SandboxSpec(isolation="bubblewrap", memory_bytes=512 << 20)) as sandbox:
        result = await python(sandbox, code, timeout_s=15)
        assert result.exit_code == -9
        assert (await sandbox.run("echo on")).stdout == "on\n"


async def test_an_endless_loop_is_killed(box: AgentSandbox) -> None:
    started = time.monotonic()
    result = await box.run("while :; do :; done", timeout_s=0.2)
    assert result.timed_out
    assert time.monotonic() - started < 30


async def test_processor_time_ends_what_runs_in_the_background(
    isolation: IsolationLevel, count_of: Callable[[str], int]
) -> None:
    spec = SandboxSpec(isolation, cpu_time_s=1)
    async with await open_sandbox(spec) as sandbox:
        started = time.monotonic()
        process = await sandbox.start(["sh", "-c", "while :; do :; done"])
        assert await process.wait(timeout_s=120) in (-24, -9)
        assert time.monotonic() - started > 0.9


async def test_the_disk_cannot_be_filled(contained: str) -> None:
    spec = SandboxSpec(isolation="bubblewrap", disk_bytes=8 << 20, file_bytes=64 << 20)
    async with await open_sandbox(spec) as sandbox:
        for place in ("big", "/tmp/big", "/dev/shm/big"):
            assert "No space left" in (await sandbox.run(f"head -c 20000000 /dev/zero > {place}")).stderr
        # one budget for all places together; -x: a Python that lives in /tmp is mounted there
        total = (await sandbox.run("du -xscB1 . /tmp/ /dev/shm/ | tail -1 | cut -f1")).stdout
        assert int(total) <= 9 << 20
        with pytest.raises(OSError):
            await sandbox.write("more", b"x" * (1 << 20))


async def test_the_memory_cannot_be_filled_with_empty_files(contained: str) -> None:
    async with await open_sandbox(SandboxSpec(isolation="bubblewrap", disk_bytes=8 << 20)) as sandbox:
        files = "import os\nfor number in range(10**7): open(f'/tmp/f{number}', 'w').close()"
        assert (await python(sandbox, files)).exit_code == -9
        # what is there already may be removed, however long it takes; -xdev: a Python in /tmp is mounted there
        removed = await sandbox.run("find /tmp/ -xdev -type f -delete && echo on", timeout_s=150)
        assert removed.stdout == "on\n", removed


async def test_one_file_cannot_be_longer_than_its_limit(isolation: IsolationLevel) -> None:
    spec = SandboxSpec(isolation, file_bytes=1 << 20)
    async with await open_sandbox(spec) as sandbox:
        await sandbox.run("head -c 20000000 /dev/zero > big")
        assert len(await sandbox.read("big")) == 1 << 20


async def test_descriptors_are_limited(box: AgentSandbox) -> None:
    result = await python(box, "held = [open('/dev/null') for _ in range(1000)]")
    assert "Too many open files" in result.stderr
