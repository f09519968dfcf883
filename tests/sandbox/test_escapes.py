"""Escapes that hostile code would try, each really tried, at every isolation level that says it contains them.

docs/concepts/sandbox.md lists them with what contains them. What a level does not contain is not tried there: some of
these would hurt the machine.
"""

# looking at the machine from outside is the point of these tests, and nothing else runs in their event loops
# ruff: noqa: ASYNC110, ASYNC220, ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verifiers.errors import SandboxError
from verifiers.sandbox import open_sandbox
from verifiers.sandbox.agent_sandbox import AgentSandbox
from verifiers.sandbox.spec import IsolationLevel, RunResult, Sandbox, SandboxSpec


async def python(sandbox: Sandbox, code: str, *, timeout_s: float = 60) -> RunResult:
    return await sandbox.run(["python3", "-c", textwrap.dedent(code)], timeout_s=timeout_s)


# --- processes

BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"


@pytest.mark.slow
async def test_a_fork_bomb_is_held_by_the_process_limit_and_killed(
    isolation: IsolationLevel, marker: str, wait_until_gone: Callable[[str], None], count_of: Callable[[str], int]
) -> None:
    async with await open_sandbox(SandboxSpec(isolation, processes=40)) as sandbox:
        if isolation == "process" and os.geteuid() == 0 and sandbox.note != "another user":  # type: ignore[attr-defined]
            pytest.skip("root's processes are not counted, and the sandbox cannot become another user here")
        running = asyncio.create_task(sandbox.run(["python3", "-c", BOMB, marker], timeout_s=2))
        most = 0
        while not running.done():
            most = max(most, count_of(marker))
            await asyncio.sleep(0.05)
        result = await running
        assert result.timed_out
        assert 10 < most <= 40
        wait_until_gone(marker)
        assert (await sandbox.run("echo on")).stdout == "on\n"


async def test_a_fork_bomb_at_closing_time_does_not_outrun_the_kill(
    contained: str, marker: str, wait_until_gone: Callable[[str], None], count_of: Callable[[str], int]
) -> None:
    sandbox = await open_sandbox(SandboxSpec(isolation="bubblewrap", processes=30))
    await sandbox.start(["python3", "-c", BOMB, marker])
    while count_of(marker) < 10:
        await asyncio.sleep(0.01)
    await sandbox.close()
    wait_until_gone(marker)


DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        os.execvp("sleep", ["sleep", {marker!r}])
    os._exit(0)
os.wait()
{then}
"""


@pytest.mark.parametrize("how", ["timeout", "close"])
async def test_a_daemonised_grandchild_does_not_get_away(
    isolation: IsolationLevel,
    how: str,
    marker: str,
    wait_until_gone: Callable[[str], None],
    count_of: Callable[[str], int],
) -> None:
    async with await open_sandbox(SandboxSpec(isolation)) as sandbox:
        then = "import time; time.sleep(60)" if how == "timeout" else ""
        code = DAEMON.format(marker=marker, then=then)
        result = await python(sandbox, code, timeout_s=1 if how == "timeout" else 60)
        assert result.timed_out is (how == "timeout")
        if how == "timeout":
            wait_until_gone(marker)
        else:
            async with asyncio.timeout(60):
                while not count_of(marker):
                    await asyncio.sleep(0.01)
    wait_until_gone(marker)


async def test_killing_the_first_process_kills_only_the_sandbox(
    isolation: IsolationLevel, marker: str, wait_until_gone: Callable[[str], None]
) -> None:
    async with await open_sandbox(SandboxSpec(isolation)) as sandbox:
        directory = (await sandbox.run("pwd")).stdout.strip()
        await sandbox.run(f"sleep {marker} > /dev/null 2>&1 &")
        code = "import os, signal; os.kill(os.getppid(), signal.SIGKILL); os.kill(os.getppid(), signal.SIGSTOP)"
        if isolation == "bubblewrap":
            # to the first process of its namespaces nobody inside can send these
            await python(sandbox, code, timeout_s=2)
            assert (await sandbox.run("echo on")).stdout == "on\n"
        else:
            with contextlib.suppress(SandboxError):
                await python(sandbox, code, timeout_s=2)
    if isolation == "process":
        # what was told to die with its parent did; a daemon would have stayed, and docs say so
        assert not os.path.exists(directory)
        for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
            with contextlib.suppress(OSError):
                if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, 9)
    wait_until_gone(marker)


async def test_nothing_outside_can_be_signalled(sealed: AgentSandbox) -> None:
    victim = subprocess.Popen(["sleep", "60"])
    try:
        code = f"""
            import os
            for pid in (1, {victim.pid}, {os.getpid()}):
                try: os.kill(pid, 9)
                except OSError as error: print(type(error).__name__)
            """
        # a signal to the first process of a pid namespace is refused or ignored
        assert (await python(sealed, code)).stdout.split()[-2:] == ["ProcessLookupError"] * 2
        # everything that it can see, which is itself
        await python(sealed, "import os; os.kill(-1, 9)")
        assert victim.poll() is None
        assert (await sealed.run("echo on")).stdout == "on\n"
    finally:
        victim.kill()
        victim.wait()


async def test_the_first_process_cannot_be_traced_nor_read(box: Sandbox) -> None:
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        parent = os.getppid()
        print(libc.ptrace(16, parent, 0, 0))
        for name in ("environ", "mem", "maps", "fd/3"):
            try: print(open(f"/proc/{parent}/{name}").read(10))
            except OSError as error: print(type(error).__name__)
        """
    assert (await python(box, code)).stdout.split() == ["-1", *["PermissionError"] * 4]
    assert (await box.run("echo on")).stdout == "on\n"


