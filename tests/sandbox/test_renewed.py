"""Files judged after hostile code: what the judge inherits, what it finds, and what no code inside may call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verifiers.sandbox import open_sandbox, renewed
from verifiers.sandbox.spec import IsolationLevel, SandboxSpec

LEVELS = ("process", "bubblewrap", pytest.param("podman", marks=pytest.mark.slow))

TOLD = """
import json, os, resource, signal
limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
told = {
    "limits": limits, "nice": os.nice(0), "policy": os.sched_getscheduler(0), "cpus": sorted(os.sched_getaffinity(0)),
    "umask": os.umask(0o22), "cwd": os.getcwd(), "environment": dict(os.environ),
    "mask": str(signal.pthread_sigmask(0, [])), "groups": os.getgroups(),
    "signals": [str(signal.getsignal(number)) for number in range(1, 32)],
    "oom": open("/proc/self/oom_score_adj").read(), "descriptors": len(os.listdir("/proc/self/fd")),
}
print(json.dumps(told, sort_keys=True))
"""

ATTACK = """
import ctypes, itertools, os, resource
def attempt(function, *arguments):
    try:
        function(*arguments)
    except (OSError, ValueError):
        pass
libc = ctypes.CDLL(None)
for pid in (1, os.getppid()):
    for name in [name for name in dir(resource) if name.startswith("RLIMIT_")]:
        attempt(resource.prlimit, pid, getattr(resource, name), (0, 0))
    attempt(os.sched_setaffinity, pid, {max(os.sched_getaffinity(0))})
    attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
    attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)
    attempt(lambda pid=pid: open(f"/proc/{pid}/oom_score_adj", "w").write("1000"))
    for who, number in itertools.product((1, 2, 3), (pid, os.getuid())):
        libc.syscall(ctypes.c_long({"x86_64": 251, "aarch64": 30}[os.uname().machine]), who, number, 3 << 13)
attempt(os.setpriority, os.PRIO_USER, 0, 19)
attempt(os.setpriority, os.PRIO_USER, os.getuid(), 19)
open("left", "w").write("here")
if os.fork() == 0:
    os.setsid()
    while True: pass
"""

JUDGED = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from verifiers.errors import SandboxError
from verifiers.sandbox import open_sandbox, renewed
from verifiers.sandbox.spec import SandboxSpec

async def main():
    try:
        sandbox = await open_sandbox(SandboxSpec("bubblewrap"))
    except SandboxError as error:
        return print("unavailable", error)
    async with sandbox:
        before = await sandbox.run([sys.executable, "-c", sys.argv[2]])
        attack = await sandbox.run([sys.executable, "-c", sys.argv[3]])
        async with await renewed(sandbox) as judge:
            after = await judge.run([sys.executable, "-c", sys.argv[2]])
            left = await judge.run("cat left; ps -A 2>/dev/null | wc -l")
    print(before.stdout, after.stdout, attack.exit_code, attack.stderr, left.stdout, sep="\\n---\\n")

asyncio.run(main())
"""


@pytest.mark.parametrize("user", [os.geteuid() if hasattr(os, "geteuid") else 0, 65534])
def test_a_judge_inherits_nothing_that_the_judged_code_changed(contained: str, user: int) -> None:
    as_other: dict[str, object] = {}
    python = sys.executable
    if user != os.geteuid():
        if os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"):
            pytest.skip("needs root, to become an ordinary user with a Python of the system")
        as_other, python = {"user": user, "group": user, "extra_groups": []}, "/usr/bin/python3"
    from verifiers.sandbox import bubblewrap

    path = ":".join([*(os.path.dirname(recipe.executable) for recipe in bubblewrap.recipes()), os.environ["PATH"]])
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [python, "-c", JUDGED, root, TOLD, ATTACK],
        capture_output=True, text=True, timeout=60, check=False, cwd="/", env={"PATH": path}, **as_other,  # type: ignore[call-overload]
    )  # fmt: skip
    if "unavailable" in done.stdout:
        pytest.skip(done.stdout)
    before, after, code, errors, left = done.stdout.split("\n---\n")
    assert json.loads(after) == json.loads(before), done.stderr
    assert (code, errors) == ("0", "")
    assert left.startswith("here")


FILLS = """
import os, socket
os.makedirs("shut/below"); open("shut/below/answer", "w").write("42"); os.chmod("shut/below/answer", 0)
os.chmod("shut/below", 0); os.chmod("shut", 0o500)
os.mkfifo("pipe"); socket.socket(socket.AF_UNIX).bind("socket"); os.symlink("/nowhere", "link")
open("sparse", "w").truncate(60 << 20)
"""


