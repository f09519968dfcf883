"""Limits of a sandbox, results of its commands, and what every isolation level offers."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

from verifiers.errors import ConfigError, SandboxError
from verifiers.sandbox.pipes import Drain, SandboxProcess

IsolationLevel = Literal["auto", "process", "bubblewrap", "docker", "podman"]

READ_BYTES = 64 << 20
RELAY_START_S = 30.0
_LEVELS: tuple[str, ...] = get_args(IsolationLevel)
_WHOLE = ("memory_bytes", "file_bytes", "disk_bytes", "processes", "open_files", "output_bytes")


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Limits of a sandbox. docs/concepts/sandbox.md says how each isolation level keeps them.

    Args:
        isolation: "bubblewrap", "process", "docker", "podman", or "auto": bubblewrap where it works, else process.
        wall_time_s: how long a `run` may take, in seconds, unless it says otherwise.
        cpu_time_s: processor time of each process, in seconds. None: a `run` gets its wall time and one second
            more, a started process has no limit of its own.
        memory_bytes: address space of each process. Bubblewrap also kills everything when its processes together
            hold more, shared memory and sockets included (it looks twice a second), and makes a cgroup where it can;
            with docker and podman it is the whole container's memory.
        file_bytes: the longest file that a process may write.
        disk_bytes: all files of the sandbox together. The process level cannot hold this.
        processes: how many processes and threads may exist at once.
        open_files: file descriptors of each process.
        output_bytes: how much of stdout, and of stderr, a `run` keeps. The rest is counted and thrown away.
        env: variables to set beside the few that every sandbox has; nothing of the caller's own is passed on.
        readable: host files and directories that can be read inside, under the same path.
        image: the image of docker and podman; it needs `sh`, `cat` and `mkdir`.
    """

    isolation: IsolationLevel = "auto"
    wall_time_s: float = 30.0
    cpu_time_s: float | None = None
    memory_bytes: int = 1 << 30
    file_bytes: int = 64 << 20
    disk_bytes: int = 256 << 20
    processes: int = 64
    open_files: int = 256
    output_bytes: int = 1 << 20
    env: Mapping[str, str] = field(default_factory=dict)
    readable: tuple[str, ...] = ()
    image: str = "python:3.11-slim"

    def __post_init__(self) -> None:
        if self.isolation not in _LEVELS:
            raise ConfigError(f"There is no isolation level {self.isolation!r}; take one of {', '.join(_LEVELS)}.")
        for name in _WHOLE:
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise ConfigError(f"A sandbox's {name} must be a whole number above 0, but is {value!r}.")
        if not self.wall_time_s > 0:
            raise ConfigError(f"A sandbox's wall_time_s must be above 0, but is {self.wall_time_s!r}.")
        if self.cpu_time_s is not None and not self.cpu_time_s > 0:
            raise ConfigError(f"A sandbox's cpu_time_s must be above 0 or None, but is {self.cpu_time_s!r}.")
        for name, text in self.env.items():
            if not isinstance(text, str):
                raise ConfigError(f"A sandbox's env must have texts, but {name} is {text!r}.")
        paths: object = self.readable
        if isinstance(paths, str):
            raise ConfigError(f"A sandbox's readable must be a tuple of paths, but is the string {self.readable!r}.")


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a command.

    Args:
        stdout, stderr: at most `output_bytes` of each; bytes that are not UTF-8 are replaced.
        exit_code: as the command gave it, minus the number of the signal that killed it, or None when its time ran
            out. From docker and podman 128 + n for one that signal n killed.
        timed_out: its wall time ran out, and it was killed with all that it had started.
        dropped_bytes: how much output was thrown away.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    dropped_bytes: int


class Sandbox(abc.ABC):
    """A place to run untrusted code in. Used in the event loop that opened it.

    Its end runs once and completely, though callers of `close` are several or cancelled.
    """

    isolation: str
    spec: SandboxSpec

    _closing: asyncio.Task[None] | None = None

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RunResult:
        """Run a command in the sandbox's directory and wait for its end. Up to a quarter of `processes` run at once.

        Cancelling it kills the command. Processes that it leaves in the background live on until the sandbox is
        closed, or until some command's time runs out.

        Args:
            command: a list is run as it is, a string by the shell (bash where there is one, else sh).
            stdin: what the command can read.
            timeout_s: wall time in seconds from its start; None takes the spec's.
            env: variables for this command beside the spec's.

        Raises:
            SandboxError: the sandbox is closed or died.
        """
        exit_code, out, err = await self._run(
            checked_command(command),
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            timeout_s=self.spec.wall_time_s if timeout_s is None else timeout_s,
            env=dict(env or {}),
        )
        return RunResult(out.text, err.text, exit_code, exit_code is None, out.dropped + err.dropped)

    @abc.abstractmethod
    async def _run(
        self, command: str | list[str], *, stdin: bytes | None, timeout_s: float, env: dict[str, str]
    ) -> tuple[int | None, Drain, Drain]:
        """Return the exit code of a command (None: its time ran out), its stdout and its stderr."""

    @abc.abstractmethod
    async def start(self, command: Sequence[str]) -> SandboxProcess:
        """Start a process that lives until it is killed or the sandbox is closed."""

    async def relay(self, target: str) -> int:
        """Connect a port of 127.0.0.1 inside to a Unix socket that `readable` names; return the port.

        The way to one server from a level without network. A container needs python3 for it.

        Raises:
            SandboxError: it cannot be started.
        """
        process = await self._start_relay(target)
        try:
            line = await process.read_line(timeout_s=RELAY_START_S)
        except TimeoutError:
            line = b""
        if not line:
            said = process.stderr().strip() or "it said nothing"
            raise SandboxError(f"the relay to {target} did not start: {said}")
        return int(line)

    @abc.abstractmethod
    async def _start_relay(self, target: str) -> SandboxProcess: ...

    @abc.abstractmethod
    async def read(self, path: str, *, max_bytes: int = READ_BYTES) -> bytes:
        """Return a file's content. Relative paths start at the sandbox's directory.

        Raises:
            OSError: as `open` raises it in the sandbox: FileNotFoundError, IsADirectoryError and so on; errno EFBIG
                for more than `max_bytes`.
        """

    async def write(self, path: str, data: bytes | str) -> None:
        """Write a file, and the directories it needs.

        Raises:
            OSError: as the sandbox's own system gives it, such as a full disk.
        """
        await self._write(path, data.encode() if isinstance(data, str) else data)

    @abc.abstractmethod
    async def _write(self, path: str, data: bytes) -> None: ...

    async def close(self) -> None:
        """Kill everything in it and remove its files, though this call be cancelled. A second call does nothing."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        cancelled = False
        while not self._closing.done():
            try:
                await asyncio.shield(self._closing)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        self._closing.result()

    @abc.abstractmethod
    async def _close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()


def checked_command(command: str | Sequence[str]) -> str | list[str]:
    """Return a command as it is sent. Raises ConfigError for an empty list."""
    if isinstance(command, str):
        return command
    if not command:
        raise ConfigError("A sandbox was given a command without words.")
    return [str(part) for part in command]