async def test_a_relay_cannot_be_traced_nor_written(box: Sandbox) -> None:
    assert await box.relay("/nowhere")
    code = """
        import ctypes, os
        siblings = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try: parent = int(open(f"/proc/{name}/stat").read().rpartition(")")[2].split()[1])
            except OSError: continue
            if parent == os.getppid() and int(name) != os.getpid(): siblings.append(int(name))
        [relay] = siblings
        print(ctypes.CDLL(None, use_errno=True).ptrace(16, relay, 0, 0))
        for name in ("environ", "mem", "maps", "fd/3"):
            try: open(f"/proc/{relay}/{name}", "rb" if name != "mem" else "r+b").read(10)
            except OSError as error: print(type(error).__name__)
            else: print("open")
        """
    assert (await python(box, code)).stdout.split() == ["-1", *["PermissionError"] * 4]


# --- secrets


async def test_no_key_of_the_caller_can_be_read(sealed: AgentSandbox) -> None:
    canary = f"canary-{uuid.uuid4().hex}"
    victim = subprocess.Popen(["sleep", "60"], env={"OPENAI_API_KEY": canary})
    try:
        result = await sealed.run("env; cat /proc/*/environ /proc/*/task/*/environ /proc/1/root/proc/*/environ")
        assert "PATH=" in result.stdout
        assert canary not in result.stdout
        assert Path(f"/proc/{victim.pid}/environ").read_text().strip("\0") == f"OPENAI_API_KEY={canary}"
    finally:
        victim.kill()
        victim.wait()


