"""Promises of the isolation levels that this machine has without a container tool."""

# looking at the machine from outside is the point of these tests, and nothing else runs in their event loops
# ruff: noqa: ASYNC110, ASYNC240

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from verifiers.errors import ConfigError, SandboxError
from verifiers.sandbox import agent_sandbox, bubblewrap, open_sandbox
from verifiers.sandbox.agent_sandbox import AgentSandbox
from verifiers.sandbox.container import ContainerSandbox
from verifiers.sandbox.spec import IsolationLevel, Sandbox, SandboxSpec

LEVELS = ("process", "bubblewrap", pytest.param("podman", marks=pytest.mark.slow))


async def test_commands_give_their_output_and_exit_code(box: Sandbox) -> None:
    result = await box.run("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert not result.timed_out
    assert result.dropped_bytes == 0
    # a list is run without a shell
    assert (await box.run(["echo", "$HOME; ls"])).stdout == "$HOME; ls\n"
    missing = await box.run(["no-such-command"])
    assert missing.exit_code == 127
    assert "no-such-command" in missing.stderr
    assert (await box.run("kill -SEGV $$")).exit_code in (-11, 128 + 11)
    assert (await box.run(r"printf 'a\377b'")).stdout == "a\ufffdb"
    if box.isolation != "podman":
        # in a container it is the image that has modules
        assert (await box.run(["python", "-c", "import pydantic"])).stderr == ""
    # as a shell has it, and as a policy may say it
    assert (await box.run("")).exit_code == 0
    with pytest.raises(ConfigError, match="without words"):
        await box.run([])


async def test_stdin_is_fed_however_long_and_need_not_be_read(box: Sandbox) -> None:
    assert (await box.run("wc -c", stdin="x" * 3_000_000)).stdout.strip() == "3000000"
    assert (await box.run("cat", stdin=b"bytes")).stdout == "bytes"
    assert (await box.run("cat")).stdout == ""
    assert (await box.run("exit 4", stdin="x" * 3_000_000)).exit_code == 4


async def test_time_that_runs_out_kills_the_command_and_what_it_started(
    box: Sandbox, marker: str, wait_until_gone: Callable[[str], None]
) -> None:
    started = time.monotonic()
    # ignored signals are inherited
    result = await box.run(f"trap '' TERM INT HUP QUIT XCPU; sleep {marker} & sleep {marker}", timeout_s=0.3)
    assert result.timed_out
    assert result.exit_code is None
    assert time.monotonic() - started < 30
    wait_until_gone(marker)
    assert (await box.run("echo on")).stdout == "on\n"


async def test_files_are_there_for_later_commands_and_reads(box: Sandbox) -> None:
    await box.write("deep/down/note.txt", "hello")
    assert (await box.run("cat deep/down/note.txt; pwd > where")).stdout == "hello"
    assert (await box.run("cat where")).stdout == (await box.read("where")).decode()
    await box.write("deep/down/note.txt", b"\x00\xff")
    # nothing is left of what was longer
    assert await box.read("deep/down/note.txt") == b"\x00\xff"


async def test_file_errors_are_those_of_the_sandbox(box: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        await box.read("missing")
    await box.run("mkdir directory; mkfifo pipe")
    with pytest.raises(IsADirectoryError):
        await box.read("directory")
    with pytest.raises(OSError):
        await box.read("pipe")
    await box.write("long", "x" * 1000)
    assert len(await box.read("long", max_bytes=1000)) == 1000
    with pytest.raises(OSError) as raised:
        await box.read("long", max_bytes=999)
    assert raised.value.errno == errno.EFBIG


async def test_a_started_process_talks_line_by_line(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "while read line; do echo got $line; echo e >&2; done; printf tail"])
    for word in ("one", "two"):
        await process.write(f"{word}\n")
        assert await process.read_line(timeout_s=60) == f"got {word}\n".encode()
    with pytest.raises(TimeoutError):
        await process.read_line(timeout_s=0.05)
    await process.write(b"three\n")
    assert await process.read_line(timeout_s=60) == b"got three\n"
    await process.kill()
    assert await process.wait() in (-9, 128 + 9)
    assert await process.read_line(timeout_s=60) == b""
    assert process.stderr() == "e\n" * 3
    with pytest.raises(SandboxError, match="no longer reads"):
        await process.write("four\n")


async def test_a_started_process_that_ends_leaves_its_last_words(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "echo one; printf two; exit 5"])
    assert await process.wait(timeout_s=60) == 5
    assert [await process.read_line() for _ in range(3)] == [b"one\n", b"two", b""]


