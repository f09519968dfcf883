"""The docker and podman levels: one container, in which commands are run by the tool's `exec`.

The container's main process reads a pipe that this program holds and ends with it, so that the container goes when
this program does, however it dies. It runs as root without capabilities; commands run as another user, so that they
cannot end it, and killing that user's processes ends all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.resources
import os
import resource
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from verifiers.errors import ConfigError, SandboxError
from verifiers.sandbox.pipes import Drain, LineReader, SandboxProcess, close_all, drained, ended, open_pipes
from verifiers.sandbox.spec import READ_BYTES, Sandbox, SandboxSpec

ContainerTool = Literal["podman", "docker"]

HOME = "/sandbox"
# the image may have to be fetched
_START_S = 300.0
_TOOL_S = 30.0
_FILE_S = 60.0
_COPY_S = 600.0
_PRINTED_BYTES = 8 << 20
# podman waits ten seconds for a shell that ignores SIGTERM
_AT_ONCE = {"podman": ["--time=0"], "docker": []}
# podman gives containers the proxy of this process, whose address may hold a password
_NO_PROXY = {"podman": ["--http-proxy=false"], "docker": []}
_KILLED = 128 + 9
# a command that the end of its container took along, and what podman answers where there is no container left
_PERHAPS_DEAD = (125, 126, _KILLED, 255)
_USER = "1000:1000"
# the relay's, which no command can stop or write to
_RELAY_USER = "1001:1001"
# podman asks for more than a machine may have where no limit is given, and goes no higher than this itself
_USER_PROCESSES = 1 << 15
_MAIN = "echo ready; exec cat >/dev/null"
_SHELL = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$1"; else exec sh -c "$1"; fi'
# a pipe or a device would block whoever opens it
_REGULAR = '[ ! -e "$1" ] || [ -f "$1" ] || [ -d "$1" ] || { echo "not a regular file" >&2; exit 1; }; '
_READ = _REGULAR + 'exec cat <"$1"'
_WRITE = 'case "$1" in */*) mkdir -p "${1%/*}" || exit 1;; esac; ' + _REGULAR + 'exec cat >"$1"'
# a command that is given up may not have begun: the file tells it not to
_GATE = '[ ! -e "$1.gone" ] || exit 137; shift; exec "$@"'
_START = 'echo $$ >"$1"; ' + _GATE
_KILL_ALL = ': >"$1.gone"; kill -9 -1'
_KILL_ONE = ': >"$1.gone"; kill -9 "$(cat "$1")"'
# before a variable's name while the tool carries it, for which PATH or HOME has a meaning of its own
_CARRIED = "VERIFIERS_CARRIED_"
# what a shell answers that was started and found nobody to kill
_NOBODY = 1


def installed_tool() -> ContainerTool:
    """Return the first tool that is on PATH. Raises ConfigError where there is none."""
    names: tuple[ContainerTool, ...] = ("podman", "docker")
    for name in names:
        if shutil.which(name):
            return name
    raise ConfigError("the tasks run in containers, and neither podman nor docker is on PATH; install one.")


def run_arguments(spec: SandboxSpec, tool: str, name: str) -> list[str]:
    limits = {"nofile": spec.open_files}
    if spec.cpu_time_s is not None:
        limits["cpu"] = max(1, round(spec.cpu_time_s))
    disk = f"rw,exec,nosuid,nodev,mode=1777,size={spec.disk_bytes // 2}"
    # the main process and its init take part in the limit of processes
    return [
        *_bounded_run(spec, tool, name, spec.processes + 4, limits),
        *_NO_PROXY[tool],
        *("--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--ipc=private", "--read-only"),
        *(f"--tmpfs={HOME}:{disk}", f"--tmpfs=/tmp:{disk}", f"--workdir={HOME}"),
        *(f"--env={name}={value}" for name, value in {"HOME": HOME, "LANG": "C.UTF-8", **spec.env}.items()),
        *(spec.image, "sh", "-c", _MAIN),
    ]


def _bounded_run(spec: SandboxSpec, tool: str, name: str, processes: int, limits: Mapping[str, int]) -> list[str]:
    limits = {
        "fsize": spec.file_bytes,
        "core": 0,
        "nproc": _at_most(_USER_PROCESSES, resource.RLIMIT_NPROC),
        **limits,
    }
    return [
        *(tool, "run", "--rm", "--interactive", "--init", f"--name={name}", "--label=verifiers.sandbox=1"),
        *(f"--pids-limit={processes}", f"--memory={spec.memory_bytes}", f"--memory-swap={spec.memory_bytes}"),
        *(f"--ulimit={name}={value}:{value}" for name, value in limits.items()),
        *(f"--volume={path}:{path}:ro" for path in spec.readable),
    ]


def _at_most(limit: int, kind: int) -> int:
    """Return a limit, or this process's own hard one where that is lower and so can not be raised."""
    hard = resource.getrlimit(kind)[1]
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