async def test_a_sandboxs_own_processes_hold_no_key(
    isolation: IsolationLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary-5471")
    async with await open_sandbox(SandboxSpec(isolation)) as sandbox:
        result = await sandbox.run("env; cat /proc/$$/environ /proc/$PPID/environ")
        assert isinstance(sandbox, AgentSandbox)
        first = Path(f"/proc/{sandbox.process.pid}/environ")
        outside = first.read_text() if os.access(first, os.R_OK) else ""
    assert "canary" not in result.stdout + outside


async def test_no_descriptor_of_the_caller_is_inherited(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    descriptor = os.open(tmp_path / "secret", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        async with await open_sandbox(SandboxSpec(isolation=box.isolation)) as sandbox:
            listed = await python(sandbox, "import os; print(*os.listdir('/proc/self/fd'))")
        # 3 is the listing itself
        assert set(listed.stdout.split()) == {"0", "1", "2", "3"}
    finally:
        os.close(descriptor)


async def test_the_callers_files_cannot_be_read(sealed: AgentSandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    key = tmp_path / "id_ed25519"
    key.write_text("canary-key")
    key.chmod(0o644)
    home = os.path.expanduser("~")
    ways = [
        *(f"cat {key}", f"cat /proc/1/root{key}", f"cat /proc/self/root{key}", f"cat /proc/1/cwd{key}"),
        *(f"cat ../../../../../..{key}", f"ln -s {key} l; cat l", f"ls -a {home}/.ssh {home}/.bashrc", "ls /home/*"),
        # out of a changed root, as in the oldest of these tricks
        "python3 -c \"import os; os.mkdir('c'); os.chroot('c'); os.chdir('../../../../..'); print(os.listdir('.'))\"",
    ]
    for way in ways:
        result = await sealed.run(way)
        assert result.exit_code != 0, way
        assert "canary-key" not in result.stdout
    listing = (await sealed.run("ls /")).stdout.split()
    assert not {"home", "var", "opt", "srv", "mnt", "boot", "sys", "run"} & set(listing)


async def test_symbolic_links_do_not_lead_reads_and_writes_out(box: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    secret = tmp_path / "secret"
    secret.write_text("canary")
    secret.chmod(0o666)
    await box.run(f"ln -s {secret} file; ln -s {tmp_path} directory; mkdir own; ln -s own inner")
    for path in ("file", "directory/secret", f"../../../../../../../..{secret}", str(secret)):
        with pytest.raises(OSError):
            await box.read(path)
    for path in ("file", "directory/secret", "directory/new", f"../../../../../../../..{secret}"):
        with contextlib.suppress(OSError):
            await box.write(path, "overwritten")
    assert secret.read_text() == "canary"
    assert os.listdir(tmp_path) == ["secret"]


async def test_a_device_or_pipe_does_not_hang_a_read(box: Sandbox) -> None:
    await box.run("mkfifo pipe; ln -s /dev/zero zero")
    async with asyncio.timeout(60):
        for path in ("pipe", "zero"):
            with pytest.raises(OSError):
                await box.read(path)
        with pytest.raises(OSError):
            await box.write("pipe", "x")


# --- writing outside


async def test_nothing_outside_the_directory_can_be_written(sealed: AgentSandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    places = [str(tmp_path), "/usr/bin", "/usr/lib", "/etc", "/", "/dev", "/proc/sys/kernel", sys.prefix, "/root"]
    for place in [*places, sys.base_prefix]:
        result = await sealed.run(f"echo x > {place}/escaped && cat {place}/escaped")
        assert result.exit_code != 0, place
    for command in (
        "echo x >> /etc/passwd",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
    ):
        assert (await sealed.run(command)).exit_code != 0, command
    assert (await sealed.run(f"mkdir -p {tmp_path}")).exit_code in (0, 1)
    assert os.listdir(tmp_path) == []
    assert not Path("/tmp/escaped").exists()


async def test_the_private_tmp_is_not_the_hosts(sealed: AgentSandbox) -> None:
    name = f"sandboxed-{uuid.uuid4().hex}"
    assert (await sealed.run(f"echo x > /tmp/{name}; echo y > /dev/shm/{name}; cat /tmp/{name}")).stdout == "x\n"
    assert not Path(f"/tmp/{name}").exists()
    assert not Path(f"/dev/shm/{name}").exists()


async def test_mounts_cannot_be_changed(sealed: AgentSandbox) -> None:
    code = f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        def attempt(result): print(result, os.strerror(ctypes.get_errno()).split()[0])
        attempt(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))
        attempt(libc.mount(b"none", b"/usr", None, 32 | 4096, None))
        attempt(libc.umount2(b"{sys.prefix}", 2))
        attempt(libc.unshare(0x10000000))
        attempt(libc.unshare(0x00020000))
        attempt(libc.setns(os.open("/proc/1/status", 0), 0))
        """
    lines = (await python(sealed, code)).stdout.splitlines()
    assert len(lines) == 6
    assert all(line.startswith("-1 ") for line in lines), lines


async def test_no_rights_are_held_and_none_can_be_won(box: Sandbox, isolation: IsolationLevel) -> None:
    status = (await box.run("cat /proc/self/status")).stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert fields["NoNewPrivs"] == "1"
    # a set-user-id program is run without the rights of its owner
    setuid = [path for path in ("/usr/bin/su", "/bin/su", "/usr/bin/passwd") if os.access(path, os.X_OK)]
    for path in setuid:
        result = await box.run(["sh", "-c", f"exec {path} -c 'id -u' < /dev/null"])
        assert isolation == "process" or result.stdout.strip() != "0"
    if isolation == "bubblewrap":
        code = """
            import os
            chown = lambda number: os.chown(".", number, number)
            for change in (os.setuid, os.setgid, lambda number: os.setgroups([number]), chown):
                try: change(0); print("changed")
                except OSError as error: print(type(error).__name__)
            """
        # of the invalid numbers the kernel says EINVAL
        assert "changed" not in (await python(box, code)).stdout
        assert (await box.run("id -u")).stdout == "1000\n"


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


async def test_a_gigabyte_of_output_costs_neither_memory_nor_time(box: Sandbox) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await box.run("head -c 1000000000 /dev/zero; head -c 1000000000 /dev/zero >&2", timeout_s=15)
    assert len(result.stdout) == box.spec.output_bytes
    assert result.dropped_bytes > 50 << 20
    # killed as a flood, long before the end
    assert result.exit_code == -9
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 64 << 10


async def test_output_a_little_over_the_limit_is_counted_and_the_command_continues(box: Sandbox) -> None:
    result = await box.run("head -c 3000000 /dev/zero; echo done >&2; exit 5")
    assert (len(result.stdout), result.stderr, result.exit_code) == (1 << 20, "done\n", 5)
    assert result.dropped_bytes == 3_000_000 - (1 << 20)


async def test_ten_gigabytes_cannot_be_allocated(box: Sandbox) -> None:
    result = await python(box, "data = bytearray(10 << 30); print('allocated')")
    assert result.exit_code != 0
    assert "MemoryError" in result.stderr
    slowly = "data = []\nwhile True: data.append(bytes(64 << 20))"
    result = await python(box, slowly)
    assert "MemoryError" in result.stderr


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


async def test_descriptors_are_limited(box: Sandbox) -> None:
    result = await python(box, "held = [open('/dev/null') for _ in range(1000)]")
    assert "Too many open files" in result.stderr