async def test_a_line_without_end_kills_its_process(box: Sandbox) -> None:
    process = await box.start(["sh", "-c", "cat /dev/zero | tr '\\0' x"])
    with pytest.raises(SandboxError, match="longer than"):
        await process.read_line(timeout_s=60)
    assert await process.wait(timeout_s=60) in (-9, 128 + 9)


async def test_a_started_process_outlives_a_command_whose_time_ran_out(box: Sandbox) -> None:
    if box.isolation == "podman":
        pytest.skip("a container's commands can only be killed together")
    process = await box.start(["cat"])
    assert (await box.run("sleep 60", timeout_s=0.2)).timed_out
    await process.write("still here\n")
    assert await process.read_line(timeout_s=60) == b"still here\n"


async def test_a_background_process_lives_until_the_sandbox_is_closed(
    isolation: IsolationLevel, marker: str, wait_until_gone: Callable[[str], None], count_of: Callable[[str], int]
) -> None:
    async with await open_sandbox(SandboxSpec(isolation)) as sandbox:
        # it keeps the pipe, which must not keep the command's answer
        result = await sandbox.run(f"sleep {marker} & echo started", timeout_s=60)
        assert (result.stdout, result.exit_code) == ("started\n", 0)
        async with asyncio.timeout(60):
            while count_of(marker) != 1:
                await asyncio.sleep(0.01)
        assert (await sandbox.run("echo on")).stdout == "on\n"
        assert count_of(marker) == 1
    wait_until_gone(marker)


async def test_cancelling_a_command_kills_it(
    box: Sandbox, marker: str, wait_until_gone: Callable[[str], None], count_of: Callable[[str], int]
) -> None:
    task = asyncio.create_task(box.run(["sleep", marker]))
    while not count_of(marker):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_until_gone(marker)
    assert (await box.run("echo on")).stdout == "on\n"


async def test_closing_removes_the_directory_however_it_was_left() -> None:
    sandbox = await open_sandbox(SandboxSpec(isolation="process"))
    directory = Path((await sandbox.run("pwd")).stdout.strip())
    await sandbox.run("mkdir -p a/b/c; echo x > a/b/c/d; ln -s / a/root; chmod 000 a/b/c a/b a")
    # deeper than Python may recurse, and longer than a path may be
    deep = "import os\nfor _ in range(1200):\n    os.mkdir('deep'); os.chdir('deep')\n"
    assert (await sandbox.run(["python3", "-c", deep])).exit_code == 0
    assert directory.is_dir()
    await sandbox.close()
    assert not directory.exists()
    assert Path("/usr").is_dir()


async def test_closing_twice_and_using_a_closed_sandbox(isolation: IsolationLevel) -> None:
    sandbox = await open_sandbox(SandboxSpec(isolation))
    await asyncio.gather(sandbox.close(), sandbox.close())
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run("true")
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.start(["true"])


async def test_closing_ends_a_command_under_way(isolation: IsolationLevel) -> None:
    sandbox = await open_sandbox(SandboxSpec(isolation))
    process = await sandbox.start(["cat"])
    running = asyncio.create_task(sandbox.run("echo ready > ready; sleep 60"))
    while True:
        with contextlib.suppress(FileNotFoundError):
            await sandbox.read("ready")
            break
    await sandbox.close()
    with pytest.raises(SandboxError):
        await running
    assert await process.wait(timeout_s=60) in (None, 128 + 9)
    assert await process.read_line(timeout_s=60) == b""