async def call_tool(tool: str, *arguments: str, timeout_s: float = _TOOL_S) -> tuple[int | None, str]:
    """Run a command of the tool to its end; return its exit code (None: its time ran out) and what it printed."""
    client = _Client([tool, *arguments], stdin=False)
    with drained(client.pipes, None, _PRINTED_BYTES, _PRINTED_BYTES, lambda: None) as (out, err):
        try:
            has_ended = await client.ended(timeout_s)
        finally:
            await client.end()
    return client.process.returncode if has_ended else None, out.text + err.text


class _Client:
    """A running command of the tool, with its pipes, which callbacks of the event loop own."""

    def __init__(self, arguments: Sequence[str], *, stdin: bool, env: Mapping[str, str] | None = None) -> None:
        theirs, self.pipes = open_pipes(stdin)
        try:
            self.process = subprocess.Popen(
                arguments,
                env={**os.environ, **(env or {})},
                # podman's monitor leaves a file named "oom" where it may write
                cwd="/proc" if os.path.isdir("/proc") else "/",
                stdin=theirs[0],
                stdout=theirs[1],
                stderr=theirs[2],
                start_new_session=True,
            )
        except BaseException:
            close_all(self.pipes)
            raise
        finally:
            close_all(theirs)

    async def ended(self, limit_s: float | None) -> bool:
        return await ended(self.process, limit_s)

    async def end(self) -> None:
        """Kill it with what it started here. What it started inside the container is not touched."""
        if self.process.poll() is None:
            # it began a session of its own
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.ended(None)