async def test_all_files_can_be_judged_and_none_blocks_who_opens_it(isolation: IsolationLevel) -> None:
    async with await open_sandbox(SandboxSpec(isolation)) as sandbox:
        assert (await sandbox.run(["python3", "-c", FILLS])).stderr == ""
        async with await renewed(sandbox) as judge:
            assert await judge.read("shut/below/answer") == b"42"
            await judge.write("shut/below/more", "x")
            assert (await judge.run("ls")).stdout.split() == ["link", "shut", "sparse"]


async def test_a_full_disk_leaves_room_to_judge(contained: str) -> None:
    spec = SandboxSpec("bubblewrap", disk_bytes=8 << 20)
    async with await open_sandbox(spec) as sandbox:
        await sandbox.run("head -c 20000000 /dev/zero > full")
        async with await renewed(sandbox) as judge:
            await judge.write("reward", "0.5")
            assert await judge.read("reward") == b"0.5"


@pytest.mark.parametrize("damage", ["rm -rf $PWD", "mv $PWD ../moved", "rm -rf $PWD && ln -s /usr $PWD"])
async def test_a_working_directory_that_is_gone_is_the_codes_doing(isolation: IsolationLevel, damage: str) -> None:
    async with await open_sandbox(SandboxSpec(isolation)) as sandbox:
        directory = (await sandbox.run("pwd")).stdout.strip()
        done = await sandbox.run(["sh", "-c", f"cd / && {damage.replace('$PWD', directory)}"])
        if done.exit_code != 0:
            pytest.skip("the directory's own directory is another user's")
        with pytest.raises(OSError):
            await renewed(sandbox)


REFUSED = """
import ctypes, errno, os, socket
machine = os.uname().machine
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *arguments):
    number = {"x86_64": x86, "aarch64": arm}[machine]
    done = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return "done" if done >= 0 else errno.errorcode[ctypes.get_errno()]
def family(number):
    try:
        socket.socket(number, socket.SOCK_STREAM).close()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
name = ctypes.addressof(ctypes.create_string_buffer(b"x"))
print(*(call(*each) for each in (
    (319, 279, name, 0), (447, 447, 0), (29, 194, 0, 4096, 0o1600), (68, 186, 0, 0o1600), (64, 190, 0, 1, 0o1600),
    (425, 425, 1, 0), (426, 426, 0, 0, 0, 0, 0, 0), (427, 427, 0, 0, 0, 0), (321, 280, 0, 0, 0), (323, 282, 0),
    (298, 241, 0, 0, -1, -1, 0), (248, 217, name, name, 0, 0, -2), (249, 218, name, name, 0, -2),
    (250, 219, 0, -3, 0),
)))
print(*(family(number) for number in (40, 38, 17, 31, 44)))
print(*(family(number) for number in (1, 2)))
print(call(0x40000000 + 39, 279, name, 0))
"""


async def test_system_calls_that_no_grader_needs_are_refused(contained: str) -> None:
    if os.uname().machine not in ("x86_64", "aarch64"):
        pytest.skip("there is no filter for this processor")
    async with await open_sandbox(SandboxSpec("bubblewrap")) as sandbox:
        result = await sandbox.run(["python3", "-c", REFUSED])
    calls, families, usual, foreign = result.stdout.splitlines()
    assert set(calls.split()) == {"EPERM"}, result
    assert set(families.split()) == {"EAFNOSUPPORT"}
    assert usual == "done done"
    assert foreign in ("ENOSYS", "EPERM")


FORKS = """
import mmap, os, socket, time
def private():
    return bytearray(b"x") * (100 << 20)
def shared():
    held = mmap.mmap(-1, 100 << 20)
    for at in range(0, len(held), 4096): held[at] = 1
    return held
def sockets():
    held = []
    try:
        while True:
            one, other = socket.socketpair()
            one.setblocking(False)
            held += [one, other]
            try:
                while True: one.send(bytes(60_000))
            except BlockingIOError: pass
    except OSError: return held
for _ in range(16):
    if os.fork() == 0:
        held = WHAT()
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["private", "shared", "sockets"])
async def test_memory_of_many_processes_and_of_none_is_bounded(contained: str, what: str) -> None:
    async with await open_sandbox(SandboxSpec("bubblewrap", memory_bytes=256 << 20)) as sandbox:
        result = await sandbox.run(["python3", "-c", FORKS.replace("WHAT", what)], timeout_s=30)
        assert result.exit_code == -9, result
        assert (await sandbox.run("echo on")).stdout == "on\n"


async def test_memory_that_forks_share_is_counted_once(contained: str) -> None:
    code = """
import os, time
held = b"x" * (100 << 20)
for _ in range(5):
    if os.fork() == 0:
        time.sleep(2)
        os._exit(0)
time.sleep(2)
"""
    async with await open_sandbox(SandboxSpec("bubblewrap", memory_bytes=256 << 20)) as sandbox:
        assert (await sandbox.run(["python3", "-c", code])).exit_code == 0