async def test_a_cancelled_close_has_closed_all_the_same(
    isolation: IsolationLevel, marker: str, wait_until_gone: Callable[[str], None]
) -> None:
    sandbox = await open_sandbox(SandboxSpec(isolation))
    await sandbox.run(f"sleep {marker} &")
    task = asyncio.create_task(sandbox.close())
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run("true")
    wait_until_gone(marker)


async def test_a_sandbox_whose_first_process_is_killed_says_so_and_leaves_nothing(
    isolation: IsolationLevel, marker: str, wait_until_gone: Callable[[str], None]
) -> None:
    async with await open_sandbox(SandboxSpec(isolation)) as sandbox:
        directory = (await sandbox.run("pwd")).stdout.strip()
        process = await sandbox.start(["sleep", marker])
        running = asyncio.create_task(sandbox.run(f"touch ready; sleep {marker}"))
        while (await sandbox.run("ls")).stdout != "ready\n":
            pass
        if isinstance(sandbox, ContainerSandbox):
            kill = ["podman", "kill", sandbox.name]
            await asyncio.to_thread(subprocess.run, kill, check=True, stdout=subprocess.DEVNULL)
        else:
            assert isinstance(sandbox, AgentSandbox)
            sandbox.process.kill()
        with pytest.raises(SandboxError, match="died"):
            await running
        assert await process.wait() is None
        with pytest.raises(SandboxError, match="died"):
            await sandbox.run("true")
    wait_until_gone(marker)
    if isolation == "process":
        assert not os.path.exists(directory)


