"""The process and namespaces tiers: one agent process inside, spoken to over a socket that carries descriptors."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any

from verifiers.errors import ConfigError, SandboxError
from verifiers.sandbox.child.wire import FrameError, Frames, pack
from verifiers.sandbox.closing import ClosesOnce, ended
from verifiers.sandbox.launching import CLOSE_S, START_S, Launched, launch, remove_left_over, why_not
from verifiers.sandbox.native_process import NativeProcess, Pipes, close_all
from verifiers.sandbox.pipes import Drain, Feed
from verifiers.sandbox.spec import READ_BYTES, RunResult, SandboxProcess, SandboxSpec

__all__ = ["NativeSandbox", "open_native"]

# the agent kills at the deadline; past this much more it is taken for dead itself
_GRACE_S = 15.0
_FILE_S = 30.0


async def open_native(spec: SandboxSpec, tier: str) -> NativeSandbox:
    """Open a sandbox of the process or namespaces tier. Raises SandboxError when the system does not allow it."""
    try:
        launched = launch(spec, tier)
    except OSError as error:
        raise SandboxError(why_not(tier, str(error))) from error
    sandbox = NativeSandbox(spec, tier, launched)
    try:
        await sandbox.wait_until_ready()
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


class NativeSandbox(ClosesOnce):
    """A sandbox made of processes of this machine. Opened by `open_native`."""

    def __init__(self, spec: SandboxSpec, tier: str, launched: Launched) -> None:
        self.tier = tier
        self.spec = spec
        self.note = ""
        self._launched = launched
        self._control: socket.socket = launched.control
        self._control.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._frames = Frames()
        self._outgoing: deque[tuple[bytearray, list[int]]] = deque()
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._gone = False
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._processes: set[NativeProcess] = set()
        self._numbers = 0
        self._directory: str | None = None
        # more at once would only fail at the limit of processes, as a shell needs some of its own
        self._turns = asyncio.Semaphore(max(1, spec.processes // 4))
        self._loop.add_reader(self._control, self._receive)

    async def wait_until_ready(self) -> None:
        """Wait for the first message of the agent."""
        try:
            async with asyncio.timeout(START_S):
                answer = await asyncio.shield(self._ready)
        except TimeoutError:
            raise SandboxError(f"A sandbox of the tier {self.tier!r} did not start within {START_S:g} s.") from None
        if "failed" in answer:
            raise SandboxError(why_not(self.tier, answer["failed"]))
        self.note = answer["note"]
        if self.tier == "process":
            self._directory = answer["directory"]

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
        if "id" not in message:
            if not self._ready.done():
                self._ready.set_result(message)
            return
        answer = self._answers.pop(message["id"], None)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _lost(self) -> None:
        """The other end is closed: nothing of the sandbox is alive that could answer."""
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._drop_outgoing()
        self._gone = True
        if not self._ready.done():
            self._ready.set_result({"failed": "its first process ended before it was ready"})
        for answer in self._answers.values():
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

    # --- what the agent is asked for

    def _spawn(self, kind: str, pipes: Pipes, **request: Any) -> tuple[int, asyncio.Future[dict[str, Any]]]:
        if self._closing is not None or self._gone:
            pipes.close()
            raise SandboxError("The sandbox is closed." if self._closing is not None else "The sandbox died.")
        self._numbers += 1
        number = self._numbers
        self._answers[number] = answer = self._loop.create_future()
        try:
            self._post({"op": "spawn", "id": number, "kind": kind, **request}, pipes.take_theirs())
        except BaseException:
            self._answers.pop(number, None)
            pipes.close()
            raise
        return number, answer

    def kill_run(self, number: int) -> None:
        """Have a command killed, with all it started."""
        if not self._gone and self._closing is None:
            self._post({"op": "kill", "id": number})

    async def _answer(self, number: int, answer: asyncio.Future[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        """What the agent says of a command. Whoever stops waiting has the command killed."""
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                message = await answer
        except TimeoutError:
            # an agent that no longer answers, stopped or starved: the sandbox cannot be trusted to end anything
            self._launched.kill()
            raise SandboxError(f"The sandbox did not end a command within {_GRACE_S:g} s of its time.") from None
        finally:
            if self._answers.pop(number, None) is not None:
                self.kill_run(number)
        if message.get("lost"):
            raise SandboxError("The sandbox was closed." if self._closing is not None else "The sandbox died.")
        if "error" in message:
            raise SandboxError(f"The sandbox could not run this: {message['error']}.")
        return message

    async def _exchange(
        self, kind: str, *, stdin: bytes | None, keep_bytes: int, timeout_s: float, **request: Any
    ) -> tuple[dict[str, Any], Drain, Drain]:
        """Run something to its end, feeding and draining its pipes."""
        pipes = Pipes(stdin is not None)
        number, answer = self._spawn(kind, pipes, timeout_s=timeout_s, **request)
        feed = Feed(pipes.stdin, stdin, close_after=True) if stdin is not None else None
        out = Drain(pipes.stdout, keep_bytes, lambda: self.kill_run(number))
        err = Drain(pipes.stderr, self.spec.output_bytes, lambda: self.kill_run(number))
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

    async def run(
        self, command: str | Sequence[str], *, stdin: str | bytes | None = None, timeout_s: float | None = None
    ) -> RunResult:
        """As in `Sandbox`."""
        limit_s = self.spec.wall_time_s if timeout_s is None else timeout_s
        cpu_s = self.spec.cpu_time_s
        async with self._turns:
            message, out, err = await self._exchange(
                "exec",
                stdin=stdin.encode() if isinstance(stdin, str) else stdin,
                keep_bytes=self.spec.output_bytes,
                timeout_s=limit_s,
                command=_command(command),
                cpu_time_s=math.ceil(limit_s) + 1 if cpu_s is None else cpu_s,
            )
        return RunResult(
            stdout=out.kept.decode(errors="replace"),
            stderr=err.kept.decode(errors="replace"),
            exit_code=None if message["timed_out"] else message["exit"],
            timed_out=message["timed_out"],
            dropped_bytes=out.dropped + err.dropped,
            elapsed_s=message["elapsed_s"],
        )

    async def start(self, command: Sequence[str]) -> SandboxProcess:
        """As in `Sandbox`."""
        pipes = Pipes(True)
        number, answer = self._spawn("exec", pipes, command=_command(command), cpu_time_s=self.spec.cpu_time_s)
        process = NativeProcess(answer, pipes, self.spec.output_bytes, lambda: self.kill_run(number))
        self._processes.add(process)
        answer.add_done_callback(lambda answer: self._processes.discard(process))
        return process

    async def read(self, path: str, *, max_bytes: int = READ_BYTES) -> bytes:
        """As in `Sandbox`."""
        message, out, err = await self._exchange(
            "read", stdin=None, keep_bytes=max_bytes, timeout_s=_FILE_S, path=os.fspath(path), max_bytes=max_bytes
        )
        _raise_for(message, err, path)
        return bytes(out.kept)

    async def write(self, path: str, data: bytes | str) -> None:
        """As in `Sandbox`."""
        content = data.encode() if isinstance(data, str) else data
        message, _, err = await self._exchange(
            "write", stdin=content, keep_bytes=0, timeout_s=_FILE_S, path=os.fspath(path)
        )
        _raise_for(message, err, path)

    # --- the end

    async def _close(self) -> None:
        try:
            # ends the sandbox even where a forked process of the caller has a copy of this end
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._lost()
        for started in list(self._processes):
            started.release()
        process = self._launched.process
        try:
            if not await ended(process, CLOSE_S):
                self._launched.kill()
                await ended(process, CLOSE_S)
            if process.returncode:
                await asyncio.to_thread(remove_left_over, self._directory)
        finally:
            self._control.close()


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