class ContainerSandbox(Sandbox):
    user: str | None = _USER
    workdir: str | None = HOME
    # None: the user of the commands, whose processes it may kill and no others
    _killer: str | None = None
    _kill_all = _KILL_ALL
    _gate = _GATE

    def __init__(self, spec: SandboxSpec, tool: str) -> None:
        self.isolation = tool
        self.spec = spec
        self.name = f"verifiers-{uuid.uuid4().hex}"
        self._tool = tool
        self._started: set[ContainerProcess] = set()
        self._main = _Client(self._run_arguments(), stdin=True)
        self._out = LineReader(self._main.pipes[1], 1 << 16)
        self._err = Drain(self._main.pipes[2], 1 << 14, lambda: None)

    @classmethod
    async def open(cls, spec: SandboxSpec, tool: str, *options: Any) -> Self:
        """Open a container; `options` are the class's own. Raises SandboxError when the tool cannot start one."""
        if shutil.which(tool) is None:
            raise SandboxError(
                f"The isolation level {tool!r} needs the command {tool!r}, which is not on PATH: install it, or take "
                "another level."
            )
        sandbox = cls(spec, tool, *options)
        try:
            await sandbox.wait_until_ready()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _run_arguments(self) -> list[str]:
        return run_arguments(self.spec, self._tool, self.name)

    async def wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(_START_S):
                line = await self._out.read_line()
        except TimeoutError:
            raise SandboxError(f"{self._tool} did not start a container within {_START_S:g} s.") from None
        if line.strip() != b"ready":
            await self._main.ended(_TOOL_S)
            self._err.finish()
            said = self._err.text.strip() or "it said nothing"
            raise SandboxError(
                f"The isolation level {self._tool!r} does not work here: {said}. Start its service and see that the "
                f"image {self.spec.image!r} can be had, or take another level."
            )

    def _check_alive(self) -> None:
        if self._closing is not None:
            raise SandboxError("The sandbox is closed.")
        if self._main.process.poll() is not None:
            raise SandboxError("The sandbox died: its container ended.")

    def _exec(
        self,
        command: Sequence[str],
        *,
        stdin: bool,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        workdir: str | None = None,
    ) -> _Client:
        self._check_alive()
        # without its value, which the tool takes from its own environment: an argument could be read by every user
        options = [*(["--interactive"] if stdin else []), *(f"--env={name}" for name in env or ())]
        places = {"user": user or self.user, "workdir": workdir or self.workdir}
        options += [f"--{name}={value}" for name, value in places.items() if value is not None]
        return _Client([self._tool, "exec", *options, self.name, *command], stdin=stdin, env=env)

    async def _inside(self, script: str, *arguments: str) -> int | None:
        """Run a line for the shell as whoever may kill the commands; return its exit code, None after a time."""
        # the commands may have removed their directory
        client = self._exec(["sh", "-c", script, "sh", *arguments], stdin=False, user=self._killer, workdir="/")
        with drained(client.pipes, None, 0, 0, lambda: None):
            try:
                has_ended = await client.ended(_TOOL_S)
            finally:
                await client.end()
        return client.process.returncode if has_ended else None

    async def _kill_inside(self, script: str, note: str) -> None:
        """Run a shell script that kills; end the container where it cannot start."""
        if await self._inside(script, note) not in (0, _NOBODY, _KILLED):
            # the commands have taken every process that there may be
            await self._remove()

    async def check_death(self, exit_code: int | None) -> None:
        """Raise SandboxError where a command's exit code is the end of its container, which the tool tells later."""
        if exit_code in _PERHAPS_DEAD and await self._inside(":") != 0:
            await self._remove()
            raise SandboxError("The sandbox died: its container ended.")

    async def _remove(self) -> None:
        await call_tool(self._tool, "rm", "--force", *_AT_ONCE[self._tool], self.name)
        await self._main.ended(_TOOL_S)

    async def _exchange(
        self,
        command: Sequence[str],
        *,
        stdin: bytes | None,
        keep_bytes: int,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> tuple[int | None, Drain, Drain]:
        """Run a command to its end; return its exit code (None: its time ran out), stdout and stderr."""
        note = f"/tmp/.{uuid.uuid4().hex}"
        # "command": a name that the shell keeps to itself, such as UID, does not end it
        carried = {name: f"{_CARRIED}{name}" for name in env or () if name.isidentifier()}
        named = "".join(f'command export {name}="${other}"; unset {other}; ' for name, other in carried.items())
        script = ["sh", "-c", named + self._gate, "sh", note]
        env = {carried.get(name, name): value for name, value in (env or {}).items()}
        client = self._exec([*script, *command], stdin=stdin is not None, env=env)
        flooded = asyncio.Event()
        with drained(client.pipes, stdin, keep_bytes, self.spec.output_bytes, flooded.set) as (out, err):
            try:
                has_ended, end = False, time.monotonic() + timeout_s
                while not has_ended and not flooded.is_set() and time.monotonic() < end:
                    has_ended = await client.ended(min(1.0, max(0.0, end - time.monotonic())))
                if not has_ended:
                    await self._kill_inside(self._kill_all, note)
                    await client.end()
            except BaseException:
                await self._give_up(client, note)
                raise
        if has_ended:
            await self.check_death(client.process.returncode)
        timed_out = not has_ended and not flooded.is_set()
        return None if timed_out else client.process.returncode, out, err

    async def _give_up(self, client: _Client, note: str) -> None:
        """End the command of a caller that was cancelled, though it be cancelled a second time."""
        if self._closing is None and client.process.poll() is None:
            await asyncio.shield(self._kill_inside(self._kill_all, note))
        await client.end()

    async def _run(
        self, command: str | list[str], *, stdin: bytes | None, timeout_s: float, env: dict[str, str]
    ) -> tuple[int | None, Drain, Drain]:
        whole = ["sh", "-c", _SHELL, "sh", command] if isinstance(command, str) else command
        return await self._exchange(
            whole, stdin=stdin, keep_bytes=self.spec.output_bytes, timeout_s=timeout_s, env=env
        )

    async def start(self, command: Sequence[str]) -> SandboxProcess:
        return self._start(command)

    def _start(self, command: Sequence[str], user: str | None = None) -> SandboxProcess:
        note = f"/tmp/.{uuid.uuid4().hex}"
        client = self._exec(["sh", "-c", _START, "sh", note, *command], stdin=True, user=user)
        process = ContainerProcess(self, client, note)
        self._started.add(process)
        return process

    async def _start_relay(self, target: str) -> SandboxProcess:
        source = importlib.resources.files(__package__).joinpath("relay.py").read_text(encoding="utf-8")
        return self._start(["python3", "-I", "-S", "-c", source, target], _RELAY_USER)

    async def kill_started(self, process: ContainerProcess, note: str) -> None:
        self._started.discard(process)
        if self._closing is None:
            await self._kill_inside(_KILL_ONE, note)

    async def read(self, path: str, *, max_bytes: int = READ_BYTES) -> bytes:
        exit_code, out, err = await self._exchange(
            ["sh", "-c", _READ, "sh", path], stdin=None, keep_bytes=max_bytes, timeout_s=_FILE_S
        )
        if out.dropped:
            raise OSError(errno.EFBIG, f"the file is longer than {max_bytes} bytes", path)
        _raise_for(exit_code, err, path)
        return bytes(out.kept)

    async def _write(self, path: str, data: bytes) -> None:
        exit_code, _, err = await self._exchange(
            ["sh", "-c", _WRITE, "sh", path], stdin=data, keep_bytes=0, timeout_s=_FILE_S
        )
        _raise_for(exit_code, err, path)

    async def _close(self) -> None:
        # the main process reads it, and ends with it
        os.close(self._main.pipes[0])
        try:
            if not await self._main.ended(_TOOL_S / 3):
                await self._remove()
                await self._main.end()
            for process in list(self._started):
                await process.end()
        finally:
            self._out.close()
            self._err.close()


class ImageContainer(ContainerSandbox):
    """A container as its image has it: writable, with the image's users, rights and working directory.

    A command whose time runs out is killed with its process group; what it put into the background stays. All files
    of the container are on the tool's disk, of which `file_bytes` bounds each.

    Args:
        network: the tool's default network, instead of none.
        cpus: processors that it may keep busy; None for all.
        prepare: a line for the shell that root runs at its start.

    Attributes:
        user: whom commands run as; at first the image's own.
        image_user: the image's own.
        workdir: where they run; at first the image's own.
    """

    workdir: str
    image_user: str
    _killer = "0"
    _kill_all = ': >"$1.gone"; kill -9 -"$(cat "$1")"'
    _gate = _START

    def __init__(self, spec: SandboxSpec, tool: str, network: bool, cpus: float | None, prepare: str) -> None:
        self._network = network
        self._cpus = cpus
        self._prepare = prepare
        super().__init__(spec, tool)

    def _run_arguments(self) -> list[str]:
        spec, limits = self.spec, {"nofile": _at_most(1 << 16, resource.RLIMIT_NOFILE)}
        return [
            *_bounded_run(spec, self._tool, self.name, spec.processes, limits),
            *("--user=0", "--entrypoint=sh"),
            *([] if self._network else ["--network=none", *_NO_PROXY[self._tool]]),
            *([] if self._cpus is None else [f"--cpus={self._cpus:g}"]),
            *(spec.image, "-c", f"{self._prepare}\n{_MAIN}"),
        ]

    async def wait_until_ready(self) -> None:
        await super().wait_until_ready()
        # the container's own is root, whom its start needs
        asked = "--format={{.Config.WorkingDir}} {{.Config.User}}"
        code, said = await call_tool(self._tool, "image", "inspect", asked, self.spec.image)
        if code != 0:
            raise SandboxError(f"the user of the image {self.spec.image!r} is not known: {said.strip()}")
        workdir, _, user = said.partition("\n")[0].rpartition(" ")
        self.workdir, self.user = workdir or "/", user or "0"
        self.image_user = self.user

    async def _run(
        self, command: str | list[str], *, stdin: bytes | None, timeout_s: float, env: dict[str, str]
    ) -> tuple[int | None, Drain, Drain]:
        # the spec's may be keys, and every user of the machine can read the arguments of the container's start
        return await super()._run(command, stdin=stdin, timeout_s=timeout_s, env={**self.spec.env, **env})

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy what a directory holds into one that is there. Raises SandboxError."""
        self._check_alive()
        places = f"{source}/.", f"{self.name}:{target}"
        code, said = await call_tool(self._tool, "cp", *places, timeout_s=_COPY_S)
        if code != 0:
            why = said.strip() or "its time ran out"
            raise SandboxError(f"{places[0]} could not be copied to {places[1]}: {why}")


class ContainerProcess(SandboxProcess):
    def __init__(self, sandbox: ContainerSandbox, client: _Client, note: str) -> None:
        self._sandbox = sandbox
        self._client = client
        self._note = note
        super().__init__(client.pipes, sandbox.spec.output_bytes, client.process.kill)

    async def wait(self, *, timeout_s: float | None = None) -> int | None:
        if not await self._client.ended(timeout_s):
            raise TimeoutError
        with contextlib.suppress(SandboxError):
            await self._sandbox.check_death(self._client.process.returncode)
            return self._client.process.returncode
        return None

    async def kill(self) -> None:
        if self._client.process.poll() is None:
            await self._sandbox.kill_started(self, self._note)
        await self.end()

    async def end(self) -> None:
        await self._client.end()
        self.release()


def _raise_for(exit_code: int | None, err: Drain, path: str) -> None:
    """Raise the error that a file access ended with, if any; the shell tells it in words."""
    if exit_code == 0:
        return
    said = err.text.strip()
    # dash says "nonexistent" and "Directory nonexistent" where others say "No such file or directory"
    words = {"No such file": errno.ENOENT, "onexistent": errno.ENOENT, "s a directory": errno.EISDIR}
    words |= {"ermission denied": errno.EACCES, "No space": errno.ENOSPC, "Read-only": errno.EROFS}
    number = next((number for word, number in words.items() if word in said), errno.EIO)
    raise OSError(number, said or "the access did not end well", path)
