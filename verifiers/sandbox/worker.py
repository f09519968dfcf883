"""One warm worker: a sandbox whose agent has modules imported and forks a process for each call.

Blocking throughout; it belongs to one thread, and only `abandon` may be called from others.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from verifiers.errors import ConfigError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.sandbox.child.calls import MAX_RESULT_BYTES
from verifiers.sandbox.child.wire import FrameError, Frames, send_frame
from verifiers.sandbox.launching import Launched, launch, remove_left_over, why_not
from verifiers.sandbox.spec import SandboxSpec

__all__ = ["Worker"]

# importing what a call needs is not the call's fault, and sympy takes its time on a busy machine
_IMPORT_S = 120.0
_GRACE_S = 15.0
_SEND_S = 30.0


class Abandonable(Protocol):
    """Tells whether somebody still waits for a call. Set before `Worker.abandon` is called, never cleared."""

    abandoned: bool


class Worker:
    """Calls functions in forked processes of one sandbox.

    Args:
        spec: its limits; the memory is that of a call, modules included.
        tier: "process" or "namespaces".
        preload: modules to import before the first call.
        paths: directories for sys.path.
        name: what errors call it.
    """

    def __init__(self, spec: SandboxSpec, tier: str, preload: Sequence[str], paths: Sequence[str], name: str) -> None:
        self._name = name
        self._imported: set[str] = set()
        self._numbers = 0
        self._frames = Frames()
        self._directory: str | None = None
        self._sending = threading.Lock()
        # what `abandon` may kill: the caller's token and the number of the call
        self._running: tuple[object, int] | None = None
        self._dead = False
        self.note = ""
        try:
            self._launched: Launched = launch(spec, tier, preload=preload, paths=paths)
        except OSError as error:
            raise WorkerError(f"A worker of {name!r} could not be started: {error}.") from error
        self._control = self._launched.control
        self._control.settimeout(_SEND_S)
        try:
            self._wait_until_ready(tier)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, tier: str) -> None:
        answer = self._message(time.monotonic() + _IMPORT_S)
        if answer is None:
            raise WorkerError(f"A worker of {self._name!r} was not ready within {_IMPORT_S:g} s.")
        if answer.get("kind") == "_PreloadError":
            raise WorkerError(f"A worker of {self._name!r} could not be made ready: {answer['failed']}.")
        if "failed" in answer:
            raise WorkerError(why_not(tier, answer["failed"]))
        self.note = answer["note"]
        if tier == "process":
            self._directory = answer["directory"]

    # --- messages

    def _receive(self) -> list[dict[str, Any]]:
        try:
            if self._frames.receive(self._control):
                return [message for message, _ in self._frames.messages()]
        except (OSError, FrameError):
            pass
        self._dead = True
        raise WorkerError(f"A worker of {self._name!r} died.")

    def _message(self, deadline: float) -> dict[str, Any] | None:
        """The next message, or None at the deadline."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            messages = self._receive()
            if messages:
                # one request at a time is under way, so there is never a second answer
                return messages[0]
        return None

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            send_frame(self._control, message, fds)
        except FrameError as error:
            raise ConfigError(f"A worker's arguments are too long: {error}.") from error
        except OSError as error:
            self._kill()
            raise WorkerError(f"A worker of {self._name!r} died: {error}.") from error

    def alive(self) -> bool:
        """False once its processes are gone, also when nobody was looking."""
        if self._dead or self._launched.process.poll() is not None:
            return False
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        return not poll.poll(0)

    # --- calls

    def call(
        self, function: str, args: Sequence[Any], kwargs: dict[str, Any], timeout_s: float, token: Abandonable
    ) -> Any:
        """Call a function; as `WorkerPool.call`. After a WorkerError look whether it is still alive."""
        self._import(function)
        self._numbers += 1
        number = self._numbers
        reading, writing = os.pipe()
        try:
            os.set_blocking(reading, False)
            request = {"op": "spawn", "id": number, "kind": "call", "timeout_s": timeout_s}
            request |= {"cpu_time_s": math.ceil(timeout_s) + 1, "function": function}
            request |= {"args": list(args), "kwargs": kwargs}
            try:
                with self._sending:
                    if token.abandoned:
                        raise WorkerError(f"A call in a worker of {self._name!r} was cancelled.")
                    self._running = (token, number)
                    self._send(request, [writing])
            finally:
                os.close(writing)
            data, status = self._collect(reading, number, timeout_s)
        finally:
            with self._sending:
                self._running = None
            os.close(reading)
        return self._judge(function, data, status, timeout_s)

    def _import(self, function: str) -> None:
        """Have the module imported where calls are forked from, once: the calls then find it ready."""
        module = function.partition(":")[0]
        if module in self._imported:
            return
        self._numbers += 1
        with self._sending:
            self._send({"op": "import", "id": self._numbers, "module": module})
        answer = self._message(time.monotonic() + _IMPORT_S)
        if answer is None:
            self._kill()
            raise WorkerError(f"A worker of {self._name!r} could not import {module!r} within {_IMPORT_S:g} s.")
        if answer["error"] is not None:
            raise ConfigError(
                f"A worker of {self._name!r} cannot import {module!r}: {answer['error']}. Give the pool the "
                "directory that the module is in as one of its paths."
            )
        self._imported.add(module)

    def _collect(self, reading: int, number: int, timeout_s: float) -> tuple[bytes, dict[str, Any]]:
        """What the call wrote, and what the agent says of its end."""
        deadline = time.monotonic() + timeout_s + _GRACE_S
        data = bytearray()
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        listening = True
        while True:
            events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                self._kill()
                raise WorkerTimeoutError(f"A worker of {self._name!r} did not end a call of {timeout_s:g} s.")
            ready = {fd for fd, _ in events}
            if reading in ready:
                ended = self._take(reading, data) == 0
                if len(data) > MAX_RESULT_BYTES:
                    # no answer is that long: the called function writes where it should not
                    with self._sending:
                        self._send({"op": "kill", "id": number})
                    ended = True
                if ended:
                    poll.unregister(reading)
                    listening = False
            if self._control.fileno() in ready:
                for message in self._receive():
                    if message["id"] == number:
                        while listening and len(data) <= MAX_RESULT_BYTES and self._take(reading, data):
                            pass
                        return bytes(data), message

    def _take(self, reading: int, data: bytearray) -> int | None:
        """Read what is there; how much that was, 0 at the end, None when nothing is there yet."""
        try:
            chunk = os.read(reading, 1 << 18)
        except BlockingIOError:
            return None
        data += chunk
        return len(chunk)

    def _judge(self, function: str, data: bytes, status: dict[str, Any], timeout_s: float) -> Any:
        if "error" in status:
            raise WorkerError(f"A worker of {self._name!r} could not start a call: {status['error']}.")
        if status["timed_out"]:
            raise WorkerTimeoutError(f"{function} ran past its {timeout_s:g} s in a worker of {self._name!r}.")
        answer: Any = None
        if status["exit"] == 0 and len(data) <= MAX_RESULT_BYTES:
            try:
                answer = json.loads(data)
            except (ValueError, RecursionError):
                pass
        if not isinstance(answer, dict):
            how = f"exit code {status['exit']}" if status["exit"] >= 0 else f"signal {-status['exit']}"
            raise WorkerError(
                f"{function} ended its process in a worker of {self._name!r} without an answer ({how}); "
                "the memory limit, a crash, or what it called did so."
            )
        if "value" in answer:
            return answer["value"]
        if "missing" in answer:
            raise ConfigError(f"A worker of {self._name!r} cannot call {function!r}: {answer['missing']}.")
        kind = str(answer.get("kind"))
        raise WorkerCallError(f"{function} raised {kind}: {answer.get('message')}", kind=kind)

    def abandon(self, token: Abandonable) -> None:
        """Have the call killed that was made with this token, if it still runs; from any thread."""
        with self._sending:
            if self._running is None or self._running[0] is not token:
                return
            try:
                self._send({"op": "kill", "id": self._running[1]})
            except WorkerError:
                # the thread that waits for the answer sees the same
                pass

    def _kill(self) -> None:
        self._dead = True
        self._launched.kill()

    def hang_up(self) -> None:
        """Make it end, with a call under way; from any thread. The thread that owns it still has to close it."""
        try:
            self._control.shutdown(socket.SHUT_RDWR)
        except OSError:
            # it is closed already
            pass

    def close(self) -> None:
        """End it with everything in it."""
        self.hang_up()
        self._control.close()
        process = self._launched.process
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode:
            remove_left_over(self._directory)
