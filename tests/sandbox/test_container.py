"""The docker and podman levels against a stand-in for the tool: requests to it, and the results of its answers.

The stand-in has no walls. How commands and containers end is tried with a real podman, in test_sandbox and
test_podman.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from verifiers.errors import SandboxError
from verifiers.sandbox import open_sandbox
from verifiers.sandbox.container import run_arguments
from verifiers.sandbox.spec import SandboxSpec

FAKE = r"""#!{python} -IS
import json, os, signal, sys

state = {state!r}
home = os.path.join(state, "home")
os.makedirs(home, exist_ok=True)
arguments = sys.argv[1:]
with open(os.path.join(state, "log"), "a") as log:
    log.write(json.dumps(arguments) + "\n")
if os.path.exists(os.path.join(state, "broken")):
    sys.exit("Cannot connect to the daemon")
verb = arguments[0]
if verb == "run":
    place = arguments.index("sh")
    with open(os.path.join(state, "main"), "w") as file:
        file.write(str(os.getpid()))
    os.chdir(home)
    os.execvp("sh", arguments[place:])
elif verb == "exec":
    place = next(n for n, word in enumerate(arguments) if word.startswith("verifiers-"))
    command = arguments[place + 1:]
    os.chdir(home)
    if command[2:] and command[2].endswith("kill -9 -1"):
        # without walls it would be meant for the whole machine
        sys.exit("a command was given up")
    os.execvp(command[0], command)
elif verb == "rm":
    with open(os.path.join(state, "main")) as file:
        os.kill(int(file.read()), signal.SIGKILL)
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    state = tmp_path / "state"
    state.mkdir()
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for tool in ("docker", "podman"):
        (binaries / tool).write_text(FAKE.format(python=os.path.realpath(sys.executable), state=str(state)))
        (binaries / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    return state


def log(state: Path) -> list[list[str]]:
    return [json.loads(line) for line in (state / "log").read_text().splitlines()]


def test_the_container_has_no_network_no_rights_and_every_limit() -> None:
    spec = SandboxSpec(
        isolation="docker", memory_bytes=1 << 28, processes=20, open_files=99, file_bytes=7, cpu_time_s=3,
        disk_bytes=200, env={"A": "b"}, readable=("/data",), image="alpine:3",
    )  # fmt: skip
    arguments = run_arguments(spec, "docker", "verifiers-x")
    options = arguments[: arguments.index("alpine:3")]
    assert options[:2] == ["docker", "run"]
    for option in (
        *("--rm", "--interactive", "--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *("--read-only", "--memory=268435456", "--memory-swap=268435456", "--pids-limit=24"),
        *("--ulimit=nofile=99:99", "--ulimit=fsize=7:7", "--ulimit=core=0:0", "--ulimit=cpu=3:3"),
        *("--env=A=b", "--volume=/data:/data:ro", "--name=verifiers-x", "--label=verifiers.sandbox=1"),
        "--tmpfs=/sandbox:rw,exec,nosuid,nodev,mode=1777,size=100",
    ):
        assert option in options
    assert not [option for option in options if "privileged" in option.replace("no-new-privileges", "")]
    assert "docker.sock" not in " ".join(options)


@pytest.mark.parametrize("tool", ["docker", "podman"])
async def test_commands_files_and_processes(state: Path, tool: str) -> None:
    async with await open_sandbox(SandboxSpec(isolation=tool)) as sandbox:
        assert sandbox.isolation == tool
        result = await sandbox.run("echo out; echo err >&2; exit 3", timeout_s=60)
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
        assert (await sandbox.run(["cat"], stdin="fed")).stdout == "fed"
        # which are the command's, and do not tell the tool where it is
        env = {"KEY": 'secret\'s "$1"\n', "PATH": "/usr/bin:/bin", "a.b": "c"}
        shown = await sandbox.run(["sh", "-c", 'printf %s "$KEY$PATH"; env | grep -c CARRIED'], env=env)
        assert shown.stdout == f"{env['KEY']}{env['PATH']}0\n"
        await sandbox.write("deep/file", b"\x00data")
        assert await sandbox.read("deep/file") == b"\x00data"
        with pytest.raises(FileNotFoundError):
            await sandbox.read("missing")
        with pytest.raises(IsADirectoryError):
            await sandbox.read("deep")
        with pytest.raises(OSError) as raised:
            await sandbox.read("deep/file", max_bytes=2)
        assert raised.value.errno == errno.EFBIG
        process = await sandbox.start(["sh", "-c", "while read line; do echo got $line; done"])
        await process.write("one\n")
        assert await process.read_line(timeout_s=60) == b"got one\n"
        await process.kill()
        assert await process.wait(timeout_s=60) is not None
        flood = await sandbox.run("head -c 2000000 /dev/zero")
        assert (len(flood.stdout), flood.dropped_bytes) == (1 << 20, 2_000_000 - (1 << 20))
    executed = [line for line in log(state) if line[0] == "exec"]
    assert "secret" not in str(executed), "every user of the machine can read arguments"
    # the main process belongs to root, so that commands cannot end it
    assert all("--user=1000:1000" in line for line in executed)
    assert "rm" not in [line[0] for line in log(state)]
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run("true")


async def test_a_tool_that_does_not_work_says_why(state: Path) -> None:
    (state / "broken").touch()
    with pytest.raises(SandboxError, match="Cannot connect to the daemon"):
        await open_sandbox(SandboxSpec(isolation="docker"))
