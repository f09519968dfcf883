"""Isolation levels under other users than the tests': root, whose process level becomes another user, and nobody.

Root's own Python may be where nobody else can read it; then a Python of the system is taken, or the test is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verifiers.sandbox import bubblewrap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to become others"),
]

NOBODY = 65534

PROGRAM = """
import asyncio, os, sys
root, user, isolation, marker, secret = sys.argv[1:]
sys.path.insert(0, root)
if int(user):
    os.setgroups([])
    os.setresgid(int(user), int(user), int(user))
    os.setresuid(int(user), int(user), int(user))
from verifiers.errors import SandboxError
from verifiers.sandbox import open_sandbox
from verifiers.sandbox.spec import SandboxSpec

BOMB = "import os\\nwhile True:\\n    try: os.fork()\\n    except OSError: pass\\n"

def count():
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    found += marker.encode() in file.read().split(b"\\0")
            except OSError:
                pass
    return found - 1

async def main():
    try:
        sandbox = await open_sandbox(SandboxSpec(isolation=isolation, processes=40))
    except SandboxError as error:
        print("unavailable", error)
        return
    async with sandbox:
        if isolation == "process" and not int(user):
            assert sandbox.note == "another user", sandbox.note
            assert (await sandbox.run("id -u")).stdout.strip() not in ("0", "")
            # neither files of root nor its processes are in reach
            assert (await sandbox.run(["cat", secret])).exit_code != 0
            kill = "import os, sys\\nfor pid in (int(sys.argv[1]), os.getppid()):\\n"
            kill += "    try: os.kill(pid, 9)\\n    except OSError: print('no')"
            assert (await sandbox.run([sys.executable, "-c", kill, str(os.getpid())])).stdout == "no\\nno\\n"
            assert "canary" not in (await sandbox.run("cat /proc/*/environ")).stdout
        assert (await sandbox.run(["cat", secret])).exit_code != 0
        await sandbox.write("file", "content")
        assert await sandbox.read("file") == b"content"
        assert (await sandbox.run("cat file")).stdout == "content"
        bomb = asyncio.create_task(sandbox.run([sys.executable, "-c", BOMB, marker], timeout_s=2))
        most = 0
        while not bomb.done():
            most = max(most, count())
            await asyncio.sleep(0.05)
        assert (await bomb).timed_out
        # a user's other processes count too, and some may have ended meanwhile
        assert 5 < most <= 60, most
        assert count() == 0, count()
        assert (await sandbox.run("echo on")).stdout == "on\\n"
        directory = (await sandbox.run("mkdir -p a/b; chmod 0 a; pwd")).stdout.strip()
    assert isolation == "bubblewrap" or not os.path.exists(directory)
    print("done")

asyncio.run(main())
"""


def python_for_all() -> str:
    for candidate in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        attempt = "import sys; sys.exit(sys.version_info < (3, 11))"
        try:
            done = subprocess.run([candidate, "-c", attempt], user=NOBODY, group=NOBODY, extra_groups=[], check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return candidate
    pytest.skip("there is no Python 3.11 that every user can run")


@pytest.mark.parametrize(
    ("user", "isolation"), [(0, "process"), (0, "bubblewrap"), (NOBODY, "process"), (NOBODY, "bubblewrap")]
)
def test_escapes_are_contained_for_other_users(
    user: int, isolation: str, marker: str, tmp_path: Path, wait_until_gone: Callable[[str], None]
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    root = str(Path(__file__).parents[2])
    # that Python may not have the wheel with bubblewrap
    path = ":".join([*(os.path.dirname(recipe.executable) for recipe in bubblewrap.recipes()), os.environ["PATH"]])
    done = subprocess.run(
        [python_for_all(), "-c", PROGRAM, root, str(user), isolation, marker, str(secret)],
        capture_output=True, text=True, timeout=18, check=False, env={"PATH": path, "KEY": "canary"},
    )  # fmt: skip
    if "unavailable" in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.strip() == "done", done.stdout + done.stderr
    wait_until_gone(marker)