async def test_the_environment_is_the_sandboxs_own(
    isolation: IsolationLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_API_KEY", "canary")
    async with await open_sandbox(SandboxSpec(isolation, env={"GIVEN": "yes"})) as sandbox:
        assert "GIVEN=once\n" in (await sandbox.run("env", env={"GIVEN": "once"})).stdout
        lines = (await sandbox.run("env")).stdout.splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert "GIVEN=yes" in lines
    assert names <= {
        *("GIVEN", "PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE", "PYTHONNOUSERSITE"),
        *("PWD", "SHLVL", "_", "OLDPWD"),
        # podman's own
        *("TERM", "container"),
    }


async def test_readable_paths_can_be_read_and_not_written(contained: str, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("data")
    tmp_path.chmod(0o755)
    async with await open_sandbox(SandboxSpec(isolation="bubblewrap", readable=(str(tmp_path),))) as sandbox:
        assert (await sandbox.run(f"cat {tmp_path}/data.txt")).stdout == "data"
        assert (await sandbox.run(f"echo x > {tmp_path}/data.txt")).exit_code != 0
        assert (await sandbox.run(f"touch {tmp_path}/new")).exit_code != 0
    assert (tmp_path / "data.txt").read_text() == "data"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes run as another user than the files' owner")
async def test_a_readable_path_that_cannot_be_read_inside_is_said(contained: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(SandboxError, match="chmod"):
        await open_sandbox(SandboxSpec(isolation="bubblewrap", readable=(str(tmp_path),)))


@pytest.mark.parametrize("path", ["/", "/proc/", "relative", "/no/such/path"])
async def test_readable_paths_that_give_everything_away_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="readable"):
        await open_sandbox(SandboxSpec(isolation="process", readable=(path,)))


async def test_more_commands_than_may_run_at_once_all_get_their_turn(isolation: IsolationLevel) -> None:
    async with await open_sandbox(SandboxSpec(isolation, processes=12)) as sandbox:
        results = await asyncio.gather(*(sandbox.run(f"echo {number} | cat") for number in range(60)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(60)]


async def test_many_sandboxes_at_once_leave_no_descriptor_and_no_process(
    isolation: IsolationLevel, marker: str, wait_until_gone: Callable[[str], None]
) -> None:
    async def use(number: int) -> str:
        async with await open_sandbox(SandboxSpec(isolation)) as sandbox:
            process = await sandbox.start(["sleep", marker])
            await sandbox.write("number", str(number))
            output = (await sandbox.run("cat number; sleep " + marker + " > /dev/null &")).stdout
            with pytest.raises(TimeoutError):
                await process.wait(timeout_s=0.001)
            return output

    await use(0)
    before = set(os.listdir("/proc/self/fd"))
    assert await asyncio.gather(*map(use, range(8))) == [str(number) for number in range(8)]
    assert set(os.listdir("/proc/self/fd")) == before
    wait_until_gone(marker)


async def test_the_level_is_announced_once_with_what_it_does_not_stop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sandbox, "_announced", set())
    with caplog.at_level(logging.INFO, "verifiers.sandbox"):
        for _ in range(2):
            await (await open_sandbox(SandboxSpec(isolation="process"))).close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "neither reading the host's files nor the network" in record.getMessage()


async def test_a_level_that_is_not_available_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'qemu'"):
        SandboxSpec(isolation="qemu")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError, match="not on PATH"):
        await open_sandbox(SandboxSpec(isolation="podman"))


async def test_auto_falls_back_where_bubblewrap_fails_and_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, missing = bubblewrap.Recipe("/bin/false", True), bubblewrap.Recipe("/no/bwrap", True)
    for found, why in (
        ([ends], "ended before it was ready"),
        ([missing], "/no/bwrap: No such file"),
        ([], r"pip install 'verifiers\[sandbox\]=="),
    ):
        monkeypatch.setattr(bubblewrap, "recipes", lambda found=found: found)
        monkeypatch.setattr(agent_sandbox, "_recipes", [])
        monkeypatch.setattr(agent_sandbox, "_unavailable", "")
        monkeypatch.setattr(agent_sandbox, "_announced", set())
        with pytest.raises(SandboxError, match=why):
            await open_sandbox(SandboxSpec(isolation="bubblewrap"))
        with caplog.at_level(logging.WARNING, "verifiers.sandbox"):
            for _ in range(2):
                async with await open_sandbox() as sandbox:
                    assert sandbox.isolation == "process"
        assert re.search(why, caplog.text)
        caplog.clear()


async def test_auto_never_falls_back_where_bubblewrap_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_sandbox, "_recipes", [bubblewrap.Recipe("/bin/false", True)])
    monkeypatch.setattr(agent_sandbox, "_unavailable", "")
    with pytest.raises(SandboxError, match="ended before it was ready"):
        await open_sandbox()


async def test_bubblewrap_works_where_proc_cannot_be_mounted(contained: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = bubblewrap.recipes()[0]._replace(proc=False)
    monkeypatch.setattr(agent_sandbox, "_recipes", [recipe])
    async with await open_sandbox() as sandbox:
        assert (await sandbox.run("ls /proc; echo $(pwd)", timeout_s=60)).stdout == "/sandbox/home\n"
        assert (await sandbox.run("sleep 60", timeout_s=0.3)).timed_out
        assert (await sandbox.run(["python3", "-c", "print(1)"])).stdout == "1\n"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"memory_bytes": 0}, {"wall_time_s": -1}, {"processes": 0}, {"cpu_time_s": 0}, {"readable": "/usr"}),
        # bwrap would fail, and "auto" take a level that stops less; and all output would be lost
        *({"disk_bytes": 1e8}, {"output_bytes": 1e6}, {"wall_time_s": float("nan")}, {"env": {"SEED": 1}}),
    ],
    ids=str,
)
def test_limits_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SandboxSpec(**wrong)  # type: ignore[arg-type]
