"""The process and bubblewrap levels: the program's side of the socket to a sandbox's first process."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.errors import ConfigError, SandboxError
from verifiers.sandbox.commands import remove_tree
from verifiers.sandbox.frames import FrameError, Frames, pack
from verifiers.sandbox.pipes import Drain, Feed, LineReader, PipedProcess, Pipes, close_all, ended, joined
from verifiers.sandbox.spec import READ_BYTES, RunResult, SandboxBase, SandboxProcess, SandboxSpec

__all__ = ["AgentSandbox", "DiedEarlyError"]

_CLOSE_S = 10.0
_KILL_S = 15.0
_FILE_S = 30.0
# the agent kills at the deadline; past this much more the agent itself is taken for dead
_GRACE_S = 15.0


class DiedEarlyError(SandboxError):
    """A sandbox's first process could not be started, or ended before it was ready."""


class AgentSandbox(SandboxBase):
    """A sandbox made of processes of this machine. Opened by `opening.open_agent_sandbox`.

    Attributes:
        process: the first process, which ends with the sandbox.
        note: whose user the commands of the process level run as.
    """

    def __init__(
        self, spec: SandboxSpec, level: str, process: subprocess.Popen[bytes], control: socket.socket
    ) -> None:
        self.isolation = level
        self.spec = spec
        self.process = process
        self.note = ""
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._outgoing: deque[tuple[bytearray, list[int]]] = deque()
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._gone = False
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._processes: set[_AgentProcess] = set()
        self._numbers = 0
        self._directory: str | None = None
        # more at once would only fail at the limit of processes, as a shell needs some of its own
        self._turns = asyncio.Semaphore(max(1, spec.processes // 4))
        self._loop.add_reader(control, self._receive)

    async def begin(self, configuration: dict[str, Any]) -> None:
        """Configure the agent and wait until it is ready. Raises SandboxError."""
        self._post(configuration)
        answer = await asyncio.shield(self._ready)
        if answer.get("lost"):
            problem = await asyncio.to_thread(self._last_output)
            raise DiedEarlyError(problem or "its first process ended before it was ready")
        if "failed" in answer:
            raise SandboxError(f"A sandbox of the level {self.isolation!r} could not be opened: {answer['failed']}.")
        self._close_errors()
        self.note = answer["note"]
        if self.isolation == "process":
            self._directory = answer["directory"]

    def _last_output(self) -> str:
        """Wait for the end of a first process that did not start well, and return what it said of that."""
        return self.process.communicate(timeout=_CLOSE_S)[1].decode(errors="replace").strip()[-500:]

    def _close_errors(self) -> None:
        if self.process.stderr is not None:
            self.process.stderr.close()

    @property
    def alive(self) -> bool:
        """True while its processes are there to be asked for something."""
        return not self._gone and self._closing is None and self.process.poll() is None

    # --- the socket

    def _receive(self) -> None:
        try:
            open_still = self._frames.receive(self._control)
            for message, _ in self._frames.messages():
                self._take(message)
        except BlockingIOError:
            return
        except (OSError, FrameError):
            open_still = False
        if not open_still:
            self._lost()

    def _take(self, message: dict[str, Any]) -> None:
        answer = self._answers.pop(message["id"], None) if "id" in message else self._ready
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _lost(self) -> None:
        """Give up every request: the other end is closed, so nothing of the sandbox is alive that could answer."""
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._drop_outgoing()
        self._gone = True
        for answer in (self._ready, *self._answers.values()):
            if not answer.done():
                answer.set_result({"lost": True})
        self._answers.clear()

    def _post(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Queue a message; its descriptors are closed once they are sent."""
        try:
            data = bytearray(pack({**message, "fds": len(fds)}))
        except (FrameError, TypeError) as error:
            close_all(fds)
            raise ConfigError(f"This cannot be sent into a sandbox: {error}.") from error
        self._outgoing.append((data, list(fds)))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                data, fds = self._outgoing[0]
                if fds:
                    sent = socket.send_fds(self._control, [data], fds)
                    close_all(fds)
                    fds.clear()
                else:
                    sent = self._control.send(data)
                del data[:sent]
                if not data:
                    self._outgoing.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._control, self._flush)
            return
        except OSError:
            # the reader of the socket sees the same and says so
            self._drop_outgoing()
        self._loop.remove_writer(self._control)

    def _drop_outgoing(self) -> None:
        for _, fds in self._outgoing:
            close_all(fds)
        self._outgoing.clear()

    # --- requests to the agent

    def _request(self, message: dict[str, Any], pipes: Pipes) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        if self._closing is not None or self._gone:
            pipes.close()
            raise SandboxError("The sandbox is closed." if self._closing is not None else "The sandbox died.")
        self._numbers += 1
        number = self._numbers
        self._answers[number] = answer = self._loop.create_future()
        try:
            self._post({**message, "id": number}, pipes.take_theirs())
        except BaseException:
            self._answers.pop(number, None)
            pipes.close()
            raise
        return number, answer

    def _kill_run(self, number: int) -> None:
        if not self._gone and self._closing is None:
            self._post({"op": "kill", "id": number})

    async def _answer(self, number: int, answer: asyncio.Future[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        """Return what the agent says of a command. When the caller stops waiting, the command is killed."""
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                message = await answer
        except TimeoutError:
            # an agent that no longer answers, stopped or starved: the sandbox cannot be trusted to end anything
            self.process.kill()
            raise SandboxError(f"The sandbox did not end a command within {_GRACE_S:g} s of its time.") from None
        finally:
            if self._answers.pop(number, None) is not None:
                self._kill_run(number)
        if message.get("lost"):
            raise SandboxError("The sandbox was closed." if self._closing is not None else "The sandbox died.")
        if "error" in message:
            raise SandboxError(f"The sandbox could not run this: {message['error']}.")
        return message

    async def exchange(
        self, kind: str, *, stdin: bytes | None, keep_bytes: int, timeout_s: float, **request: Any
    ) -> tuple[dict[str, Any], Drain, Drain]:
        """Run something to its end, feeding and draining its pipes.

        Returns:
            What the agent says of its end, stdout and stderr.
        """
        pipes = Pipes(stdin is not None)
        message = {"op": "spawn", "kind": kind, "timeout_s": timeout_s, **request}
        number, answer = self._request(message, pipes)
        feed = Feed(pipes.stdin, stdin, close_after=True) if stdin is not None else None
        out = Drain(pipes.stdout, keep_bytes, lambda: self._kill_run(number))
        err = Drain(pipes.stderr, self.spec.output_bytes, lambda: self._kill_run(number))
        try:
            message = await self._answer(number, answer, timeout_s)
            out.finish()
            err.finish()
            return message, out, err
        finally:
            if feed is not None:
                feed.close()
            out.close()
            err.close()

    async def import_module(self, module: str, paths: Sequence[str], timeout_s: float) -> str | None:
        """Import a module where calls are forked from; None, or the sentence that says why it could not be."""
        number, answer = self._request({"op": "import", "module": module, "paths": list(paths)}, Pipes.none())
        problem: str | None = (await self._answer(number, answer, timeout_s))["problem"]
        return problem

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: str | bytes | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RunResult:
        """Run a command; as in `Sandbox`."""
        limit_s = self.spec.wall_time_s if timeout_s is None else timeout_s
        cpu_s = self.spec.cpu_time_s
        async with self._turns:
            message, out, err = await self.exchange(
                "exec",
                stdin=stdin.encode() if isinstance(stdin, str) else stdin,
                keep_bytes=self.spec.output_bytes,
                timeout_s=limit_s,
                command=_command(command),
                cpu_time_s=math.ceil(limit_s) + 1 if cpu_s is None else cpu_s,
                env=dict(env or {}),
            )
        return RunResult(
            stdout=out.kept.decode(errors="replace"),
            stderr=err.kept.decode(errors="replace"),
            exit_code=None if message["timed_out"] else message["exit"],
            timed_out=message["timed_out"],
            dropped_bytes=out.dropped + err.dropped,
        )

    async def start(self, command: Sequence[str]) -> SandboxProcess:
        """Start a process; as in `Sandbox`."""
        return self._start("exec", command=_command(command))

    async def _start_relay(self, target: str) -> SandboxProcess:
        return self._start("relay", target=target)

    def _start(self, kind: str, **request: Any) -> SandboxProcess:
        pipes = Pipes(True)
        message = {"op": "spawn", "kind": kind, "cpu_time_s": self.spec.cpu_time_s, **request}
        number, answer = self._request(message, pipes)
        process = _AgentProcess(self, number, answer, pipes)
        self._processes.add(process)
        answer.add_done_callback(lambda answer: self._processes.discard(process))
        return process

    async def read(self, path: str, *, max_bytes: int = READ_BYTES) -> bytes:
        """Return a file's content; as in `Sandbox`."""
        message, out, err = await self.exchange(
            "read", stdin=None, keep_bytes=max_bytes, timeout_s=_FILE_S, path=os.fspath(path), max_bytes=max_bytes
        )
        _raise_for(message, err, path)
        return bytes(out.kept)

    async def write(self, path: str, data: bytes | str) -> None:
        """Write a file; as in `Sandbox`."""
        content = data.encode() if isinstance(data, str) else data
        message, _, err = await self.exchange(
            "write", stdin=content, keep_bytes=0, timeout_s=_FILE_S, path=os.fspath(path)
        )
        _raise_for(message, err, path)

    async def send_files(self, other: AgentSandbox) -> None:
        """Copy the working directory into that of another sandbox. Raises OSError where that is impossible."""
        # sparse files stay so, as they may be longer than the disk is large
        commands = ((self, ["tar", "-cSf", "-", "."]), (other, ["tar", "-xpf", "-"]))
        ends = [
            sandbox._request({"op": "spawn", "kind": "exec", "timeout_s": _FILE_S, "command": command}, pipes)
            for (sandbox, command), pipes in zip(commands, joined(), strict=True)
        ]
        for (sandbox, _), (number, answer) in zip(commands, ends, strict=True):
            if (await sandbox._answer(number, answer, _FILE_S))["exit"] != 0:
                raise OSError(errno.EIO, "its files cannot be copied")

    async def _close(self) -> None:
        try:
            # ends the sandbox even where a forked process of the caller has a copy of this end
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._lost()
        for started in list(self._processes):
            started.release()
        try:
            if not await ended(self.process, _CLOSE_S):
                self.process.kill()
                await ended(self.process, _CLOSE_S)
            if self.process.returncode and self._directory:
                # killed before it could do so itself
                remove_tree(self._directory)
        finally:
            self._control.close()
            self._close_errors()


class _AgentProcess(PipedProcess):
    """A long-lived process of an AgentSandbox; as in `SandboxProcess`."""

    def __init__(
        self, sandbox: AgentSandbox, number: int, answer: asyncio.Future[dict[str, Any]], pipes: Pipes
    ) -> None:
        self._answer = answer
        self._ask_to_kill = lambda: sandbox._kill_run(number)
        limit = sandbox.spec.output_bytes
        super().__init__(
            Feed(pipes.stdin, close_after=False),
            LineReader(pipes.stdout, limit),
            Drain(pipes.stderr, limit, self._ask_to_kill),
        )
        answer.add_done_callback(lambda answer: self.release())

    async def wait(self, *, timeout_s: float | None = None) -> int | None:
        async with asyncio.timeout(timeout_s):
            message = await asyncio.shield(self._answer)
        exit_code: int | None = message.get("exit")
        return exit_code

    async def kill(self) -> None:
        if not self._answer.done():
            self._ask_to_kill()
        try:
            await self.wait(timeout_s=_KILL_S)
        except TimeoutError:
            raise SandboxError(f"The sandbox did not kill a process within {_KILL_S:g} s.") from None


def _command(command: str | Sequence[str]) -> str | list[str]:
    if not command:
        raise ConfigError("A sandbox was given an empty command.")
    return command if isinstance(command, str) else [str(part) for part in command]


def _raise_for(message: dict[str, Any], err: Drain, path: str) -> None:
    """Raise the error that a file access ended with, if any."""
    if message["exit"] == 0:
        return
    number, _, text = err.kept.decode(errors="replace").partition(" ")
    if number.isdigit():
        raise OSError(int(number), text, path)
    raise OSError(errno.EIO, f"the access did not end well (exit code {message['exit']})", path)
